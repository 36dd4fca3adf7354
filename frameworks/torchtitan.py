"""torchtitan: the flags of its training command (it has no TOML any more)."""

import shlex
from collections.abc import Callable

from ..knobs.pipeline import PIPELINE_SCHEDULES, PipelineSchedule
from .common import note_lora, note_partial_checkpointing, note_reduction, note_tf32
from .launcher import Launcher
from .setup import Setup, words
from .target import Target, hashed

CHECKED = ("torchtitan", "0.3")
PRESETS = {
    "llama3-8b": ("llama3", "llama3_8b"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b"),
}
"""Models that both have: torchtitan's module and configuration."""


Give = Callable[[str, object], None]
"""Adds a flag and its value."""


def flags(setup: Setup) -> list[str]:
    """Flags of `torchtitan.train`, after those that name the model."""
    out: list[str] = []

    def give(name: str, value: object) -> None:
        out.extend((f"--{name}", str(value)))

    if setup.micro_batch is not None and setup.grad_accum is not None:
        # A pipeline splits the local batch into micro-batches itself.
        local = setup.micro_batch * (setup.grad_accum if setup.pp > 1 else 1)
        give("training.local_batch_size", local)
        give("training.global_batch_size", setup.global_batch)
    else:
        setup.note("the batch is not known: set --training.local_batch_size")
    if setup.seq_len is not None:
        give("training.seq_len", setup.seq_len)
    _precision(setup, give)
    zero, exchange = setup.knob("zero") if setup.replicas > 1 else 0, setup.exchange
    groups = setup.knob("hsdp") if zero else setup.dp
    if setup.cp > 1:
        give("parallelism.context_parallel_degree", setup.cp)
        if zero == 0:
            setup.note(
                f"cp={setup.cp} beside zero=0: torchtitan shards over the ranks of a ring by FSDP2 (ZeRO stage 3)"
            )
        if setup.dp % groups:
            setup.note(
                f"hsdp={groups} is left out: torchtitan's groups are of whole rings, of which there are {setup.dp}"
            )
            groups = 1
    give("parallelism.data_parallel_replicate_degree", groups)
    give("parallelism.data_parallel_shard_degree", setup.dp // groups)
    if zero:
        give("parallelism.fsdp_reshard_after_forward", "always" if exchange.gathered == "pass" else "never")
    if exchange.hsdp > 1 and exchange.summed == "step" and setup.grad_accum != 1:
        setup.note(
            f"hsdp={exchange.hsdp}: torchtitan sums gradients between hosts with every micro-batch, and what "
            f"was {setup.found} once a step"
        )
    if zero == 1:
        setup.note("zero=1 became FSDP2 without resharding, which shards the gradients too (ZeRO stage 2)")
    give("parallelism.tensor_parallel_degree", setup.tp)
    if setup.tp > 1 and not setup.knob("sequence_parallel"):
        out.append("--parallelism.no_enable_sequence_parallel")
    give("parallelism.pipeline_parallel_degree", setup.pp)
    if setup.pp > 1:
        give("parallelism.pipeline_parallel_microbatch_size", setup.micro_batch or 1)
        # Its names are those of torch.distributed.pipelining.
        made_by = _order(setup).made_by
        give("parallelism.pipeline_parallel_schedule", made_by.removeprefix("Schedule"))
        _chunks(setup, give)
    note_lora(setup)
    if setup.knob("offload") == "optimizer":
        if zero:
            out.append("--training.enable_cpu_offload")
            setup.note("offload=optimizer became FSDP's offload, which moves parameters and gradients too")
        else:
            setup.note("offload=optimizer: torchtitan offloads with FSDP only")
    fused = setup.knob("fused_optimizer")
    if fused is not None:
        give("optimizer.implementation", "fused" if fused else "foreach")
    out.append("--compile.enable" if setup.knob("fusion") else "--compile.no_enable")
    # By default torchtitan captures a step as a CUDA graph, and then refuses pipelines; redline does not.
    out.append("--training.disable_cuda_graphs")
    note_partial_checkpointing(setup, "torchtitan's full checkpoints every block")
    attention = setup.knob("attention")
    if attention not in (None, "sdpa"):
        setup.note(f"attention={attention} is chosen by torchtitan's configuration (attn_backend of the model)")
    setup.note_unless_neutral("kernels", "torchtitan compiles instead")
    return out


def _order(setup: Setup) -> PipelineSchedule:
    """The order of a pipeline's micro-batches; 1F1B in place of one that is not known."""
    return PIPELINE_SCHEDULES.get(setup.order_of_stages() or "", PIPELINE_SCHEDULES["1f1b"])


def _chunks(setup: Setup, give: Give) -> None:
    """How many stages a rank holds: torchtitan makes two where the schedule takes several, unless it is told
    how many layers each has, of which embedding and head count as one each."""
    chunks = setup.knob("virtual_stages")
    if _order(setup).most == 1 or chunks == 2:
        return
    layers, stages = setup.layers + 2, setup.pp * chunks
    each = -(-layers // stages)
    if chunks > 2 and -(-layers // each) == stages:
        give("parallelism.pipeline_parallel_layers_per_stage", each)
    else:
        setup.note(f"virtual_stages={chunks}: torchtitan makes two stages a rank of these layers")


def _precision(setup: Setup, give: Give) -> None:
    precision = setup.knob("precision")
    if precision == "tf32":
        note_tf32(setup)
    if precision == "fp16":
        setup.note("precision=fp16 has no flag in torchtitan: bfloat16 is set")
    if setup.formats.scaling:
        only = "" if setup.formats.scaling == "rowwise" else ", with a scale a row, as it has no other"
        setup.note(
            f"precision={precision} has no flag in torchtitan: bfloat16 is set; in your CONFIG, "
            "model_registry(..., converters=[Float8LinearConverter.Config(filter_fqns=['lm_head'], "
            f"model_compile_enabled={bool(setup.knob('fusion'))})]) gives it{only}"
        )
    give("training.dtype", {"fp32": "float32", "bf16": "bfloat16"}[setup.formats.weights])
    give("training.mixed_precision_param", "float32" if setup.formats.compute_bytes == 4 else "bfloat16")
    note_reduction(setup, "torchtitan reduces in float32 only")


def _shell(setup: Setup, comment: str) -> str:
    module, name = PRESETS.get(setup.model, ("", ""))
    if not module:
        setup.note(
            f"the model {words(setup.model) or 'tuned'} must be one that torchtitan has: set MODULE and "
            "CONFIG, such as llama3 and llama3_8b"
        )
        choice = ': "${MODULE:?set MODULE, such as llama3} ${CONFIG:?set CONFIG, such as llama3_8b}"\n'
    else:
        choice = f'MODULE="${{MODULE:-{module}}}"\nCONFIG="${{CONFIG:-{name}}}"\n'
    # tyro gives everything behind a subcommand to that: what is added has to stand before it.
    arguments = [*_lines(flags(setup)), '"$@"', _policy(setup)]
    return (
        f"#!/usr/bin/env bash\n{hashed(comment)}set -euo pipefail\n{choice}"
        'read -ra launcher <<< "${LAUNCH:-}"\n'
        f"((${{#launcher[@]}})) || launcher=({setup.hosts.torchrun()})\n"
        'exec "${launcher[@]}" -m torchtitan.train \\\n  --module "$MODULE" --config "$CONFIG" \\\n'
        + " \\\n".join(f"  {each}" for each in arguments)
        + "\n"
    )


def _policy(setup: Setup) -> str:
    """The subcommand of torchtitan's parser that says what is recomputed."""
    return f"activation_checkpoint:{'full' if setup.knob('checkpoint_ratio') > 0 else 'none'}"


def _lines(given: list[str]) -> list[str]:
    """Flags with their values, one flag a line, quoted for a shell."""
    lines: list[str] = []
    for each in given:
        if each.startswith("--"):
            lines.append(each)
        else:
            lines[-1] += f" {shlex.quote(each)}"
    return lines


TARGET = Target(
    name="torchtitan",
    about="command line of torchtitan: parallel degrees, batch, checkpointing, compilation",
    stem="torchtitan",
    forms={"shell": _shell},
    checked=CHECKED,
    sequences=("cp",),
    start=lambda setup, file: f"bash {file}",
)

# torchtitan: `torchrun ... -m torchtitan.train --module ... --config ...`.
LAUNCHER = Launcher(
    name="torchtitan",
    knobs={
        "micro_batch": (1, 2, 4, 8, 16),
        "tp": (1, 2, 4, 8),
        "pp": (1, 2, 4),
    },
    words={
        "micro_batch": "--training.local_batch_size {micro_batch}",
        "grad_accum": "--training.global_batch_size {global_batch}",
        "tp": "--parallelism.tensor_parallel_degree {tp}",
        "pp": "--parallelism.pipeline_parallel_degree {pp}",
        "cp": "--parallelism.context_parallel_degree {cp}",
    },
    short="--dump_folder {trial_dir} --training.steps 1000 --metrics.log_freq 1",
    total="--training.global_batch_size",
    several=("tp", "pp"),
)
