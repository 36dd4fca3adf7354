"""Megatron-LM: the flags of pretrain_gpt.py and its kin, as a bash array."""

from ..knobs.meaning import recomputed
from .common import note_order, note_tf32
from .launcher import Launcher
from .megatron_model import model_flags
from .setup import Setup, words
from .target import Target, hashed, sourced

CHECKED = ("megatron-core", "0.19")

_ATTENTION = {"eager": "unfused", "flash_attention_2": "flash", "flash_attention_3": "flash"}
_SCRIPTS = {"bert": "pretrain_bert.py", "roberta": "pretrain_bert.py"}
# What Megatron-FSDP needs beside its strategy (docs/user-guide/features/megatron_fsdp of Megatron-LM).
_FSDP = ["--use-megatron-fsdp", "--no-gradient-accumulation-fusion", "--ckpt-format", "fsdp_dtensor"]


def flags(setup: Setup) -> list[str]:
    """Flags, each an entry of a bash array; a value may be a quoted arithmetic expression."""
    out = [
        f"--tensor-model-parallel-size {setup.tp}",
        f"--pipeline-model-parallel-size {setup.pp}",
    ]
    if setup.cp > 1:
        out.append(f"--context-parallel-size {setup.cp}")
    if setup.knob("sequence_parallel") and setup.tp > 1:
        out.append("--sequence-parallel")
    if setup.micro_batch is not None:
        out += [f"--micro-batch-size {setup.micro_batch}", f"--global-batch-size {setup.global_batch}"]
    else:
        setup.note("the batch is not known: set --micro-batch-size and --global-batch-size")
    if setup.seq_len is not None:
        out.append(f"--seq-length {setup.seq_len}")
    out += _zero(setup) + _precision(setup) + _recomputation(setup)
    attention = setup.knob("attention")
    if attention is not None:
        out.append(f"--attention-backend {_ATTENTION.get(attention, 'auto')}")
        if attention not in _ATTENTION:
            setup.note(f"attention={attention} became --attention-backend auto, Megatron's own choice")
    out += _order(setup)
    if setup.lora:
        setup.note(f"lora={setup.lora}: Megatron-LM itself has no adapters; all weights would be trained")
    if setup.knob("fusion"):
        setup.note("fusion=true: Megatron does not use torch.compile; its own fused kernels are on by default")
    if setup.knob("fused_optimizer") is False:
        setup.note("fused_optimizer=false has no counterpart here: Megatron's Adam is fused")
    setup.note_unless_neutral("kernels", "Megatron has its own fused kernels, on by default")
    return model_flags(setup) + out


def _chunks(setup: Setup) -> int:
    """Model chunks of a pipeline rank; Megatron knows no V."""
    return setup.knob("virtual_stages") if setup.order_of_stages() in ("interleaved", "zero_bubble") else 1


def _order(setup: Setup) -> list[str]:
    chunks = _chunks(setup)
    runs = "1F1B" if chunks == 1 else f"1F1B interleaved over {chunks} chunks a rank"
    note_order(setup, ["1f1b", "interleaved"], f"Megatron's pipelines run {runs}")
    return [f"--num-virtual-stages-per-pipeline-rank {chunks}"] if chunks > 1 else []


def _zero(setup: Setup) -> list[str]:
    zero = setup.knob("zero") if setup.replicas > 1 else 0
    offload = setup.knob("offload") == "optimizer"
    out: list[str] = []
    if zero == 1 or (zero == 0 and offload):
        out.append("--use-distributed-optimizer")
        if zero == 0 and setup.replicas > 1:
            setup.note(f"offload=optimizer needs the distributed optimizer (ZeRO 1): less memory than {setup.found}")
    elif zero >= 2:
        strategy = "optim_grads_params" if "weights" in setup.exchange.cut else "optim_grads"
        out += ["--use-distributed-optimizer", f"--data-parallel-sharding-strategy {strategy}"]
        out += [_FSDP[0], _FSDP[1], " ".join(_FSDP[2:])]
        if (groups := setup.knob("hsdp")) > 1:
            out.append(f"--num-distributed-optimizer-instances {groups}")
    if offload:
        out += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    return out


