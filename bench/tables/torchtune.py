"""Tables in the README of PyTorch's torchtune: savings and cost of each technique on one device."""

from functools import partial
from pathlib import Path

from redline.estimator import find_hardware

from .form import Left, Rows, Run, columns, memory_mib, number, read_markdown
from .models import model_of

INFERRED = (
    "the table of techniques: Llama 3.2 3B on one A100-80GB, batch 2 of 4096 tokens packed (its README), bf16 throughout, "
    "fused AdamW; techniques add up from row to row",
    "left out: rows without packing, whose lengths are not stated, offload, 8-bit states and adapters; the table of models, "
    "which states no batch",
)


def matches(path: Path, header: set[str]) -> bool:
    return path.suffix != ".csv" and header >= {"Technique", "Tokens Per Second"}


def read(path: Path, source: str) -> Rows:
    for table in read_markdown(path):
        done: set[str] = set()
        for at, row in table.rows:
            where = f"{path.name}:{at}"
            done = done | {word for word in _WORDS if word in row.get("Technique", "").lower()}
            yield where, partial(_run, row, done, source, where)


_WORDS = ("packed", "compile", "chunked", "checkpointing", "optimizer step", "offloading", "8-bit", "lora")


def _run(row: dict[str, str], done: set[str], source: str, where: str) -> Run:
    if "Technique" not in row or "Tokens Per Second" not in row:
        raise Left("batch and length are not stated")
    if unknown := done & {"offloading", "8-bit", "lora", "optimizer step"}:
        raise Left(f"{', '.join(sorted(unknown))} cannot be stated")
    if "packed" not in done:
        raise Left("lengths are not stated")
    rate = number(row["Tokens Per Second"])
    column = columns(list(row)).get("memory")
    memory = memory_mib(row[column], column) if column else next(
        (memory_mib(value, name) for name, value in row.items() if "Memory" in name), None
    )  # fmt: skip
    return Run(
        source=source,
        where=where,
        model=model_of("llama3.2-3b"),
        hardware=find_hardware("a100-80gb"),
        framework="trainer",
        setup={"seq_len": 4096, "precision": "bf16_pure", "reserved_memory": False, "fused_optimizer": True},
        config={"tp": 1, "pp": 1, "dp": 1, "micro_batch": 2, "grad_accum": 1, "zero": 0, "fusion": "compile" in done,
                "kernels": "chunked" in done, "checkpoint_ratio": float("checkpointing" in done)},
        step_ms=2 * 4096 / rate * 1e3 if rate else None,
        memory_mib=memory,
    )  # fmt: skip
