"""Megatron-LM: the flags of pretrain_gpt.py and similar scripts, as a bash array; and Megatron-Bridge: a recipe's script with
`section.field=value`, in Megatron-LM's own configuration.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..knobs.meaning import blocks_of_stages, recomputed
from ..knobs.strategy import Strategy, is_even
from ..knobs.text import value_text
from .common import note_order, note_tf32, optimizer_text, read_optimizer
from .export_input import ExportInput, Target, hashed, sourced
from .framework import SettingsReader, framework_of, knob_table, number, settings_of
from .megatron_model import architecture_of, model_flags

CHECKED = ("megatron-core", "0.19")

_BACKEND, _DISTRIBUTED, _CUT = "attention-backend", "use-distributed-optimizer", "data-parallel-sharding-strategy"
_FSDP = "use-megatron-fsdp"
_SLICES, _CAPACITY = "expert-tensor-parallel-size", "moe-expert-capacity-factor"
_LAYOUT, _FIRST, _LAST = (
    "pipeline-model-parallel-layout",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
)
_LONGEST_LAYOUT = 1 << 16
"""Largest number of characters of a layout after its repetitions are expanded."""
_OLD_CHUNKS = "num-layers-per-virtual-pipeline-stage"
KNOBS = knob_table("megatron")
"""Megatron-LM's names of the knobs; the accumulation follows from its global batch."""
_SCRIPTS = {"bert": "pretrain_bert.py", "roberta": "pretrain_bert.py"}
_WITH_FSDP: Mapping[str, Any] = {"no-gradient-accumulation-fusion": True, "ckpt-format": "fsdp_dtensor"}
"""Further flags that Megatron-FSDP requires (docs/user-guide/features/megatron_fsdp of Megatron-LM)."""


def flags(setup: ExportInput) -> list[str]:
    """Flags, each an entry of a bash array; a value may be a quoted arithmetic expression."""
    arguments = _arguments("tp", setup.tp) + _arguments("pp", setup.pp)
    if setup.cp > 1:
        arguments += _arguments("cp", setup.cp)
    if (experts := setup.knob("ep")) > 1:
        arguments += _arguments("ep", experts)
    if (slices := setup.knob("etp")) not in (0, setup.tp):
        arguments += _arguments("etp", slices)
    if factor := setup.knob("capacity_factor"):
        # Only this dispatcher has capacities; rows are dropped by the router's probabilities by default, as in redline.
        arguments += [*_arguments("capacity_factor", factor), "--moe-pad-expert-input-to-capacity"]
        arguments.append("--moe-token-dispatcher-type alltoall")
    if setup.knob("sequence_parallel") and setup.tp > 1:
        arguments += _arguments("sequence_parallel", True)
    if setup.micro_batch is not None:
        arguments += [*_arguments("micro_batch", setup.micro_batch), f"--global-batch-size {setup.global_batch}"]
    else:
        setup.note("the batch is not known: set --micro-batch-size and --global-batch-size")
    if setup.seq_len is not None:
        arguments.append(f"--seq-length {setup.seq_len}")
    arguments += _zero(setup) + _precision(setup) + _recomputation(setup)
    attention = setup.knob("attention")
    if attention is not None:
        supported = attention in KNOBS["attention"].values
        arguments += _arguments("attention", attention) if supported else [f"--{_BACKEND} auto"]
        if not supported:
            setup.note(f"attention={attention} became --attention-backend auto, Megatron's own choice")
    arguments += _order(setup)
    if setup.lora:
        setup.note(f"lora={setup.lora}: Megatron-LM itself has no adapters; all weights would be trained")
    if setup.knob("fusion"):
        setup.note("fusion=true: Megatron does not use torch.compile; its own fused kernels are on by default")
    if setup.optimizer:
        setup.missing.append(f"the optimizer, {optimizer_text(setup)}: set --optimizer and its values")
    elif setup.knob("fused_optimizer") is False:
        setup.note("fused_optimizer=false has no counterpart here: Megatron's Adam is fused")
    setup.note_unless_neutral("kernels", "Megatron has its own fused kernels, on by default")
    return model_flags(setup) + arguments


