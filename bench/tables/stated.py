"""Tables with a row for each training as its source states it: `model, hw, gpus, seq` and the degrees, formats and results
that are known. They are of NVIDIA's recipes (tensor, pipeline and expert parallelism) and of fine-tuning with transformers'
Trainer."""

import re
from functools import partial
from pathlib import Path
from typing import Any

from redline.estimator import find_hardware

from .form import Left, Rows, Run, batches, degrees, number, read_csv, spread_of, whole
from .megatron_bridge import RECOMPUTED, recipe_setup, trainer_at
from .models import model_of

INFERRED = (
    "rows that state tp, pp or ep are recipes of Megatron-Core, whose facts are those of `megatron_bridge`; of 2025 where no "
    "version is stated, and with experts of a fixed capacity of 1 where the source is NeMo's recipe of Grok-1",
    "other rows are fine-tuning by transformers' Trainer with fused attention: DeepSpeed where a ZeRO stage is stated, bf16 "
    "weights with fp32 master weights and states under DeepSpeed, autocast over fp32 weights otherwise",
    "Qwen's full fine-tuning is that of its finetune_ds.sh, ZeRO 3 on one device too",
    "open-r1's is that of its recipe OlympicCoder-32B: FSDP of a model in bf16, AdamW with states in 8 bits",
    "memory is what PyTorch's allocator reserved, 1e9 bytes; meas_s of fine-tuning is that of a step of all its micro-batches",
    "left out: adapters, quantised weights",
)
_NEEDED = {"model", "hw", "gpus", "seq"}


def matches(path: Path, header: set[str]) -> bool:
    return header >= _NEEDED and bool(header & {"meas_s", "status"})


def read(path: Path, source: str) -> Rows:
    for at, row in read_csv(path):
        where = f"{path.name}:{at}"
        recipe = any(row.get(name, "").strip() for name in ("tp", "pp", "ep"))
        yield where, partial(_recipe if recipe else _fine_tuning, row, source, where)


def _recipe(row: dict[str, str], source: str, where: str) -> Run:
    model, devices, seq_len = model_of(row["model"]), whole(row["gpus"]), whole(row["seq"])
    seconds, micro = number(row.get("meas_s")), whole(row.get("mb"), 1)
    if devices is None or seq_len is None or seconds is None:
        raise Left("devices, sequence or step time is not stated")
    tp, pp, cp, ep, chunks = (whole(row.get(name), 1) for name in ("tp", "pp", "cp", "ep", "vp"))
    split = degrees(devices, tp=tp, pp=pp, cp=cp)
    spread = spread_of(ep, tp, whole(row.get("etp"), tp), split) if model.experts else {}
    precision = row.get("precision", "").strip().lower()
    if not precision:
        raise Left("the precision is not stated")
    chunks = min(chunks, model.layers // pp)
    several, hardware = pp > 1 and chunks > 1, find_hardware(row["hw"])
    capacity = {"capacity_factor": 1.0} if "grok" in model.name else {}
    config = {
        **split, **batches(split["dp"], micro, whole(row.get("gbs")), whole(row.get("ga"))), **spread, **capacity,
        "zero": whole(row.get("zero")) or 1, "sequence_parallel": tp > 1,
        **({"virtual_stages": chunks, "pipeline_schedule": "interleaved"} if several else {}),
    }  # fmt: skip
    return Run(
        source=source,
        where=where,
        model=model,
        hardware=hardware,
        framework=trainer_at(" ".join(row.get(name, "") for name in ("container", "version", "framework"))),
        setup={
            "seq_len": seq_len,
            **recipe_setup(precision, tp, pp, several and ep <= hardware.devices_per_node),
        },
        config=config,
        choices=_ratio(row) or RECOMPUTED,
        step_ms=seconds * 1e3,
    )


def _ratio(row: dict[str, str]) -> "tuple[dict[str, Any], ...]":
    ratio = number(row.get("ckpt"))
    return () if ratio is None else ({"checkpoint_ratio": min(ratio, 1.0)},)


def _fine_tuning(row: dict[str, str], source: str, where: str) -> Run:
    method = row.get("method", "full").strip().lower() or "full"
    if method != "full":
        raise Left("adapters")
    if row.get("quant", "").strip():
        raise Left("quantised weights")
    devices, seq_len, micro = whole(row["gpus"]), whole(row["seq"]), whole(row.get("mb"))
    qwen, open_r1 = (name in row.get("source", "").lower() for name in ("qwenlm/qwen", "open-r1"))
    if devices is None or seq_len is None or micro is None:
        raise Left("devices, sequence or micro-batch is not stated")
    status = row.get("status", "ok").strip().lower() or "ok"
    seconds, memory, zero = (
        number(row.get("meas_s")),
        number(row.get("meas_gib")),
        whole(row.get("zero"), 3 if qwen else 0),
    )
    if status == "ok" and seconds is None and memory is None and "status" not in row:
        raise Left("it has no measurement")
    if "offload" in row.get("note", "").lower():
        raise Left("what it offloads is not stated")
    return Run(
        source=source,
        where=where,
        model=model_of(re.sub(r"^models/", "", row["model"])),
        hardware=find_hardware(row["hw"]),
        framework="fsdp" if open_r1 else "deepspeed" if zero else "trainer",
        setup={"seq_len": seq_len, "attention": "flash_attention_2", **({"optimizer_dtype": "int8"} if open_r1 else {})},
        config={"tp": 1, "pp": 1, "dp": devices, "zero": zero, "micro_batch": micro,
                "grad_accum": whole(row.get("ga"), 1), "checkpoint_ratio": min(number(row.get("ckpt")) or 0.0, 1.0)},
        step_ms=seconds * 1e3 if seconds and status == "ok" else None,
        memory_mib=memory * 1e9 / 1024**2 if memory and status == "ok" else None,
        failed=status == "oom",
    )  # fmt: skip