def _precision(setup: Setup) -> list[str]:
    precision = setup.knob("precision")
    if precision == "bf16":
        setup.note(
            "precision=bf16 was autocast over fp32 weights; Megatron holds bfloat16 weights and fp32 master "
            "weights in the optimizer"
        )
    if precision == "tf32":
        note_tf32(setup)
    if precision == "bf16_pure":
        setup.note("precision=bf16_pure: Megatron keeps fp32 master weights in the optimizer: more memory")
    if setup.formats.scaling == "rowwise":
        setup.note(f"precision={precision}: Megatron has no scale a row, so that each tensor has one")
    out = {
        "bf16": ["--bf16"],
        "bf16_pure": ["--bf16"],
        "fp16": ["--fp16"],
        "fp8": ["--bf16", "--fp8-format hybrid", "--fp8-recipe tensorwise"],
        "fp8_rowwise": ["--bf16", "--fp8-format e4m3", "--fp8-recipe tensorwise"],
    }.get(precision, [])
    setup.knob("reduce_dtype")
    reduced = setup.formats.reduced if setup.replicas > 1 else None
    if reduced == "bf16" and "--bf16" in out:
        out.append("--grad-reduce-in-bf16")
    elif reduced == "bf16":
        setup.note(f"reduce_dtype=bf16 has no counterpart with precision={precision}: gradients travel in float32")
    return out


def _recomputation(setup: Setup) -> list[str]:
    ratio = setup.knob("checkpoint_ratio")
    if not ratio:
        return []
    if ratio == 1:
        return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    # `block` recomputes that many layers of each pipeline stage.
    stages = setup.pp * _chunks(setup)
    setup.note(
        f"checkpoint_ratio={words(ratio)}: the first layers of each stage are recomputed instead of evenly spread ones"
    )
    if setup.shape:
        number = str(max(1, len(recomputed(setup.shape["layers"] // stages, ratio))))
    else:
        setup.note("the layers to recompute are counted from NUM_LAYERS: set it to the model's layers")
        share = round(ratio * 1000)
        number = f'"$(( (${{NUM_LAYERS:?set it to the number of layers}} / {stages} * {share} + 500) / 1000 ))"'
    return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {number}"]


def _shell(setup: Setup, comment: str) -> str:
    lines = "".join(f"  {each}\n" for each in flags(setup))
    # Megatron refuses tensor parallelism without this on what came before Blackwell, and its FSDP with it.
    alone = setup.tp > 1 and not (setup.replicas > 1 and setup.knob("zero") >= 2)
    environment = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if alone else ""
    return f"{hashed(comment)}{environment}MEGATRON_ARGS=(\n{lines})\n"


def _start(setup: Setup, file: str) -> str:
    script = _SCRIPTS.get(str(setup.shape.get("family")), "pretrain_gpt.py")
    return f'source {sourced(file)}; {setup.hosts.torchrun()} {script} "${{MEGATRON_ARGS[@]}}"'


TARGET = Target(
    name="megatron",
    about="flags of Megatron-LM's pre-training scripts, as a bash array",
    stem="megatron",
    forms={"shell": _shell},
    checked=CHECKED,
    sequences=("cp",),
    start=_start,
)

# Megatron-LM: `torchrun ... pretrain_gpt.py ...`.
LAUNCHER = Launcher(
    name="megatron",
    knobs={"micro_batch": (1, 2, 4, 8), "tp": (1, 2, 4, 8), "pp": (1, 2, 4)},
    words={
        "micro_batch": "--micro-batch-size {micro_batch}",
        "grad_accum": "--global-batch-size {global_batch}",
        "tp": "--tensor-model-parallel-size {tp}",
        "pp": "--pipeline-model-parallel-size {pp}",
        "cp": "--context-parallel-size {cp}",
    },
    short="--train-iters 1000 --eval-iters 0 --log-interval 1",
    instead={"--train-iters": "--train-samples"},
    total="--global-batch-size",
    several=("tp", "pp"),
)
