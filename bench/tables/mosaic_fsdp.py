"""Tables of MosaicML's llm-foundry, scripts/train/benchmarking: MPT by Composer and PyTorch's FSDP. All rows ran."""

from functools import partial
from pathlib import Path

from redline.estimator import find_hardware

from .form import Left, Rows, Run, batches, flag, number, read_csv, whole
from .models import mpt

INFERRED = (
    "FSDP 1 of whole blocks, FULL_SHARD: shards of weights, gradients and AdamW's states in fp32, gathered in bf16",
    "the residual stream and norms in bf16 (FSDP's mixed precision casts inputs; low_precision_layernorm)",
    "the loss is flash-attn's fused cross-entropy; attention is a fused kernel",
    "MP Mode PURE reduces gradients in bf16, DEFAULT in fp32",
    "amp_fp8 is Transformer Engine's in linear layers",
    "MFU above 80 % and micro-batches below 1 are faults of the table",
)
_NEEDED = {"SeqLen (T)", "# GPUs", "MicroBatchSize", "Sharding Strategy"}


def matches(path: Path, header: set[str]) -> bool:
    return header >= _NEEDED


def read(path: Path, source: str) -> Rows:
    for at, row in read_csv(path):
        yield f"{path.name}:{at}", partial(_run, row, source, f"{path.name}:{at}")


def _run(row: dict[str, str], source: str, where: str) -> Run:
    if (number(row.get("MFU")) or 0.0) > 80:
        raise Left(f"its MFU is {row['MFU']} %")
    if row.get("Sharding Strategy") != "FULL_SHARD":
        raise Left(f"its sharding is '{row.get('Sharding Strategy')}'")
    if flag(row.get("Activation CPUOffload")):
        raise Left("it offloads activations")
    seq_len, devices = whole(row["SeqLen (T)"]), whole(row["# GPUs"])
    tokens = number(row.get("Throughput (T/s)"))
    if seq_len is None or devices is None or not tokens:
        raise Left("it states no sequence, devices or throughput")
    eight = "fp8" in row["Precision"]
    total = whole(row["GlobalBatchSize"])
    sizes = batches(devices, whole(row["MicroBatchSize"]), total, whole(row["GradAccum"]))
    pure = row.get("MP Mode") == "PURE"
    return Run(
        source=source,
        where=where,
        model=mpt(row["Model"], seq_len),
        hardware=find_hardware(row["GPU"].replace("_", "-")),
        framework="fsdp",
        setup={"seq_len": seq_len, "reduce_dtype": "bf16" if pure else "fp32", "attention_kernel": "flash1", "loss": "fused",
               "kernels": True, **({"products": "fp8"} if eight else {})},
        config={"tp": 1, "pp": 1, "dp": devices, "zero": 3, **sizes,
                "checkpoint_ratio": float(flag(row["Activation Checkpointing"]))},
        step_ms=sizes["micro_batch"] * sizes["grad_accum"] * devices * seq_len / tokens * 1e3,
    )  # fmt: skip
