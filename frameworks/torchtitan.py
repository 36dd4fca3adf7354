"""torchtitan: the flags of its training command, and the TOML of its versions before 0.3."""

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from ..knobs.meaning import PIPELINE_SCHEDULES, PipelineSchedule
from ..knobs.strategy import Strategy
from .common import (
    FSDP_ZERO_1,
    note_lora,
    note_partial_checkpointing,
    note_reduction,
    note_tf32,
    optimizer_text,
    read_optimizer,
)
from .export_input import ExportInput, Target, hashed
from .framework import SettingsReader, framework_of, knob_table, plain, settings_of

CHECKED = ("torchtitan", "0.3")
PRESETS = {"llama3-8b": ("llama3", "llama3_8b"), "qwen3-0.6b": ("qwen3", "qwen3_0_6b")}
"""Models in both: torchtitan's module and configuration."""
_PARAM, _DTYPE = "training.mixed_precision_param", "training.dtype"
_RESHARD = "parallelism.fsdp_reshard_after_forward"
_SEQUENCE = "parallelism.enable_sequence_parallel"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_LOCAL, _GLOBAL = "training.local_batch_size", "training.global_batch_size"
_REPLICATE, _SHARD = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
_PIECE = "parallelism.pipeline_parallel_microbatch_size"
_ASYNC = tuple(f"{section}.enable_async_tensor_parallel" for section in ("compile", "parallelism", "experimental"))
_MODE = "activation_checkpoint.mode"
_COMPONENTS = "compile.components"
_FLOAT8 = ("float8", "quantize.linear.float8")
"""Converters to linear layers with 8-bit products."""
_BY_SEVERAL = {
    "micro_batch": (_LOCAL, "training.batch_size", _PIECE),
    "grad_accum": (_GLOBAL,),
    "checkpoint_ratio": (_MODE, "activation_checkpoint.selective_ac_option"),
    "zero": (_SHARD, _REPLICATE, _RESHARD, "training.data_parallel_shard_degree", "training.data_parallel_degree"),
}
"""Knobs that `read` finds, with the settings that they follow from."""
KNOBS = knob_table("torchtitan")
"""torchtitan's names of the knobs; its batch and its replicas follow from several knobs (`write`)."""


Give = Callable[[str, object], None]
"""Adds a flag and its value."""


