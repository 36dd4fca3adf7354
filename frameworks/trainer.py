"""transformers.Trainer: TrainingArguments, as HfArgumentParser reads them."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from ..knobs.meaning import recomputed
from ..knobs.strategy import Strategy
from ..knobs.text import value_text
from .common import (
    DDP_HOOK,
    FSDP_OFFLOAD,
    FSDP_ZERO_1,
    adamw,
    no_fsdp_on_a_cpu,
    note_attention,
    note_kernels,
    note_lora,
    note_pipeline,
    note_pure_bf16,
    note_reduction,
    optimizer_text,
    read_optimizer,
    torch_optimizer,
)
from .export_input import ExportInput, Target, as_json, as_yaml
from .framework import SettingsReader, framework_of, knob_table, number, text_of

CHECKED = ("transformers", "5.23")

AVERAGING = ("bert", "roberta", "albert", "t5")
"""Families whose models average their loss themselves, although their forward accepts any keyword."""

_RESHARD = "fsdp_config.reshard_after_forward"
_EVERY = "activation_checkpointing_kwargs.every_n_layers"
KNOBS = knob_table("trainer")
"""TrainingArguments' names of the knobs. The older form of FSDP is one text, `full_shard auto_wrap offload`."""


def arguments(setup: ExportInput) -> dict[str, Any]:
    """Keyword arguments of transformers.TrainingArguments."""
    arguments: dict[str, Any] = {"output_dir": "out"}
    if setup.micro_batch is not None:
        arguments |= KNOBS["micro_batch"].settings(setup.micro_batch) | KNOBS["grad_accum"].settings(setup.grad_accum)
    else:
        setup.note("the batch is not known: set per_device_train_batch_size")
    arguments |= _precision(setup)
    sharded = _shards(setup)
    arguments |= _checkpointing(setup, sharded)
    if setup.knob("fusion"):
        arguments |= KNOBS["fusion"].settings(True)
        arguments["torch_compile_backend"] = "inductor"
        setup.note("fusion=true compiled each repeated block; the Trainer compiles the model as a whole")
    fused = setup.knob("fused_optimizer")
    if setup.optimizer:
        arguments |= _own_optimizer(setup, fused)
    else:
        if fused is not None:
            arguments |= KNOBS["fused_optimizer"].settings(fused)
        arguments |= _optimizer(setup)
    if sharded:
        arguments["fsdp"] = True
        arguments["fsdp_config"] = _fsdp(setup)
    else:
        setup.note_unless_neutral("offload", "the Trainer offloads with FSDP only (or see the target deepspeed)")
        if setup.processes > 1:
            # By default the Trainer looks for parameters without a gradient in every step; a configuration that
            # trained in a trial has none.
            arguments["ddp_find_unused_parameters"] = False
    if setup.device_type == "cpu":
        note_kernels(setup)
    elif setup.knob("kernels"):
        arguments |= KNOBS["kernels"].settings(True)
        setup.note(f"kernels=true became Liger's kernels, which are others than those {setup.found}")
    # By default the Trainer waits for every micro-batch's loss to check that it is a number.
    arguments["logging_nan_inf_filter"] = False
    if setup.device_type == "cpu":
        arguments["use_cpu"] = True
        arguments["dataloader_pin_memory"] = False
    _note_the_rest(setup)
    return arguments


def _precision(setup: ExportInput) -> dict[str, Any]:
    precision = setup.knob("precision")
    if precision == "bf16_pure":
        note_pure_bf16(setup)
    elif setup.formats.scaling:
        setup.note(f"precision={precision} is accelerate's: launch with the target accelerate's file; bf16 is set here")
    if precision == "tf32":
        return {"tf32": True}
    half = setup.formats.autocast
    return {half: True} if half else {}  # off is the default, and not written


_OWN = {"AdamW": "adamw_torch", "SGD": "sgd", "Adagrad": "adagrad", "RMSprop": "rmsprop"}
"""Values of `optim`, by the class of torch.optim that the Trainer makes."""
_SETTINGS = {"lr": "learning_rate", "weight_decay": "weight_decay"}
_ADAM_SETTINGS = {**_SETTINGS, "eps": "adam_epsilon"}


