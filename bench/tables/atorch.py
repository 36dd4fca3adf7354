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
    "its scripts: 4096 tokens a sequence, every block recomputed by a wrapper from outside (so that keys and values stay), "
    "flash attention, fp32 norms by operators; TFLOPs count recomputation of blocks and attention over the whole square",
    "FSDP under autocast alone: weights in fp32, gathered in it; three dimensions are DeepSpeed's in fp16 with fp32 master "
    "weights, all-reduces of whole activations, and a loss over parts of the vocabulary",
    "memory is what PyTorch allocated at most; left out: adapters",
)
SEQ_LEN = 4096
AUTOCAST = {"precision": "bf16", "gather_dtype": "fp32", "keeps_cache": True}


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
    config = {
        **split,
        "micro_batch": micro,
        "grad_accum": accum or 1,
        "zero": 3 if fsdp else 1,
        "checkpoint_ratio": 1.0,
    }
    model = model_of("llama2-7b")
    facts = model.facts(precision="bf16_pure", attention="sdpa", fusion=False)
    counted = facts.model_flops(SEQ_LEN) * 4 / 3 - 2 * model.hidden * model.vocabulary
    tokens = config["micro_batch"] * config["grad_accum"] * split["dp"] * SEQ_LEN
    return Run(
        source=source,
        where=where,
        model=model,
        hardware=find_hardware("a100-80gb").replace(
            inter_node=Link(name="800 Gbit/s for 8", gb_per_s=12.5, latency_us=25.0)
        ),
        framework="fsdp" if fsdp else "deepspeed",
        setup={"seq_len": SEQ_LEN, "reserved_memory": False, **(AUTOCAST if fsdp else {"loss": "parallel"})},
        config=config,
        step_ms=counted * tokens / (flops * 1e12 * devices) * 1e3,
        memory_mib=memory_mib(row[found["memory"]], found["memory"]) if "memory" in found else None,
    )