def flags(setup: ExportInput) -> list[str]:
    """Flags of `torchtitan.train`, after those that name the model."""
    arguments: list[str] = []

    def give(name: str, value: object) -> None:
        section, _, option = name.rpartition(".")
        if isinstance(value, bool):
            arguments.append(f"--{section}.{'' if value else 'no_'}{option}")
        else:
            arguments.extend((f"--{name}", str(value)))

    def say(knob: str, value: object) -> None:
        for name, setting in KNOBS[knob].settings(value).items():
            give(name, setting)

    if setup.micro_batch is not None and setup.grad_accum is not None:
        # A pipeline splits the local batch into micro-batches itself.
        local = setup.micro_batch * (setup.grad_accum if setup.pp > 1 else 1)
        give(_LOCAL, local)
        give(_GLOBAL, setup.global_batch)
    else:
        setup.note("the batch is not known: set --training.local_batch_size")
    if setup.seq_len is not None:
        give("training.seq_len", setup.seq_len)
    _precision(setup, say)
    zero, exchange = setup.knob("zero") if setup.replicas > 1 else 0, setup.exchange
    groups = setup.knob("hsdp") if zero else setup.dp
    if setup.cp > 1:
        say("cp", setup.cp)
        if zero == 0:
            setup.note(
                f"cp={setup.cp} beside zero=0: torchtitan shards over the ranks of a ring by FSDP2 (ZeRO stage 3)"
            )
        if setup.dp % groups:
            setup.note(
                f"hsdp={groups} is left out: torchtitan's groups consist of whole rings, and there are {setup.dp}"
            )
            groups = 1
    give(_REPLICATE, groups)
    give(_SHARD, setup.dp // groups)
    if zero:
        give(_RESHARD, "always" if exchange.gathered == "pass" else "never")
    if exchange.hsdp > 1 and exchange.summed == "step" and setup.grad_accum != 1:
        setup.note(
            f"hsdp={exchange.hsdp}: torchtitan sums gradients between hosts with every micro-batch, and what "
            f"was {setup.found} once a step"
        )
    if zero == 1:
        setup.note(FSDP_ZERO_1)
    if (experts := setup.knob("ep")) > 1:
        say("ep", experts)
    _note_whole_experts(setup, experts)
    say("tp", setup.tp)
    if setup.tp > 1 and not setup.knob("sequence_parallel"):
        say("sequence_parallel", False)
    say("pp", setup.pp)
    if setup.pp > 1:
        give(_PIECE, setup.micro_batch or 1)
        # torchtitan uses the names of torch.distributed.pipelining.
        give(_SCHEDULE, _order(setup).made_by.removeprefix("Schedule"))
        _chunks(setup, give)
    note_lora(setup)
    if setup.knob("offload") == "optimizer":
        if zero:
            say("offload", "optimizer")
            setup.note("offload=optimizer became FSDP's offload, which moves parameters and gradients too")
        else:
            setup.note("offload=optimizer: torchtitan offloads with FSDP only")
    fused = setup.knob("fused_optimizer")
    if fused is not None:
        say("fused_optimizer", fused)
    if setup.optimizer:
        setup.missing.append(f"the optimizer, {optimizer_text(setup)}: torchtitan has AdamW and Adam")
    say("fusion", bool(setup.knob("fusion")))
    # By default torchtitan captures a step as a CUDA graph, unlike redline, and then refuses pipelines.
    arguments.append("--training.disable_cuda_graphs")
    note_partial_checkpointing(setup, "torchtitan's full checkpoints every block")
    attention = setup.knob("attention")
    if attention not in (None, "sdpa"):
        setup.note(f"attention={attention} is chosen by torchtitan's configuration (attn_backend of the model)")
    setup.note_unless_neutral("kernels", "torchtitan compiles instead")
    return arguments


def _note_whole_experts(setup: ExportInput, ep: int) -> None:
    """Adds a note if experts are cut differently beside `tp`: torchtitan's `ep` counts all ranks, each with whole experts."""
    whole_experts = setup.knob("etp") == 1
    if setup.tp > 1 and ep > 1 and not whole_experts:
        setup.note(f"ep={ep} beside tp={setup.tp}: torchtitan does not cut experts over the tp ranks, like etp=1")
    elif setup.tp > 1 and whole_experts and ep == 1:
        setup.note("etp=1 beside ep=1: torchtitan cuts experts over the tp ranks unless ranks share them")


def _order(setup: ExportInput) -> PipelineSchedule:
    """Order of a pipeline's micro-batches; 1F1B in place of an unknown one."""
    return PIPELINE_SCHEDULES.get(setup.order_of_stages() or "", PIPELINE_SCHEDULES["1f1b"])


def _chunks(setup: ExportInput, give: Give) -> None:
    """Sets the number of stages of a rank: torchtitan makes two if the schedule takes several, unless it gets the
    number of layers of each stage, in which embedding and head count as one each.
    """
    chunks = setup.knob("virtual_stages")
    if _order(setup).most == 1 or chunks == 2:
        return
    layers, stages = setup.layers + 2, setup.pp * chunks
    layers_per_stage = -(-layers // stages)
    if chunks > 2 and -(-layers // layers_per_stage) == stages:
        give("parallelism.pipeline_parallel_layers_per_stage", layers_per_stage)
    else:
        setup.note(f"virtual_stages={chunks}: torchtitan makes two stages a rank of these layers")


def _precision(setup: ExportInput, say: Give) -> None:
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
    narrow = "bf16_pure" if setup.formats.weights == "bf16" else "bf16"
    say("precision", "fp32" if setup.formats.compute_bytes == 4 else narrow)
    note_reduction(setup, "torchtitan reduces in float32 only")


def _shell(setup: ExportInput, comment: str) -> str:
    module, name = PRESETS.get(setup.model, ("", ""))
    if not module:
        setup.note(
            f"the model {setup.model or 'tuned'} must be one that torchtitan has: set MODULE and "
            "CONFIG, such as llama3 and llama3_8b"
        )
        choice = ': "${MODULE:?set MODULE, such as llama3} ${CONFIG:?set CONFIG, such as llama3_8b}"\n'
    else:
        choice = f'MODULE="${{MODULE:-{module}}}"\nCONFIG="${{CONFIG:-{name}}}"\n'
    # tyro passes everything after a subcommand to it, so further arguments have to precede it.
    policy = KNOBS["checkpoint_ratio"].settings(int(setup.knob("checkpoint_ratio") > 0))[_MODE]
    arguments = [*_lines(flags(setup)), '"$@"', f"activation_checkpoint:{policy}"]
    return (
        f"#!/usr/bin/env bash\n{hashed(comment)}set -euo pipefail\n{choice}"
        'read -ra launcher <<< "${LAUNCH:-}"\n'
        f"((${{#launcher[@]}})) || launcher=({setup.hosts.torchrun()})\n"
        'exec "${launcher[@]}" -m torchtitan.train \\\n  --module "$MODULE" --config "$CONFIG" \\\n'
        + " \\\n".join(f"  {argument}" for argument in arguments)
        + "\n"
    )


def _lines(arguments: list[str]) -> list[str]:
    """Flags with their values, one flag per line, quoted for a shell."""
    lines: list[str] = []
    for argument in arguments:
        if argument.startswith("--"):
            lines.append(argument)
        else:
            lines[-1] += f" {shlex.quote(argument)}"
    return lines


TARGET = Target(
    name="torchtitan",
    about="command line of torchtitan: parallel degrees, batch, checkpointing, compilation",
    stem="torchtitan",
    forms={"shell": _shell},
    checked=CHECKED,
    sequences=("cp",),
    trains=("ForCausalLM", "LMHeadModel"),
    start=lambda setup, file: f"bash {file}",
)


def prepare(reader: SettingsReader) -> None:
    """Converts settings as torchtitan's parser and its defaults do: `--a.no_b` is `a.b=false`."""
    for name in list(reader.settings):
        section, dot, option = plain(name).rpartition(".")
        if option.startswith("no_"):
            reader.override(f"{section}{dot}{option[3:]}", reader.flag(name) is False)
    if reader.has(_PARAM):
        reader.set(_DTYPE, "float32")
    elif reader.has(_DTYPE):
        reader.set(_PARAM, "bfloat16")
    configuration, facts = reader.get("config"), settings_of("torchtitan")
    if configuration is None:  # defaults of TrainingConfig, and of the versions with a TOML
        reader.set("training.batch_size" if reader.has("training.batch_size") else _LOCAL, 8)
        reader.set("training.seq_len", 2048)
        reader.set("activation_checkpoint.selective_ac_option", "2")
    elif configuration in facts["configs"]:
        for name, value in {
            **facts["configs"][configuration],
            **facts["expert_configs"].get(configuration, {}),
        }.items():
            reader.set(name, value)
    else:
        reader.misunderstood("config")
        reader.note(
            f"the batch, degrees and recomputation that config = {configuration} sets are not read: state those that are "
            "not torchtitan's defaults"
        )


def read(reader: SettingsReader) -> None:
    """Reads the model, the batch, the replicas and the recomputation policy."""
    _read_model(reader)
    knobs, pp = reader.knobs, reader.knobs.get("pp", 1)
    local = reader.whole(_LOCAL, "training.batch_size")
    if pp > 1:
        knobs["micro_batch"] = reader.whole(_PIECE) or 1
    elif local is not None:
        knobs["micro_batch"] = local
    if pp > 1 and local is not None:
        if local % knobs["micro_batch"]:
            reader.note(f"{reader.name(_LOCAL)} = {local} is not a multiple of {_PIECE} = {knobs['micro_batch']}")
        knobs["grad_accum"] = max(1, local // knobs["micro_batch"])
    if (total := reader.whole(_GLOBAL)) is not None:
        knobs.pop("grad_accum", None)
        reader.facts["global_batch"] = total
        if pp > 1:
            reader.conventions["flushed_samples"] = local
    elif pp == 1:
        knobs["grad_accum"] = 1
    replicate = reader.whole(_REPLICATE, "training.data_parallel_replicate_degree") or 1
    shard = reader.whole(_SHARD, "training.data_parallel_shard_degree", "training.data_parallel_degree")
    # It also shards over the ranks of a ring, which share their samples.
    if shard is not None:
        knobs["dp"] = replicate * shard
    if shard == 1 and knobs.get("cp", 1) == 1:
        knobs["zero"] = 0
    else:
        unsharded = str(reader.get(_RESHARD) or "default").lower() == "never" or (
            pp > 1 and str(reader.get(_RESHARD) or "default").lower() == "default"
        )
        knobs["zero"] = 2 if unsharded else 3
        if replicate > 1:
            knobs["hsdp"] = replicate
    sequence_parallel = reader.flag("parallelism.disable_sequence_parallel") is not True
    if knobs.get("tp", 1) > 1:
        if knobs.get("ep", 1) > 1:
            knobs["etp"] = 1
        knobs.setdefault("sequence_parallel", sequence_parallel)
    schedule = reader.get("parallelism.pipeline_parallel_schedule_csv")
    if pp > 1:
        if schedule is not None:
            reader.note(
                f"parallelism.pipeline_parallel_schedule_csv = {schedule}: the schedule of this file is not read"
            )
        _read_chunks(reader)
    _read_recomputation(reader)
    _read_float8(reader)
    _read_compilation(reader)
    if reader.flag(*_ASYNC):
        reader.conventions["overlap_tensor"] = True
        if not knobs.get("fusion"):
            reader.note(f"torchtitan refuses {reader.name(*_ASYNC)} unless compile.enable compiles the model")
    if reader.flag("debug.moe_force_load_balance", "training.debug_moe_force_load_balance"):
        reader.conventions["balanced_experts"] = True
    read_optimizer(reader, "optimizer.name")
    for knob, names in _BY_SEVERAL.items():
        if knob in knobs and not any(map(reader.stated, names)):
            reader.defaults.add(knob)
    if not reader.has("config"):
        reader.get("parallelism.expert_tensor_parallel_degree")


def _read_compilation(reader: SettingsReader) -> None:
    """Reads what is compiled: by default the model and the loss."""
    components = reader.get(_COMPONENTS)
    if components is None or not reader.knobs.get("fusion"):
        return
    if "model" not in str(components):
        reader.knobs["fusion"] = False
        reader.note(f"{_COMPONENTS} = {components} leaves the model uncompiled")
    if not reader.has("config"):
        reader.conventions["loss"] = "compiled" if "loss" in str(components) else "plain"


def _read_model(reader: SettingsReader) -> None:
    """Reads the model of `[model] name, flavor`, or of `--module, --config`, by redline's name if there is one."""
    configuration = str(reader.get("config") or "")
    if configuration:
        reader.conventions["loss"] = "chunked"  # ChunkedLossWrapper
        names = {config: name for name, (_, config) in PRESETS.items()}
        reader.facts["model"] = names.get(configuration, configuration.replace("_", "-"))
    elif (name := reader.get("model.name")) is not None:
        flavor = str(reader.get("model.flavor") or "").lower()
        reader.facts["model"] = f"{name}-{flavor}" if flavor else str(name)


def _read_chunks(reader: SettingsReader) -> None:
    """Reads the stages of a rank: two if the schedule takes several, unless the layers of each are given."""
    order = PIPELINE_SCHEDULES[reader.knobs.get("pipeline_schedule", "1f1b")]
    if order.most == 1:
        return
    layers_per_stage = reader.whole("parallelism.pipeline_parallel_layers_per_stage")
    if layers_per_stage is None:
        reader.knobs["virtual_stages"] = 2
    else:
        reader.facts["layers_per_stage"] = layers_per_stage


def _read_recomputation(reader: SettingsReader) -> None:
    mode = str(reader.get(_MODE) or "selective").lower()
    if mode not in ("selective", "full", "none"):
        reader.misunderstood(_MODE)
    if mode != "selective":
        return
    option_name = "activation_checkpoint.selective_ac_option"
    option = str(reader.get(option_name) or "op")  # SelectiveAC of 0.3
    if option.isdigit() and int(option) > 0:
        reader.knobs["checkpoint_ratio"] = 1 / int(option)
    else:
        reader.knobs.setdefault("checkpoint_ratio", 0)
        reader.conventions["keeps_products"] = True
        reader.note(
            "activation_checkpoint.mode = selective (op) keeps attention and every other product of a block and recomputes "
            "the rest, which is taken into account; the knob checkpoint_ratio has no value for it"
        )


def _read_float8(reader: SettingsReader) -> None:
    converters = reader.get("model.converters")
    names = [str(name) for name in (converters if isinstance(converters, list) else str(converters or "").split(","))]
    others = [name for name in names if name and name not in _FLOAT8]
    if others:
        reader.misunderstood("model.converters")
    reader.get("float8.enable_fsdp_float8_all_gather")
    if len(others) < len([name for name in names if name]) or reader.flag("float8.enable_float8_linear"):
        recipe = str(reader.get("quantize.linear.float8.recipe_name", "float8.recipe_name") or "tensorwise")
        reader.knobs["precision"] = "fp8_rowwise" if recipe == "rowwise" else "fp8"
        return
    for name in _FLOAT8:
        if any(reader.has(f"{name}.{key}") for key in ("enable_fsdp_float8_all_gather", "recipe_name")):
            reader.note(f'[{name}] has no effect: torchtitan converts layers with model.converters = ["{name}"]')


def conventions(config: Mapping[str, Any]) -> dict[str, Any]:
    """torchtitan's formats: FSDP2 keeps shards of weights, gradients and states in fp32 and gathers weights in bf16,
    the format of the residual stream; 8-bit products are only in linear layers; the loss upcasts logits by
    operators, unless it is compiled; shards are offloaded too. Pipeline stages reduce gradients with their last micro-batch,
    and keep them whole until then (torch.distributed.pipelining, `backward_maybe_with_nosync`).
    """
    eight = str(config.get("precision", "")).startswith("fp8")
    fields: dict[str, Any] = {
        "loss": "compiled" if config.get("fusion") else "plain"
    }  # that of the versions before 0.3
    if config.get("offload") == "optimizer":
        fields["offload_weights"] = True
    if config.get("pp", 1) > 1:
        fields["unsharded_gradients"] = True
    if config.get("precision") == "bf16" or eight:
        fields |= {"precision": "bf16_pure", "parameter_dtype": "fp32", "gradient_dtype": "fp32", "pieces": True}
    return fields | ({"products": "fp8"} if eight else {})


def write(strategy: Strategy, reader: SettingsReader) -> dict[str, Any]:
    """Writes the batch and the replicas, which a file sets by several settings at once."""
    local, piece = strategy.micro_batch, {}
    if strategy.pp > 1:
        local, piece = strategy.micro_batch * strategy.grad_accum, {_PIECE: strategy.micro_batch}
    settings: dict[str, Any] = {reader.name(_LOCAL, "training.batch_size"): local, **piece}
    components = reader.get(_COMPONENTS)
    if strategy.fusion and isinstance(components, list) and "model" not in components:
        settings[_COMPONENTS] = ["model", *components]
    if reader.has(_GLOBAL) or (strategy.pp == 1 and strategy.grad_accum > 1):
        settings[_GLOBAL] = strategy.micro_batch * strategy.grad_accum * strategy.dp
    groups = (strategy.hsdp if strategy.zero else strategy.dp) or 1
    if strategy.zero == 1:
        raise LookupError("zero=1")
    if 0 < strategy.checkpoint_ratio < 1:
        every = round(1 / strategy.checkpoint_ratio)
        if abs(1 / strategy.checkpoint_ratio - every) > 1e-9 or reader.has("config"):  # 0.3 has no such option
            raise LookupError(f"checkpoint_ratio={strategy.checkpoint_ratio}")
        settings |= {_MODE: "selective", "activation_checkpoint.selective_ac_option": str(every)}
    shard = reader.name(_SHARD, "training.data_parallel_shard_degree")
    settings[reader.name(_REPLICATE)] = groups
    shard_degree = reader.get(shard)
    settings[shard] = (
        -1 if shard_degree is not None and int(shard_degree) == -1 and strategy.zero else strategy.dp // groups
    )
    if strategy.zero:
        default = 2 if strategy.pp > 1 else 3
        if reader.has(_RESHARD) or strategy.zero != default:
            settings[_RESHARD] = "always" if strategy.zero == 3 else "never"
    return settings


def cannot(knob: str, strategy: Strategy, reader: SettingsReader) -> bool:
    """True for what the versions with a TOML lack: activations that are not sharded beside tp."""
    return knob == "sequence_parallel" and not reader.has("config") and not reader.has(_SEQUENCE)


def option(name: str, value: Any, reader: SettingsReader) -> str:
    """Writes a flag of tyro, or the subcommand that recomputation is in 0.3."""
    if name == _MODE and reader.has("config"):
        return f"activation_checkpoint:{value}"
    if isinstance(value, bool):
        section, dot, key = name.rpartition(".")
        return f"--{section}{dot}{'' if value else 'no_'}{key}"
    return f"--{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"


FRAMEWORK = framework_of(
    "torchtitan", KNOBS, conventions=conventions, prepare=prepare, read=read, write=write, cannot=cannot, option=option
)
