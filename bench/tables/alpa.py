"""Tables of Alpa's OSDI'22 artefact: GPT by Alpa and by Megatron-LM on AWS p3.16xlarge, 8 V100-16GB each."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from redline.estimator import Shape, find_hardware
from redline.estimator.hardware import Link

from .form import Left, Rows, Run

INFERRED = (
    "the artefact's GPT sizes (sequence 1024, 1024 sequences of a step, vocabulary 51,200) by the count of parameters",
    "fp16 with fp32 master weights and states; every block recomputed; 25 Gbit/s between hosts",
    "plans are implicit: of all degrees and micro-batches the one that is predicted fastest and fits; `intra_only` has no "
    "pipeline, `inter_only` nothing else",
    "where no latency is there, it follows from TFLOPs, which count recomputation: 96 B s L h² (1 + s / 6h + V / 16Lh)",
    "left out: mixtures of experts, Wide-ResNet, ablations whose sizes are not stated, and what did not run",
)
# Count of parameters in 1e9, width, layers, heads.
_SIZES = ((0.355, 1024, 24, 16), (0.76, 1536, 24, 16), (1.3, 2048, 24, 32), (2.65, 2560, 32, 32), (6.65, 4096, 32, 32),
          (15.3, 5120, 48, 40), (39.1, 8192, 48, 64))  # fmt: skip
SEQ_LEN, VOCABULARY, SAMPLES = 1024, 51200, 1024


def matches(path: Path, header: set[str]) -> bool:
    if path.suffix != ".tsv":
        return False
    lines = [line.split("\t") for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return any(len(each) >= 7 and each[6].startswith("{") and "param_count" in each[6] for each in lines)


def read(path: Path, source: str) -> Rows:
    for at, line in enumerate(path.read_text().splitlines(), 1):
        cells = line.split("\t")
        if len(cells) < 7 or line.startswith("#"):
            continue
        yield f"{path.name}:{at}", partial(_run, cells, source, f"{path.name}:{at}")


def _run(cells: list[str], source: str, where: str) -> Run:
    kind, _, hosts, each, model, how, found = (cell.strip() for cell in cells[:7])
    if kind != "e2e" or model.lower() != "gpt":
        raise Left(f"{kind} of {model}")
    try:
        entry = json.loads(re.sub(r"'", '"', found))
        hosts, each = int(hosts), int(each)
    except ValueError:
        raise Left("it cannot be read") from None
    count, flops = float(entry.get("param_count", 0)), float(entry.get("tflops", 0))
    size = min(_SIZES, key=lambda known: abs(known[0] - count))
    if flops <= 0 or abs(size[0] - count) > 0.06 * size[0]:
        raise Left("it did not run, or its size is not known")
    devices = hosts * each
    _, hidden, layers, heads = size
    total = 96 * SAMPLES * SEQ_LEN * layers * hidden**2
    total *= 1 + SEQ_LEN / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
    latencies = [float(one) for one in entry.get("latencies", []) if float(one) > 0]
    step = sorted(latencies)[len(latencies) // 2] if latencies else total / (flops * 1e12 * devices)
    choices = tuple(_plans(devices, layers, how))
    if not choices:
        raise Left("its stages have fewer layers than one")
    hardware = find_hardware("v100-16gb").replace(
        inter_node=Link(name="25 Gbit/s for 8", gb_per_s=3.1 / 8, latency_us=40.0)
    )
    return Run(
        source=source,
        where=where,
        model=Shape(name=f"gpt-{size[0]}b", layers=layers, hidden=hidden, heads=heads, vocabulary=VOCABULARY, gated=False,
                    tied=True, biases=True, positions=SEQ_LEN),
        hardware=hardware,
        framework="megatron",
        setup={"seq_len": SEQ_LEN, "global_batch": SAMPLES, "gradient_dtype": "fp16", "attention": "eager", "products": "fp16"},
        config={"checkpoint_ratio": 1.0, "precision": "bf16_pure"},
        choices=choices,
        step_ms=step * 1e3,
        memory_mib=float(entry["peak_mem"]) * 1024 if entry.get("peak_mem") else None,
    )  # fmt: skip


def _plans(devices: int, layers: int, how: str) -> Iterator[dict[str, int]]:
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16, 32, 64):
            dp, rest = divmod(devices, tp * pp)
            if rest or dp < 1 or pp > layers:
                continue
            if ("intra_only" in how and pp > 1) or ("inter_only" in how and (tp > 1 or dp > 1)):
                continue
            for micro in (1, 2, 4, 8, 16, 32):
                if SAMPLES % (micro * dp) == 0:
                    yield {"tp": tp, "pp": pp, "dp": dp, "micro_batch": micro, "grad_accum": SAMPLES // (micro * dp),
                           "zero": 1}  # fmt: skip
