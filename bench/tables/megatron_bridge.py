"""NVIDIA's performance tables of NeMo and Megatron-Bridge: tuned recipes without memory, which all ran."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from redline.estimator import Shape, find_hardware

from .form import (
    Left,
    Rows,
    Run,
    batches,
    columns,
    degrees,
    number,
    plain,
    read_csv,
    read_markdown,
    spread_of,
    step_of,
    whole,
)
from .models import model_of

INFERRED = (
    "distributed optimizer (ZeRO 1), or ZeRO 3 over all replicas where FSDP is not 0",
    "gradients in bf16 (grad_reduce_in_fp32=False of their recipes), fp32 master weights; gradients and weights are exchanged "
    "behind the passes, tensor parallelism's behind products",
    "Transformer Engine's fused attention and norms, fused cross-entropy; attention's scores are never kept",
    "tables without precision or device are of FP8 on H100, as their pages say; `Batch Size` of long sequences is the global one",
    "recomputation is not stated: as many blocks as memory needs (an eighth at a time), since all recipes ran",
    "sequence parallelism wherever tp > 1; chunks of pipelines (VP) as stated, else the fastest that divide the layers",
    "GB200 and GB300 have 72 devices in one NVLink domain, the others 8",
    "where pp * VP is more than the layers, embedding and head are layers of their own: VP is what the blocks allow",
    "mixtures of experts: experts are whole (etp=1), their products grouped; their gradients are exchanged among replicas with "
    "the same experts, tokens are spread as evenly as anywhere, and sent once to each node (DeepEP, HybridEP)",
    "DeepSeek-V3 and Kimi-K2 predict one token each (no MTP) unless their rows say otherwise",
    "left out: Mamba layers, LoRA, MTP, and pages that repeat an earlier page's row",
)
_SYSTEMS = {"h100": "h100-80gb", "h200": "h200-141gb", "b200": "b200", "b300": "b300", "gb200": "gb200", "gb300": "gb300",
            "a100": "a100-80gb"}  # fmt: skip
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}

RECOMPUTED = tuple({"checkpoint_ratio": step / 8} for step in range(9))


def _open(pp: int, layers: int, stated: bool) -> tuple[dict[str, Any], ...]:
    """Returns the settings that recipes do not state: recomputation, and chunks of a pipeline if no column has them."""
    if stated:
        return RECOMPUTED
    chunks = [each for each in range(2, layers // pp + 1) if layers % (pp * each) == 0]
    several = [{"virtual_stages": each, "pipeline_schedule": "interleaved"} for each in chunks]
    return tuple({**each, **order} for each in RECOMPUTED for order in ({}, *several))


def matches(path: Path, header: set[str]) -> bool:
    found = columns(sorted(header))
    return {"devices", "global_batch", "tp"} <= set(found) and bool({"tokens_per_device", "tflops"} & set(found))


def read(path: Path, source: str) -> Rows:
    if path.suffix == ".csv":
        yield from rows(read_csv(path), source, path.name, {})
        return
    for table in read_markdown(path):
        words = table.words.lower()
        found = columns(table.header)
        if "devices" not in found or "tp" not in found or not {"tokens_per_device", "tflops"} & set(found):
            continue
        about: dict[str, str] = {"section": words}
        if model := re.search(r"(llama\s?-?[\d.]+-\d+b)", words):
            about["model"] = model[1]
        elif "long input" in words:
            about["model"] = "LLAMA2-7B"
        about["device"] = next((each for each in _SYSTEMS if re.search(rf"\b{each}\b", words)), "h100")
        about["container"] = words
        about["precision"] = next((each for each in ("mxfp8", "nvfp4", "fp8", "bf16") if each in words), "fp8")
        yield from rows(table.rows, source, path.name, about)


def rows(
    given: "Iterator[tuple[int, dict[str, str]]] | tuple", source: str, name: str, about: Mapping[str, str]
) -> Rows:
    for at, row in given:
        yield f"{name}:{at}", partial(_run, row, source, f"{name}:{at}", about)


def _run(row: dict[str, str], source: str, where: str, about: Mapping[str, str]) -> Run:
    found = columns(list(row))
    cells = {what: row[column] for what, column in found.items() if row[column].strip()}
    if "lora" in " ".join(row.values()).lower():
        raise Left("it trains adapters")
    model = model_of(cells.get("model") or about.get("model") or "none stated")
    system = (cells.get("device") or about.get("device", "")).lower().replace("dgx-", "").strip()
    if system not in _SYSTEMS:
        raise Left(f"the system '{system}' is not known")
    devices, seq_len = whole(cells.get("devices")), whole(cells.get("seq_len"))
    if seq_len is not None and "(k)" in plain(found["seq_len"]):
        seq_len *= 1024
    if devices is None or seq_len is None:
        raise Left("devices or sequence is not stated")
    fsdp = whole(cells.get("fsdp"), 1)
    tp, pp, cp, ep, chunks = (whole(cells.get(each), 1) for each in ("tp", "pp", "cp", "ep", "chunks"))
    split = degrees(devices, tp=tp, pp=pp, cp=cp)
    spread = spread_of(ep, tp, 1, split) if model.experts else {}
    sizes = batches(split["dp"], whole(cells.get("micro_batch"), 1), whole(cells.get("global_batch")), None)
    if pp * chunks > model.layers:
        chunks = model.layers // pp  # embedding and head counted as separate layers
    several, hardware = pp > 1 and chunks > 1, find_hardware(_SYSTEMS[system])
    word = (cells.get("precision") or about.get("precision", "")).lower()
    if not word:
        raise Left("the precision is not stated")
    precision = next(
        (value for name, value in sorted(_PRECISIONS.items(), reverse=True) if word.startswith(name)), None
    )
    if precision is None:
        raise Left(f"the precision '{word}' is not known")
    config = {
        **split, **sizes, **spread, "zero": 3 if fsdp > 1 else 1, "sequence_parallel": tp > 1,
        **({"virtual_stages": chunks, "pipeline_schedule": "interleaved"} if several else {}),
    }  # fmt: skip
    rate, flops = number(cells.get("tokens_per_device")), number(cells.get("tflops"))
    if rate is None and flops is not None:
        rate = flops * 1e12 / _flops(model, seq_len)
    if rate is None:
        raise Left("it has no throughput")
    return Run(
        source=source,
        where=where,
        model=model,
        hardware=hardware,
        framework=trainer_at(row.get("container") or about.get("container", "")),
        setup={
            "seq_len": seq_len,
            **recipe_setup(precision, tp, pp, several and ep <= hardware.devices_per_node),
        },
        config=config,
        choices=_open(pp, model.layers, "chunks" in cells or pp == 1),
        step_ms=step_of(config, seq_len, tokens_per_device=rate),
    )


def trainer_at(container: str) -> str:
    """Returns the trainer of a container such as `26.02 NeMo Container`, of 2025's first ones where none is stated."""
    version = re.search(r"\b2\d\.\d\d\b", container)
    return f"megatron-bridge@{version[0] if version else '25.02'}"


def recipe_setup(precision: str, tp: int, pp: int, hidden: bool) -> dict[str, Any]:
    """Returns the fields of the setup that NVIDIA's recipes share; `hidden` if exchanges of experts can be hidden: in interleaved
    pipelines, within a node."""
    return {
        "loss": "fused",
        "gradient_dtype": "bf16",
        "overlap_gradients": True,
        "overlap_gathers": True,
        "overlap_transfers": pp > 1,
        "overlap_tensor": tp > 1,
        **({} if hidden else {"overlap_experts": False}),
        **({} if precision == "bf16" else {"products": precision}),
    }


def _flops(model: Shape, seq_len: int) -> float:
    """Returns FLOPs of a token as NVIDIA's tables count them: attention over the whole square."""
    return model.facts(precision="bf16_pure", attention="sdpa", fusion=False).model_flops(seq_len)
