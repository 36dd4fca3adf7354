"""Tables of IBM's fms-acceleration: transformers' Trainer on one device, with FSDP on several; full training and
adapters.
"""

import statistics
from functools import partial
from pathlib import Path

from redline.estimator import find_hardware

from .form import MIB, Left, Rows, Run, flag, number, read_csv, whole
from .models import model_of

INFERRED = (
    "weights, gradients and AdamW's states in 16 bits (torch_dtype), the update by operators over all parameters (foreach)",
    "where the column bf16 is True accelerate widens FSDP's pieces to fp32",
    "every block is recomputed (gradient_checkpointing: True in defaults.yaml); flash attention (use_flash_attn)",
    "several devices: FSDP, everything sharded; no accumulation but where a column says so",
    "tokens of a sample: tokens a second and device times devices over samples a second, of failures the file's median",
    "foak has fused norms, rotary positions and cross-entropy; liger's loss never forms the logits",
    "memory is what PyTorch allocated at most; where only nvidia-smi's is there, that less the context",
    "adapters are of the linear layers of target_modules; bnb and GPTQ keep the others' weights in 4 bits",
    "rows without throughput failed",
    "left out: mixtures of experts",
)
_NEEDED = {"framework_config", "train_samples_per_second", "train_tokens_per_second"}
WIDE = {"parameter_dtype": "fp32", "gradient_dtype": "fp32", "pieces": True}
CONTEXT_MIB = 1200.0
"""Memory that nvidia-smi counts in addition to the allocator's."""


def matches(path: Path, header: set[str]) -> bool:
    return header >= _NEEDED


def read(path: Path, source: str) -> Rows:
    given = list(read_csv(path))
    lengths = [length for _, row in given if (length := _length(row)) is not None]
    usual = round(statistics.median(lengths)) if lengths else 4096
    for at, row in given:
        yield f"{path.name}:{at}", partial(_run, row, source, f"{path.name}:{at}", path.name, usual)


def _length(row: dict[str, str]) -> float | None:
    samples, tokens = (number(row.get(f"train_{each}_per_second")) for each in ("samples", "tokens"))
    count = number(row.get("num_gpus"))
    return tokens * count / samples if samples and tokens and count else None


def _run(row: dict[str, str], source: str, where: str, file: str, usual: int) -> Run:
    name, how = row.get("model_name_or_path", ""), row["framework_config"]
    devices, micro = whole(row.get("num_gpus")), whole(row.get("per_device_train_batch_size"))
    if not name or devices is None or micro is None:
        raise Left("model, devices or batch is not stated")
    if row.get("error_messages"):
        raise Left(f"it failed by {row['error_messages'][:60]}")
    if "moe" in how:
        raise Left("a mixture of experts")
    shape = model_of(name)
    lora = row.get("peft_method") == "lora"
    if lora:
        raise Left("adapters")
    accum = whole(row.get("gradient_accumulation_steps"), 1)
    samples = number(row["train_samples_per_second"])
    allocated, seen = number(row.get("mem_peak_torch_mem_alloc_in_bytes")), number(row.get("mem_nvidia_mem_reserved"))
    memory = allocated / MIB if allocated else max(seen - CONTEXT_MIB, 1.0) if seen else None
    fast = "foak" in how or "fast-kernels" in how
    length = _length(row)
    return Run(
        source=source,
        where=where,
        model=shape,
        hardware=find_hardware("l40" if "l40" in file else "a100-80gb"),
        framework="trainer",
        setup={
            "seq_len": max(round(length), 1) if length else usual,
            "reserved_memory": not allocated,
            "attention": "sdpa",
            "kernels": fast,
            "precision": "bf16_pure",
            "fused_optimizer": False,
            **({"loss": "chunked"} if "liger" in how else {}),
            **(WIDE if devices > 1 and flag(row.get("bf16")) else {}),
        },
        config={"tp": 1, "pp": 1, "dp": devices, "zero": 3 if devices > 1 else 0, "micro_batch": micro, "grad_accum": accum,
                "checkpoint_ratio": 1.0},
        step_ms=micro * accum * devices / samples * 1e3 if samples else None,
        memory_mib=memory if samples else None,
        failed=not samples,
    )  # fmt: skip