def _own_optimizer(setup: ExportInput, fused: Any) -> dict[str, Any]:
    """The optimizer of the user's workload, as far as arguments can state it; the first line names one that they cannot."""
    arguments: dict[str, Any] = {"max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    name, settings = torch_optimizer(setup) or ("", {})
    optim = _OWN.get(name)
    if optim == "adamw_torch":
        betas = settings.pop("betas", None)
        arguments |= dict(zip(("adam_beta1", "adam_beta2"), betas)) if betas else {}
        arguments |= {"weight_decay": settings.pop("weight_decay", 0.01)}
        optim = "adamw_torch_fused" if fused else optim
    names = _ADAM_SETTINGS if name == "AdamW" else _SETTINGS
    if optim is None or not settings.keys() <= names.keys():
        setup.missing.append(
            f"the optimizer, {optimizer_text(setup)}, which arguments cannot state: give "
            f"Trainer(optimizers=({optimizer_text(setup, 'model.parameters()')}, None))"
        )
        return arguments
    return arguments | {"optim": optim} | {names[setting]: value for setting, value in settings.items()}


def _optimizer(setup: ExportInput) -> dict[str, Any]:
    # Clipping was not measured. The Trainer computes the norm for it anyway.
    arguments: dict[str, Any] = {"max_grad_norm": 0.0}
    if measured := adamw(setup):
        arguments |= {
            "learning_rate": measured["lr"],
            "lr_scheduler_type": "constant",
            "adam_beta1": measured["betas"][0],
            "adam_beta2": measured["betas"][1],
            "adam_epsilon": measured["eps"],
            "weight_decay": measured["weight_decay"],
        }
        setup.note(
            "the Trainer spares biases and norms from weight_decay, which was of all parameters: for that "
            "give it an AdamW of your own, Trainer(optimizers=(optimizer, None))"
        )
    return arguments


def _shards(setup: ExportInput) -> bool:
    zero = setup.knob("zero")
    if no_fsdp_on_a_cpu(setup):
        return False
    if setup.dp > 1 and zero == 1:
        setup.note(FSDP_ZERO_1)
    return setup.dp > 1 and zero > 0


def _checkpointing(setup: ExportInput, sharded: bool) -> dict[str, Any]:
    ratio = setup.knob("checkpoint_ratio")
    if not ratio:
        return {}
    every = round(1 / ratio)
    if every > 1 and abs(1 / ratio - every) < 1e-9 and not sharded:
        layers = setup.shape.get("layers", 0)
        there, here = len(recomputed(layers, ratio)), len(range(0, layers, every))
        if there != here:
            setup.note(
                f"checkpoint_ratio={value_text(ratio)} recomputes {here} of {layers} blocks here, and {there} as it "
                f"was {setup.found}"
            )
        return {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": every}}
    if ratio < 1:
        setup.note(
            f"checkpoint_ratio={value_text(ratio)} became all blocks: less memory and less speed than {setup.found}"
        )
    # FSDP's own checkpointing wraps the gathered unit, and so gathers it once less.
    return {} if sharded else {"activation_checkpointing": True}


def _fsdp(setup: ExportInput) -> dict[str, Any]:
    groups = setup.knob("hsdp")
    if groups > 1:
        tp = f", tp_size={setup.tp}" if setup.tp > 1 else ""
        setup.note(
            f"hsdp={groups}: pass parallelism_config=ParallelismConfig(dp_replicate_size={groups}, "
            f"dp_shard_size={setup.dp // groups}{tp}); a file cannot contain it, and without it pieces are cut "
            f"over all {setup.dp} replicas: less memory than {setup.found}"
        )
    section: dict[str, Any] = {"version": 2, "reshard_after_forward": setup.exchange.gathered == "pass"}
    if setup.knob("checkpoint_ratio"):
        section["activation_checkpointing"] = True
    if setup.knob("offload") == "optimizer":
        section["cpu_offload"] = True
        setup.note(FSDP_OFFLOAD)
    return section


def _note_the_rest(setup: ExportInput) -> None:
    note_reduction(setup, DDP_HOOK)
    note_pipeline(setup)
    note_lora(setup)
    if setup.shape.get("family", "t5") in AVERAGING and setup.dp * (setup.grad_accum or 1) > 1:
        setup.note(
            "a model that averages its loss itself, as those for masked tokens and T5 do, needs "
            "model.accepts_loss_kwargs = False before the Trainer is made: taken for a sum over labels, its "
            "gradients would be replicas x grad_accum times as large"
        )
    if setup.tp > 1:
        setup.note(
            f"tp={setup.tp}: load the model with from_pretrained(..., tp_plan='auto') and pass "
            f"parallelism_config=ParallelismConfig(tp_size={setup.tp}); a file cannot contain it"
        )
    note_attention(setup)
    setup.note_unless_neutral("sequence_parallel", "cut activations by the model's own tp_plan")
    if setup.seq_len is not None:
        setup.note(f"seq_len={setup.seq_len} is your data's: what was {setup.found} had samples of that length")


def _use(file: str) -> str:
    kind = "json" if file.lower().endswith(".json") else "yaml"
    return f"HfArgumentParser(TrainingArguments).parse_{kind}_file({file!r}) in train.py"


TARGET = Target(
    name="trainer",
    about="TrainingArguments of transformers.Trainer, as YAML or JSON",
    stem="trainer",
    forms={"yaml": as_yaml(arguments), "json": as_json(arguments)},
    # HfArgumentParser refuses unknown keys, so the file cannot contain notes.
    silent=frozenset({"json"}),
    checked=CHECKED,
    pipelines=False,
    use=_use,
    start=lambda setup, file: f"{setup.torchrun()} train.py {file}",
)


def prepare(reader: SettingsReader) -> None:
    """Fills in the defaults of TrainingArguments for missing FSDP settings, and compilation, which its mode or backend
    switches on."""
    if reader.get("torch_compile_mode", "torch_compile_backend") is not None:
        reader.override("torch_compile", True)
    fsdp = reader.get("fsdp")
    if fsdp is not None and reader.flag("fsdp") is not False:
        reader.set(_RESHARD, True)


def read(reader: SettingsReader) -> None:
    """Reads FSDP's text, checkpointing of every n-th layer, and the optimizer."""
    fsdp = reader.get("fsdp")
    fsdp_text = " ".join(map(str, fsdp)) if isinstance(fsdp, list) else str(fsdp or "").lower()
    for name, stage in (("shard_grad_op", 2), ("full_shard", 3), ("hybrid_shard", 3), ("hybrid_shard_zero2", 2)):
        if name in fsdp_text:
            reshards = reader.flag(_RESHARD) if reader.stated(_RESHARD) else None  # has precedence
            reader.knobs["zero"] = stage if reshards is None else 3 if reshards else 2
    if "hybrid_shard" in fsdp_text:
        reader.facts["hybrid"] = True
    if "offload" in fsdp_text.split():
        reader.knobs["offload"] = "optimizer"
    every = reader.whole(_EVERY)
    if every and reader.knobs.get("checkpoint_ratio"):
        reader.knobs["checkpoint_ratio"] = 1 / every
    if reader.flag("bf16") and reader.flag("fp16"):
        reader.knobs["precision"] = "bf16"
        reader.note("bf16 and fp16 are both true, which transformers refuses: bf16 is estimated")
    if loads_narrow(reader) and not (reader.knobs.get("precision") == "bf16" and reader.knobs.get("zero", 0) >= 2):
        reader.conventions["precision"] = "bf16_pure"
    read_optimizer(reader, "optim", "optimizer")
    if number(reader.get("label_smoothing_factor")):
        reader.misunderstood("label_smoothing_factor")
        if reader.knobs.get("kernels"):
            reader.knobs["kernels"] = False
        reader.note(
            "label_smoothing_factor: the Trainer takes log-probabilities of whole logits, whose copy is not counted"
        )
    read_evaluation(reader)


_DTYPES = ("torch_dtype", "dtype")


def loads_narrow(reader: SettingsReader) -> bool:
    """True if weights are loaded in 16 bits, as most checkpoints have them."""
    if any(map(reader.stated, _DTYPES)) and not any(map(reader.has, _DTYPES)):
        reader.note(f"{reader.name(*_DTYPES)} = auto is that of the checkpoint: 16 bits are assumed")
        return True
    return str(reader.get(*_DTYPES)).rpartition(".")[2] in ("bfloat16", "bf16", "float16", "fp16")


def read_evaluation(reader: SettingsReader) -> None:
    """Marks the batch of evaluations as not read where it is larger than that of the training, whose logits it then exceeds."""
    evaluates = str(reader.get("eval_strategy", "evaluation_strategy") or "no") != "no" or reader.flag("do_eval")
    setting = reader.name("per_device_eval_batch_size", "eval_batch_size")  # of the Trainer, and of axolotl
    size = reader.whole(setting) or 8
    if evaluates and size > (reader.knobs.get("micro_batch") or 8):
        reader.set(setting, size)
        reader.misunderstood(setting)
        default = "" if reader.has(setting) else ", the default"
        reader.note(
            f"evaluations have {size} samples at once{default}, more than training: their logits are not estimated"
        )


def _read(reader: SettingsReader) -> None:
    """Reads the Trainer's arguments, and the format in which transformers loads weights."""
    read(reader)
    if reader.has("model_name_or_path") and not any(map(reader.stated, ("config_name", "deepspeed", *_DTYPES))):
        # PreTrainedModel.from_pretrained of version 5 has dtype="auto"
        reader.note(
            "model_name_or_path: transformers 5 loads weights in the checkpoint's format, usually bf16, unless FSDP widens them; "
            "fp32 is assumed: add --dtype float32, or --fix precision=bf16_pure"
        )


def conventions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the conventions of accelerate: it accumulates under `no_sync`, where replicas reduce nothing and FSDP keeps
    full gradients, and torch's DDP has buckets beside them. With mixed precision, FSDP upcasts shards of 16 bits to fp32 and
    gathers them in 16 bits; it also offloads shards of weights and gradients.
    """
    fields: dict[str, Any] = {"unsharded_gradients": True, "bucket_copy": True}
    if config.get("offload") == "optimizer":
        fields["offload_weights"] = True
    if config.get("precision") == "bf16" and config.get("zero", 0) >= 2:
        # Whole gradients accumulate in the format of the reduction, accelerate's MixedPrecision.reduce_dtype: 16 bits.
        gradients = "bf16" if config.get("grad_accum", 1) > 1 else "fp32"
        fields |= {"precision": "bf16_pure", "parameter_dtype": "fp32", "gradient_dtype": gradients, "pieces": True}
    return fields


def write(strategy: Strategy, reader: SettingsReader) -> dict[str, Any]:
    """Writes a share of checkpointed blocks, which must be every n-th."""
    ratio = strategy.checkpoint_ratio
    if ratio in (0, 1):
        return {}
    if not reader.has(_EVERY):
        raise LookupError(f"checkpoint_ratio={ratio}")
    every = round(1 / ratio)
    if abs(1 / ratio - every) > 1e-9:
        raise LookupError(f"checkpoint_ratio={ratio}")
    return {_EVERY: every}


def option(name: str, value: Any, reader: SettingsReader) -> str:
    """Writes an argument; a field of one that is a mapping as JSON, with the fields that it has."""
    argument, dot, field = name.partition(".")
    if name == "fsdp" and value is True:
        value = "full_shard"  # its parser takes a text only; fsdp_config has precedence
    if not dot:
        return f"--{name} {shlex.quote(text_of(value))}"
    present = {key.partition(".")[2]: old for key, old in reader.settings.items() if key.startswith(f"{argument}.")}
    return f"--{argument} '{json.dumps({**present, field: value})}'"


FRAMEWORK = framework_of(
    "trainer", KNOBS, option=option, prepare=prepare, conventions=conventions, read=_read, write=write, is_common=True
)
