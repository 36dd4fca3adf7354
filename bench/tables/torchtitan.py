"""Tables in the benchmarks/ pages of PyTorch's torchtitan: Llama 3 by FSDP2, tensor, pipeline and context parallelism."""

import re
from functools import partial
from pathlib import Path

from redline.estimator import Hardware, find_hardware

from .form import Left, Rows, Run, Table, batches, columns, degrees, memory_mib, number, read_markdown, step_of, whole
from .models import model_of

INFERRED = (
    "the pages' H100s have 96 GB of HBM2e (2.4 TB/s) and 500 W",
    "8192 tokens a sequence where no column says so",
    "FSDP2, reshard after forward; gradients and reductions in fp32, gathered in bf16; under pipelines weights stay gathered and "
    "gradients whole",
    "selective checkpointing keeps every other product and attention of a block; memory is what the allocator reserved",
    "float8 is of linear layers but the head's; tensorwise gathers in 8 bits",
    "interleaved pipelines have two chunks a rank; `Local batch size` of a pipeline is all its micro-batches, as "
    "many as stages",
)


def matches(path: Path, header: set[str]) -> bool:
    return path.suffix != ".csv" and bool(header & {"TPS/GPU", "Vanilla TP tokens/sec"})


def machine() -> Hardware:
    base = find_hardware("h100-80gb")
    return base.replace(name="h100-96gb-500w", memory_gib=94.5, memory_gb_per_s=2400.0, watts=500)


def read(path: Path, source: str) -> Rows:
    for table in read_markdown(path):
        found = columns(table.header)
        if not {"tokens", "tokens_per_device"} & set(found):
            continue
        for at, row in table.rows:
            yield f"{path.name}:{at}", partial(_run, row, table, source, f"{path.name}:{at}")


def _int(words: str, pattern: str) -> int | None:
    found = re.search(pattern, words, re.IGNORECASE)
    return int(found[1]) if found else None


def _run(row: dict[str, str], table: Table, source: str, where: str) -> Run:
    title, cells = table.words, " ".join(row.values())
    found = columns(list(row))
    name = re.search(r"llama\s?[\d.]+ \d+b", title, re.IGNORECASE)
    devices = _int(title, r"(\d+) (?:GPU|H100)s")
    if name is None or devices is None:
        raise Left("model or devices is not stated")
    words = f"{cells} {title}"  # degrees in the row come first
    tp, cp, pp = (_int(words, rf"\b{each}[ =]?(\d+)") or 1 for each in ("TP", "CP", "PP"))
    split = degrees(devices, tp=tp, cp=cp, pp=pp)
    local = _int(title, r"local batch size (\d+)")
    total = _int(title, r"global batch size (\d+)")
    seq_len = whole(row[found["seq_len"]]) if "seq_len" in found else 8192
    rate = number(row[found.get("tokens_per_device") or found["tokens"]])
    if rate is None or local is None or seq_len is None:
        raise Left("throughput, batch or sequence is not stated")
    # The local batch of a pipeline contains all samples of its ranks in a step: by default one micro-batch per stage.
    sizes = (
        {"micro_batch": max(local // pp, 1), "grad_accum": min(local, pp)}
        if pp > 1
        else batches(split["dp"], local, total, None)
    )
    selective = re.search(r"selective activation|SAC", title, re.IGNORECASE) is not None
    precision = row.get("Quantization", title if "float8" in title.lower() else cells).lower()
    interleaved = "interleaved" in cells.lower()
    config = {
        **split, **sizes, "zero": 2 if pp > 1 else 3, "sequence_parallel": tp > 1, "fusion": "compile" in words,
        "checkpoint_ratio": 0.0 if selective else 1.0,
        **({"virtual_stages": 2, "pipeline_schedule": "interleaved"} if interleaved else {}),
    }  # fmt: skip
    memory = memory_mib(row[found["memory"]], found["memory"]) if "memory" in found else None
    return Run(
        source=source,
        where=where,
        model=model_of(name[0]),
        hardware=machine(),
        framework="torchtitan",
        setup={
            "seq_len": seq_len,
            **({"products": "fp8"} if "float8" in precision else {}),
            "keeps_products": selective,
            "unsharded_gradients": pp > 1,
            "overlap_tensor": "asynctp" in words.lower(),
        },
        config=config,
        step_ms=step_of(config, seq_len, tokens_per_device=rate),
        memory_mib=memory,
    )