def _arguments(knob: str, value: object) -> list[str]:
    """Flags for a value of a knob; settings that are on have no value."""
    return _flags(KNOBS[knob].settings(value))


def _flags(settings: Mapping[str, Any]) -> list[str]:
    return [
        f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}"
        for name, value in settings.items()
        if value not in (False, None)
    ]


def _chunks(setup: ExportInput) -> int:
    """Model chunks of a pipeline rank; Megatron has no V schedule."""
    return setup.knob("virtual_stages") if setup.order_of_stages() in ("interleaved", "zero_bubble") else 1


def _order(setup: ExportInput) -> list[str]:
    chunks = _chunks(setup)
    runs = "1F1B" if chunks == 1 else f"1F1B interleaved over {chunks} chunks a rank"
    note_order(setup, ["1f1b", "interleaved"], f"Megatron's pipelines run {runs}")
    if (stage_blocks := setup.knob("stage_blocks")) is not None:
        sizes = blocks_of_stages(stage_blocks)
        if len(sizes) == setup.pp * chunks:  # the layout says how many chunks there are
            return [f'--{_LAYOUT} "{layout(sizes)}"']
        setup.note(
            f"stage_blocks={stage_blocks}: Megatron has {setup.pp * chunks} stages here, with even shares of the layers"
        )
    return _arguments("virtual_stages", chunks) if chunks > 1 else []


def layout(sizes: Sequence[int]) -> str:
    """Formats stages with these numbers of layers as Megatron's layout of a pipeline: embedding, layers and loss.

    >>> layout([1, 3, 2])
    'Et|t*3|t*2L'
    """
    stages = ["t" if size == 1 else f"t*{size}" for size in sizes]
    return f"E{'|'.join(stages)}L"


def _read_layout(text: str) -> tuple[int, ...] | None:
    """Number of layers of each stage of a layout; None if it is not one, or has stages without layers.

    `t*3` repeats a layer, `(tt|)*29` a group, and commas mean nothing.
    """
    plain_text = re.sub(r"[\s,'\"]", "", text)
    for pattern in (r"\(([^()]*)\)\*(\d{1,4})", r"([A-Za-z])\*(\d{1,4})"):
        if sum(len(group) * int(times) for group, times in re.findall(pattern, plain_text)) > _LONGEST_LAYOUT:
            return None
        plain_text = re.sub(pattern, lambda match: match[1] * int(match[2]), plain_text)
    sizes = tuple(stage.count("t") for stage in plain_text.split("|"))
    return sizes if re.fullmatch(r"[Etm|L]+", plain_text) and all(sizes) else None


def _zero(setup: ExportInput) -> list[str]:
    zero = setup.knob("zero") if setup.replicas > 1 else 0
    offload = setup.knob("offload") == "optimizer"
    arguments: list[str] = []
    if zero == 1 or (zero == 0 and offload):
        arguments += _arguments("zero", 1)
        if zero == 0 and setup.replicas > 1:
            setup.note(f"offload=optimizer needs the distributed optimizer (ZeRO 1): less memory than {setup.found}")
    elif zero >= 2:
        arguments += [*_arguments("zero", zero), *_flags(_WITH_FSDP)]
        if (groups := setup.knob("hsdp")) > 1:
            arguments += _arguments("hsdp", groups)
    if offload:
        arguments += [*_arguments("offload", "optimizer"), "--use-precision-aware-optimizer"]
    return arguments


def _precision(setup: ExportInput) -> list[str]:
    precision = setup.knob("precision")
    if precision == "bf16":
        setup.note(
            "precision=bf16 was autocast over fp32 weights; Megatron keeps bfloat16 weights and fp32 master "
            "weights in the optimizer"
        )
    if precision == "tf32":
        note_tf32(setup)
    if precision == "bf16_pure":
        setup.note("precision=bf16_pure: Megatron keeps fp32 master weights in the optimizer: more memory")
    if setup.formats.scaling == "rowwise":
        setup.note(f"precision={precision}: Megatron has no scales of rows; each tensor has one")
    arguments = _arguments("precision", {"bf16_pure": "bf16", "tf32": "fp32"}.get(precision, precision))
    setup.knob("reduce_dtype")
    reduced = setup.formats.reduced if setup.replicas > 1 else None
    if reduced == "bf16" and "--bf16" in arguments:
        arguments += _arguments("reduce_dtype", "bf16")
        setup.note("reduce_dtype=bf16: Megatron then accumulates gradients in bfloat16 too: less memory and precision")
    elif reduced == "bf16":
        setup.note(f"reduce_dtype=bf16 has no counterpart with precision={precision}: gradients travel in float32")
    return arguments


