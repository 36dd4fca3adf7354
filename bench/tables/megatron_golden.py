"""Golden values of the functional tests of NVIDIA's Megatron-LM: GPT and BERT by tensor, pipeline, context and data
parallelism.
"""

from functools import partial
from pathlib import Path

from redline.estimator import Shape, find_hardware

from .form import Left, Rows, Run, batches, degrees, flag, number, read_csv, spread_of, whole

INFERRED = (
    "8 devices of a node, of GB200 4; where the degrees need more, as many as they need",
    "GPT-2's vocabulary of 50,257 (BERT's of 30,522) is padded to a multiple of 128 times tp; learned positions",
    "memory is what PyTorch's allocator gave the last rank at most; attention is Transformer Engine's fused kernel, and "
    "`transformer-impl local` keeps scores in fp32",
    "distributed optimizer is ZeRO 1; weights bf16 or fp16, gradients and master weights fp32, added up by the kernels of "
    "products (gradient accumulation fusion)",
    "iteration times of a 512-wide model are launches; deterministic mode has slower kernels",
    "mixtures of experts: every block has one, of the inner size of a dense block; experts are cut over tp ranks where "
    "expert-tensor-parallel-size is not stated; one expert a token where topk is not",
    "left out: multi-head latent attention, T5, hybrid and multimodal models, inference, FSDP of Megatron's own",
)
_NEEDED = {"suite", "iteration_time_s_median", "tensor-model-parallel-size"}
_DEVICES = {"a100": "a100-80gb", "h100": "h100-80gb", "gb200": "gb200", "b200": "b200", "h200": "h200-141gb"}


def matches(path: Path, header: set[str]) -> bool:
    return header >= _NEEDED


def read(path: Path, source: str) -> Rows:
    for at, row in read_csv(path):
        yield f"{path.name}:{at}", partial(_run, row, source, f"{path.name}:{at}")


def _run(row: dict[str, str], source: str, where: str) -> Run:
    suite, case, experts = row["suite"], row.get("case", ""), whole(row.get("num-experts"), 0)
    if suite not in ("gpt", "bert", "mixtral", "nemotron", "moe") or ("moe" in (suite, case) and not experts):
        raise Left(f"suite '{suite}' with experts '{row.get('num-experts', '')}'")
    if experts and (suite == "nemotron" or "deepseek" in case or "grpo" in case):
        raise Left("a mixture with latent attention or Mamba layers")
    if row.get("use-megatron-fsdp") or row.get("use-torch-fsdp2") or row.get("data-parallel-sharding-strategy"):
        raise Left("Megatron's own FSDP")
    if "inference" in row.get("transformer-impl", "") or row.get("cpu-offloading") or row.get("optimizer-cpu-offload"):
        raise Left("inference or offload")
    if row["device"] not in _DEVICES:
        raise Left(f"the device '{row['device']}' is not known")
    layers, hidden, heads = (whole(row[f"{each}"]) for each in ("num-layers", "hidden-size", "num-attention-heads"))
    seq_len, micro = whole(row["seq-length"]), whole(row["micro-batch-size"])
    if None in (layers, hidden, heads, seq_len, micro):
        raise Left("layers, width, heads, sequence or micro-batch is not stated")
    step, memory = number(row["iteration_time_s_median"]), number(row["mem_max_allocated_gib"])
    if not step and not memory:
        raise Left("it has no measurement")
    tp, pp, cp = (
        whole(row[f"{each}-parallel-size"], 1) for each in ("tensor-model", "pipeline-model", "context")
    )  # fmt: skip
    hardware = find_hardware(_DEVICES[row["device"]])
    devices = max(4 if row["device"] == "gb200" else 8, tp * pp * cp)
    split = degrees(devices, tp=tp, pp=pp, cp=cp)
    ep = whole(row.get("expert-model-parallel-size"), 1)
    spread = spread_of(ep, tp, whole(row.get("expert-tensor-parallel-size"), tp), split) if experts else {}
    total = whole(row["global-batch-size"])
    if total is None:
        raise Left("the global batch is not stated")
    chunks, per_chunk = 1, whole(row["num-layers-per-virtual-pipeline-stage"])
    if per_chunk and pp > 1:
        chunks = max(layers // (pp * per_chunk), 1)
    bert, local = suite == "bert", row.get("transformer-impl") == "local"
    full = row.get("recompute-granularity") == "full"
    vocabulary = whole(row.get("vocab-size")) or (30522 if bert else 50257)
    rope = "rope" in row["case"] or flag(row.get("swiglu"))
    shape = Shape(
        name=suite,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=whole(row.get("num-query-groups")),
        intermediate=whole(row.get("ffn-hidden-size")),
        vocabulary=-(-vocabulary // (128 * tp)) * 128 * tp,
        tied=not flag(row.get("untie-embeddings-and-output-weights")),
        gated=flag(row.get("swiglu")),
        causal=not bert,
        biases=True,
        positions=0 if rope else seq_len,
        dropout=True,
        **({"experts": experts, "experts_per_token": whole(row.get("moe-router-topk"), 1)} if experts else {}),
    )
    return Run(
        source=source,
        where=where,
        model=shape,
        hardware=hardware,
        framework="megatron",
        setup={
            "seq_len": seq_len,
            "attention": "eager" if local else "sdpa",
            "reserved_memory": False,
            "reported_rank": "last",
            "pipeline": "interleaved" if chunks > 1 else "1f1b",
            "overlap_gradients": flag(row.get("overlap-grad-reduce")),
            "overlap_gathers": flag(row.get("overlap-param-gather")),
            "recompute_attention": row.get("recompute-granularity") == "selective",
        },
        config={
            **split,
            **spread,
            **batches(split["dp"], micro, total, None),
            "zero": 1 if flag(row.get("use-distributed-optimizer")) else 0,
            "sequence_parallel": flag(row.get("sequence-parallel")) and tp > 1,
            "checkpoint_ratio": 1.0 if full else 0.0,
            **({"virtual_stages": chunks, "pipeline_schedule": "interleaved"} if chunks > 1 else {}),
        },
        step_ms=step * 1e3 if step else None,
        memory_mib=memory * 1024 if memory else None,
    )
