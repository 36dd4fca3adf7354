"""Tables of AntGroup's DLRover, atorch/examples/llama2: Llama 2 7B on nodes of 8 A100-80GB, by FSDP and in three
dimensions.
"""

from functools import partial
from pathlib import Path

from redline.estimator import find_hardware
from redline.estimator.hardware import Link

from .form import Left, Rows, Run, columns, degrees, memory_mib, number, read_markdown, whole
from .models import model_of

INFERRED = (
    "4096 tokens a sequence; seven of eight blocks are recomputed under FSDP, since the published memory holds no more; all "
    "of them in three dimensions",
    "TFLOPs count recomputation (6 FLOPs a parameter and token alone would be 150, not 200), and no attention",
    "FSDP keeps 12 bytes a parameter sharded; three dimensions are Megatron's formats",
    "memory is what PyTorch allocated at most; left out: adapters, whose rank is not stated",
)
SEQ_LEN = 4096


def matches(path: Path, header: set[str]) -> bool:
    return path.suffix != ".csv" and header >= {"mode", "batch_per_gpu", "TFLOPs"}


def read(path: Path, source: str) -> Rows:
    for table in read_markdown(path):
        if not {"mode", "TFLOPs"} <= set(table.header):
            continue
        for at, row in table.rows:
            yield f"{path.name}:{at}", partial(_run, row, source, f"{path.name}:{at}", table.words)


def _run(row: dict[str, str], source: str, where: str, words: str) -> Run:
    if row.get("lora", "").strip() == "yes":
        raise Left("adapters of a rank that is not stated")
    found = columns(list(row))
    flops = number(row["TFLOPs"])
    devices, micro, accum = (whole(row[found[each]]) for each in ("devices", "micro_batch", "grad_accum"))
    if not flops or None in (devices, micro):
        raise Left("throughput, devices or batch is not stated")
    tp, pp = whole(row["tp"], 1), whole(row["pp"], 1)
    split = degrees(devices, tp=tp, pp=pp)
    fsdp = row["mode"].strip().upper() == "FSDP"
    # The tables of three dimensions state the accumulation with the global batch.
    config = {**split, "micro_batch": micro, "grad_accum": accum or 1, "zero": 3 if fsdp else 1,
              "sequence_parallel": tp > 1, "checkpoint_ratio": 0.875 if fsdp else 1.0}  # fmt: skip
    model = model_of("llama2-7b")
    facts = model.facts(precision="bf16_pure", attention="sdpa", fusion=False)
    matrices = sum(part.count * item.k * item.n * item.count for part in facts.parts for item in part.matmuls)
    tokens = config["micro_batch"] * config["grad_accum"] * split["dp"] * SEQ_LEN
    return Run(
        source=source,
        where=where,
        model=model,
        hardware=find_hardware("a100-80gb").replace(
            inter_node=Link(name="800 Gbit/s for 8", gb_per_s=12.5, latency_us=25.0)
        ),
        framework="fsdp" if fsdp else "megatron",
        setup={"seq_len": SEQ_LEN, "reserved_memory": False},
        config=config,
        step_ms=8.0 * matrices * tokens / (flops * 1e12 * devices) * 1e3,
        memory_mib=memory_mib(row[found["memory"]], found["memory"]) if "memory" in found else None,
    )