def _recomputation(setup: ExportInput) -> list[str]:
    ratio = setup.knob("checkpoint_ratio")
    if not ratio:
        return []
    if ratio == 1:
        return _arguments("checkpoint_ratio", 1)
    # `block` recomputes that many layers of each pipeline stage.
    stages = setup.pp * _chunks(setup)
    setup.note(
        f"checkpoint_ratio={value_text(ratio)}: the first layers of each stage are recomputed instead of evenly spread ones"
    )
    if setup.shape:
        number = str(max(1, len(recomputed(setup.shape["layers"] // stages, ratio))))
    else:
        setup.note("the layers to recompute are counted from NUM_LAYERS: set it to the model's layers")
        share = round(ratio * 1000)
        number = f'"$(( (${{NUM_LAYERS:?set it to the number of layers}} / {stages} * {share} + 500) / 1000 ))"'
    return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {number}"]


def _shell(setup: ExportInput, comment: str) -> str:
    lines = "".join(f"  {flag}\n" for flag in flags(setup))
    # Before Blackwell, Megatron refuses tensor and context parallelism without this, and its FSDP with it.
    alone = setup.tp * setup.cp > 1 and not (setup.replicas > 1 and setup.knob("zero") >= 2)
    environment = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if alone else ""
    return f"{hashed(comment)}{environment}MEGATRON_ARGS=(\n{lines})\n"


def _start(setup: ExportInput, file: str) -> str:
    script = _SCRIPTS.get(str(setup.shape.get("family")), "pretrain_gpt.py")
    return f'source {sourced(file)}; {setup.hosts.torchrun()} {script} "${{MEGATRON_ARGS[@]}}"'


TARGET = Target(
    name="megatron",
    about="flags of Megatron-LM's pre-training scripts, as a bash array",
    stem="megatron",
    forms={"shell": _shell},
    checked=CHECKED,
    sequences=("cp",),
    trains=("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForPreTraining", "T5ForConditionalGeneration"),
    uneven=True,
    start=_start,
)


def prepare(reader: SettingsReader) -> None:
    """Adds settings that a flag implies, and removes a capacity that stands for none."""
    if isinstance(factor := number(reader.get(_CAPACITY)), int | float) and factor < 0:
        reader.override(_CAPACITY, None)
    strategy = reader.get(_CUT)
    if reader.flag(_FSDP, "use-custom-fsdp"):
        reader.set(_FSDP, True)
        reader.set(_DISTRIBUTED, True)
        reader.set(_CUT, "no_shard")  # DistributedDataParallelConfig
    elif strategy is not None and not reader.flag("use-torch-fsdp2"):
        reader.note(f"{reader.name(_CUT)} = {strategy} has no effect without {_FSDP}")
        reader.override(_CUT, None)


def read(reader: SettingsReader) -> None:
    """Reads the model's sizes, the batch, recomputation, and stages given by their layers."""
    knobs = reader.knobs
    if (architecture := architecture_of(reader)) is not None:
        reader.facts["architecture"] = architecture
    if (total := reader.whole("global-batch-size")) is not None:
        reader.facts["global_batch"] = total
    else:
        knobs["grad_accum"] = 1
    layers, pp = reader.whole("num-layers") or reader.whole("encoder-num-layers"), knobs.get("pp", 1)
    layers_per_chunk = reader.whole(_OLD_CHUNKS)
    if layers_per_chunk is not None and layers is not None and pp > 1:
        if layers % (pp * layers_per_chunk):
            reader.note(
                f"{reader.name(_OLD_CHUNKS)} = {layers_per_chunk} does not divide the {layers // pp} layers of a stage"
            )
        knobs["virtual_stages"] = max(1, layers // pp // layers_per_chunk)
    read_stages(reader, layers, pp)
    if knobs.get("virtual_stages", 1) > 1:
        knobs["pipeline_schedule"] = "interleaved"
    read_recomputation(reader, layers)
    if (slices := knobs.get("etp", 1)) not in (1, knobs.get("tp", 1)):
        reader.note(f"{reader.name(_SLICES)} = {slices}: the estimate cuts experts over the tp ranks as all else")
        del knobs["etp"]
    _read_kernels(reader)
    if knobs.get("precision") == "fp16" and reader.flag("accumulate-allreduce-grads-in-fp32"):
        reader.conventions["gradient_dtype"] = "fp32"
    if reader.get("rampup-batch-size") is not None:
        reader.note("rampup-batch-size: the estimate is of the global batch after the ramp")
    reader.set("sgd-momentum", 0.9)
    read_optimizer(reader, "optimizer")
    reader.get("deepspeed", "deepspeed_config")


def read_stages(
    reader: SettingsReader, layers: int | None, pp: int, names: tuple[str, str, str] = (_LAYOUT, _FIRST, _LAST)
) -> None:
    """Reads the layers of each stage: of a layout, or of the first and the last stage, by these names."""
    layout_of, first_of, last_of = names
    layout_text, first_layers, last_layers = reader.get(layout_of), reader.whole(first_of), reader.whole(last_of)
    if layout_text is not None:
        sizes = _read_layout(str(layout_text))
        if sizes is None or len(sizes) % pp or (layers is not None and sum(sizes) != layers):
            reader.note(
                f"{reader.name(layout_of)} = {layout_text} is not followed: stages are taken to have even shares of the layers"
            )
            return
        reader.knobs["virtual_stages"] = len(sizes) // pp
    elif (first_layers or last_layers) and layers is not None and pp > 1:
        ends = (first_layers is not None) + (last_layers is not None)
        middle_layers, between = layers - (first_layers or 0) - (last_layers or 0), pp - ends
        if middle_layers < between or (between and middle_layers % between) or (not between and middle_layers):
            reader.note(
                f"{reader.name(first_of, last_of)}: {middle_layers} layers cannot be shared by the other {between} stages"
            )
            return
        middle = [middle_layers // between] * between if between else []
        sizes = (*([first_layers] if first_layers else ()), *middle, *([last_layers] if last_layers else ()))
        if reader.knobs.get("virtual_stages", 1) > 1:
            reader.note(
                f"{reader.name(first_of, last_of)}: the chunks of a rank are taken to have even shares of the layers"
            )
            return
    else:
        return
    if not is_even(stage_blocks := ",".join(map(str, sizes))):
        reader.knobs["stage_blocks"] = stage_blocks


def read_overlap(reader: SettingsReader) -> None:
    """Reads communication that overlaps with products, and the exchange of rows between experts."""
    for name, flags_of in settings_of("megatron")["overlap"].items():
        if reader.flag(*flags_of):
            reader.conventions[name] = True
    if reader.get("moe-flex-dispatcher-backend", "model.moe_flex_dispatcher_backend") in ("deepep", "hybridep"):
        reader.conventions["rows_once_a_node"] = True


def _read_kernels(reader: SettingsReader) -> None:
    """Reads the kernels, and communication that overlaps with the passes."""
    conventions = reader.conventions
    read_overlap(reader)
    if reader.flag("no-gradient-accumulation-fusion") or reader.flag("gradient-accumulation-fusion") is False:
        conventions["gradient_copy"] = True
    if reader.get("transformer-impl") == "local" and not reader.flag("use-flash-attn"):
        reader.knobs["attention"] = "eager"  # core attention by products and a softmax, as in DotProductAttention
    if reader.flag("cross-entropy-loss-fusion") and reader.get("cross-entropy-fusion-impl") == "te":
        conventions["loss"] = "fused"
    if reader.knobs.get("virtual_stages", 1) > 1 and not reader.flag("no-overlap-p2p-communication"):
        conventions["overlap_transfers"] = True


_MODULES = frozenset({"core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"})
"""Values of `--recompute-modules`."""
RECOMPUTATION = ("recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-modules")


def read_recomputation(reader: SettingsReader, layers: int | None, names: Sequence[str] = RECOMPUTATION) -> None:
    """Reads the recomputation of parts of blocks, and of some blocks of each stage, by these names."""
    granularity_of, method_of, count_of, modules_of = names
    granularity, knobs = str(reader.get(granularity_of) or ""), reader.knobs
    if granularity == "selective" or reader.flag("recompute-activations"):
        knobs["checkpoint_ratio"] = 0
        modules = reader.get(modules_of)
        recomputed = modules if isinstance(modules, list) else re.findall(r"\w+", str(modules or "core_attn"))
        reader.conventions["recompute_attention"] = "core_attn" in recomputed
        if set(recomputed) - {"core_attn"}:
            reader.conventions["recompute_modules"] = "+".join(name for name in recomputed if name in _MODULES)
        if set(recomputed) - _MODULES:
            reader.misunderstood(modules_of)
        reader.note(
            "selective recomputation repeats attention without its linear layers, as fused attention does anyway; the knob "
            "checkpoint_ratio has no value for it"
        )
    elif granularity not in ("", "full"):
        reader.note(
            f"{reader.name(granularity_of)} = {granularity} is not a value that redline knows: nothing is recomputed"
        )
        reader.misunderstood(granularity_of)
    elif granularity == "full" and reader.get(method_of) == "block":
        count = reader.whole(count_of)
        if count is None or layers is None:
            reader.note(
                f"{reader.name(count_of)}: the share of recomputed layers needs num-layers; all are assumed to be recomputed"
            )
            knobs["checkpoint_ratio"] = 1
        else:
            stage_layers = max(1, layers // (knobs.get("pp", 1) * knobs.get("virtual_stages", 1)))
            if count > stage_layers:
                reader.note(
                    f"{reader.name(count_of)} = {count} is more than the {stage_layers} layers of a stage: all are recomputed"
                )
            knobs["checkpoint_ratio"] = min(1.0, count / stage_layers)
    elif granularity == "full" and (reader.whole(count_of) or 1) > 1:
        reader.misunderstood(count_of)
        reader.note(f"{reader.name(count_of)}: inputs are taken to be kept of every layer, not of the first of several")


def write(strategy: Strategy, reader: SettingsReader) -> dict[str, Any]:
    """Writes the global batch, partial recomputation, and stages by their layers, if the file has these."""
    settings: dict[str, Any] = {"global-batch-size": strategy.micro_batch * strategy.grad_accum * strategy.dp}
    layers = reader.whole("num-layers")
    stages = strategy.pp * strategy.virtual_stages
    if not strategy.etp:
        settings[_SLICES] = None  # tp, which is its default
    if any(map(reader.has, (_LAYOUT, _FIRST, _LAST))) and strategy.pp != (
        reader.whole("pipeline-model-parallel-size") or 1
    ):
        raise LookupError("pp")  # the layers of each stage are those of as many stages
    if 0 < strategy.checkpoint_ratio < 1:
        if layers is None:
            raise LookupError(f"checkpoint_ratio={strategy.checkpoint_ratio}")
        count = max(1, round(strategy.checkpoint_ratio * (layers // stages)))
        settings |= {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": count}
    if strategy.zero >= 2 and not reader.flag("use-torch-fsdp2"):
        settings |= _WITH_FSDP
    if strategy.stage_blocks is not None:
        settings[_LAYOUT] = layout(blocks_of_stages(strategy.stage_blocks))
    if reader.has(_OLD_CHUNKS) and layers is not None:  # Megatron-LM refuses both flags together
        settings[KNOBS["virtual_stages"].keys[0]] = None
        settings[_OLD_CHUNKS] = layers // stages if strategy.virtual_stages > 1 else None
    return settings


def conventions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's formats: weights of 16 bits, fp32 master weights, and gradients in fp32 (in 16 bits in fp16, or if
    they are reduced in bf16), accumulated by the kernels of the products, in a buffer that is always allocated
    (core/distributed/param_and_grad_buffer.py); activations scattered between stages (arXiv:2104.04473, section 4.1);
    attention of Transformer Engine; a loss by operators over parts of the vocabulary; products of experts one by one
    (Transformer Engine's GroupedLinear); no overlap of the replicas' communication with the passes, unless requested.
    """
    eight = str(config.get("precision", "")).startswith("fp8")
    half = eight or config.get("precision") in ("bf16", "fp16")
    narrow = config.get("precision") == "fp16" or config.get("reduce_dtype") == "bf16"
    formats = {"precision": "bf16_pure", "master_weights": "fp32", "gradient_dtype": "bf16" if narrow else "fp32"}
    kernels = {"attention_kernel": "flash3", "loss": "parallel", "overlap_gradients": False}
    return {
        "scatter_transfers": True,
        "gradients_stay": True,
        "separate_experts": True,
        **kernels,
        **(formats if half else {}),
        **({"products": "fp8"} if eight else {}),
    }


def option(name: str, value: Any, reader: SettingsReader) -> str:
    """Writes a flag, which has no value if it is a switch."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"without --{name}"
    return f"--{name} {value}"


_OTHER_MODELS = re.compile(r"(?<![a-z])(bert|t5|vlm|vision|retro|ict|mamba|multimodal)(?![a-z])")
"""Words in names of scripts and their folders that build other models than a GPT."""


def _read_words(command: Sequence[str], settings: dict[str, Any]) -> tuple[str, ...]:
    """Returns a note if the script builds another kind of model."""
    script = Path(command[0])
    kind = None if "gpt" in script.name else _OTHER_MODELS.search("/".join(script.parts[-2:]))
    if kind is None:
        return ()
    return (f"{script.name} trains another kind of model ({kind[1]}): its flags are read as those of a GPT",)


FRAMEWORK = framework_of(
    "megatron",
    KNOBS,
    conventions=conventions,
    prepare=prepare,
    read=read,
    read_words=_read_words,
    write=write,
    option=option,
)


_TOTAL_OF_BRIDGE = "train.global_batch_size"
_STAGES_OF_BRIDGE = (
    "model.pipeline_model_parallel_layout",
    "model.num_layers_in_first_pipeline_stage",
    "model.num_layers_in_last_pipeline_stage",
)
_RECOMPUTATION_OF_BRIDGE = tuple(
    f"model.recompute_{name}" for name in ("granularity", "method", "num_layers", "modules")
)
BRIDGE_KNOBS = knob_table("megatron-bridge")
"""Megatron-Bridge's names of the knobs."""


def _read_bridge(reader: SettingsReader) -> None:
    """Reads the batch, recomputation, and stages given by their layers; notes that the settings of a named recipe are
    not read.
    """
    layers = reader.whole("model.num_layers")
    if (samples := reader.whole(_TOTAL_OF_BRIDGE)) is not None:
        reader.facts["global_batch"] = samples
    if (name := reader.get("recipe")) is not None:
        reader.misunderstood("recipe")
        reader.note(
            f"the batch, degrees and recomputation that recipe = {name} sets are not read: give those that are not Megatron's "
            "defaults by --fix, such as --fix cp=2"
        )
    read_stages(reader, layers, reader.knobs.get("pp", 1), _STAGES_OF_BRIDGE)
    if reader.knobs.get("virtual_stages", 1) > 1:
        reader.knobs["pipeline_schedule"] = "interleaved"
    read_recomputation(reader, layers, _RECOMPUTATION_OF_BRIDGE)
    read_overlap(reader)


def _write_bridge(strategy: Strategy, reader: SettingsReader) -> dict[str, Any]:
    """Writes the global batch."""
    return {_TOTAL_OF_BRIDGE: strategy.micro_batch * strategy.grad_accum * strategy.dp}


BRIDGE = framework_of("megatron-bridge", BRIDGE_KNOBS, conventions=conventions, read=_read_bridge, write=_write_bridge)
