"""Notes about limitations that several frameworks share."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..knobs.text import value_text
from .export_input import ExportInput
from .framework import SettingsReader, number, settings_of

ADAMW: Mapping[str, Any] = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
"""Optimizer of trials if the workload has none: AdamW, at a constant rate."""
DDP_HOOK = "DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16) of accelerate enables it"
FSDP_OFFLOAD = "offload=optimizer became FSDP's offload, which moves parameters and gradients to host memory too"
FSDP_ZERO_1 = "zero=1 became FSDP2 without resharding, which shards the gradients too (ZeRO stage 2)"


def adamw(setup: ExportInput) -> Mapping[str, Any]:
    """Returns the settings of AdamW as measured; empty if the workload has its own optimizer, or they are unknown."""
    if setup.optimizer:
        return {}
    if setup.own_workload or not setup.spec:
        setup.note("the learning rate, weight decay and betas of the optimizer are yours to set")
        return {}
    setup.note(
        f"the optimizer is as it was {setup.found}: AdamW with a constant rate of {ADAMW['lr']:g}, no "
        "clipping; a rate and a schedule of your own cost nothing, clipping some"
    )
    return ADAMW


def optimizer_text(setup: ExportInput, parameters: str = "") -> str:
    """The workload's own optimizer as a call, such as `SGD(lr=0.1, momentum=0.9)`."""
    path = str(setup.optimizer.get("class") or "")
    if not path:
        return "the workload's own"
    settings = [f"{name}={value}" for name, value in setup.optimizer.items() if name not in ("class", "groups")]
    name = path if parameters else path.rpartition(".")[2]
    groups = f" with {setup.optimizer['groups']} groups of parameters" if "groups" in setup.optimizer else ""
    return f"{name}({', '.join([*([parameters] if parameters else []), *settings])}){groups}"


def torch_optimizer(setup: ExportInput) -> tuple[str, dict[str, Any]] | None:
    """Returns the name in torch.optim of the workload's own optimizer, and its settings; None if a file cannot state it: a class
    of the user's own, settings that differ between groups of parameters, or an optimizer that could not be read."""
    settings = dict(setup.optimizer)
    module, _, name = str(settings.pop("class", "")).rpartition(".")
    return (name, settings) if module == "torch.optim" and "groups" not in settings else None


def note_adamw(setup: ExportInput) -> None:
    """Adds a note that the optimizer is made in the user's code, with its measured settings.

    Without fused, torch chooses: `fused=False` would be a loop over the parameters on a GPU too.
    """
    settings: dict[str, Any] = {"fused": True} if setup.knob("fused_optimizer") else {}
    if setup.optimizer:
        call = optimizer_text(setup, "model.parameters()")
        setup.note(f"the optimizer is made in your code; {setup.found} was {call}")
        return
    if setup.spec and not setup.own_workload:
        settings = {"lr": ADAMW["lr"], "weight_decay": ADAMW["weight_decay"], **settings}
    if settings:
        arguments = "model.parameters()" + "".join(f", {name}={value}" for name, value in settings.items())
        setup.note(f"the optimizer is made in your code; {setup.found} was torch.optim.AdamW({arguments})")


def note_attention(setup: ExportInput) -> None:
    """Adds a note that the implementation of attention is chosen with the model."""
    value = setup.knob("attention")
    if value is not None:
        setup.note(f"attention={value} is chosen with the model: from_pretrained(..., attn_implementation='{value}')")


def note_partial_checkpointing(setup: ExportInput, done: str) -> None:
    """Adds a note that all blocks are checkpointed instead of a share."""
    ratio = setup.knob("checkpoint_ratio")
    if 0 < ratio < 1:
        setup.note(
            f"checkpoint_ratio={value_text(ratio)} recomputes a share of the blocks, and {done}: "
            f"less memory and less speed than {setup.found}"
        )


def note_kernels(setup: ExportInput) -> None:
    """Adds a note that the loss keeps all logits in memory; Liger's modules run on GPUs only."""
    instead = f"the loss keeps all logits in memory here, which takes more memory than {setup.found}"
    if setup.device_type != "cpu":
        instead += "; Liger-Kernel has modules and losses to replace the model's by"
    setup.note_unless_neutral("kernels", instead)


def note_pipeline(setup: ExportInput) -> None:
    """Adds a note that there are no pipeline stages."""
    if setup.order_of_stages() is not None:
        setup.note(
            f"pp={setup.pp} has no counterpart here: this file runs on {setup.processes} instead of "
            f"{setup.devices} devices, each holding {setup.pp} times the layers; torchtitan, megatron and "
            "python have pipelines"
        )


def note_reduction(setup: ExportInput, instead: str) -> None:
    """Adds a note that gradients are reduced in another format."""
    if setup.dp > 1:
        setup.note_unless_neutral("reduce_dtype", instead)


def note_hsdp(setup: ExportInput, instead: str) -> None:
    """Adds a note that shards are cut over all replicas instead of groups."""
    if setup.dp > 1:
        setup.note_unless_neutral(
            "hsdp",
            f"pieces are cut over all {setup.dp} replicas and gathered between hosts: less memory than "
            f"{setup.found}; {instead}",
        )


def note_order(setup: ExportInput, supported: Sequence[str], done: str) -> None:
    """Adds a note if the order of a pipeline's micro-batches is not one of those `known` here."""
    kind = setup.order_of_stages()
    if kind not in (None, *supported):
        chunks = setup.knob("virtual_stages")
        several = f" with virtual_stages={chunks}" if chunks > 1 else ""
        setup.note(f"pipeline_schedule={kind}{several} has no counterpart here: {done}")


def note_lora(setup: ExportInput) -> None:
    """Adds a note that the model has to get its adapters in the user's code."""
    if setup.lora:
        settings = dict(item.split("=", 1) for item in setup.lora.split(","))
        target = settings.get("target", "").split("+")
        arguments = [f"r={settings['r']}", f"lora_alpha={settings.get('alpha', settings['r'])}"]
        if target == ["all-linear"]:
            arguments.append("target_modules='all-linear'")
        elif target != [""]:
            arguments.append(f"target_modules={target}")
        if "dropout" in settings:
            arguments.append(f"lora_dropout={settings['dropout']}")
        setup.note(
            f"lora={setup.lora}: only adapters were trained; give the model theirs by "
            f"peft.get_peft_model(model, peft.LoraConfig({', '.join(arguments)}))"
        )


def note_tf32(setup: ExportInput) -> None:
    """Adds a note on enabling TensorFloat-32 if a framework's file cannot."""
    setup.note("precision=tf32: call torch.set_float32_matmul_precision('high') before training")


def note_pure_bf16(setup: ExportInput) -> None:
    """Adds a note that the model has to be loaded in bfloat16."""
    setup.note(
        "precision=bf16_pure keeps the weights in bfloat16 too: load the model with dtype=torch.bfloat16 "
        "(here mixed precision is off)"
    )


def no_fsdp_on_a_cpu(setup: ExportInput) -> bool:
    """True if replicas would be sharded on a CPU, which accelerate refuses; adds a note that they are not."""
    zero = setup.knob("zero")
    if setup.device_type != "cpu" or zero == 0 or setup.dp == 1:
        return False
    setup.knob("hsdp")
    setup.note(
        f"zero={zero} has no counterpart here: accelerate has no FSDP on a CPU, so the replicas are whole "
        f"(DDP): more memory than {setup.found}"
    )
    return True


_LAYERS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.qkv_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate_up_proj", "mlp.fc1", "mlp.fc2", "self_attn.dense"),
    *("attention.query_key_value", "self_attention.query_key_value", "attention.dense", "self_attention.dense"),
    *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
)
"""Linear layers of a block in transformers' models."""
_BLOCKS = ("model.layers.{}.", "model.language_model.layers.{}.", "gpt_neox.layers.{}.", "transformer.h.{}.")


def _layers_of(pattern: str) -> list[str]:
    """Linear layers that a regular expression selects in the first blocks of a model, as peft matches it."""
    paths = {layer: [block.format(number) for block in _BLOCKS for number in (0, 1, 11)] for layer in _LAYERS}
    try:
        matched = [
            layer for layer, blocks in paths.items() if any(re.fullmatch(pattern, block + layer) for block in blocks)
        ]
    except re.error:
        return []
    return list(dict.fromkeys(layer.rpartition(".")[2] for layer in matched))


def read_lora(
    reader: SettingsReader, rank: int, target: object, alpha: int | None, dropout: object = None, key: str = ""
) -> None:
    """Reads adapters, in the format of `--lora`; a regular expression selects layers by their paths, in the setting `key`.
    Without a `target` the layers are peft's choice for the family."""
    names = (
        [str(layer) for layer in target] if isinstance(target, list) else str(target or "").replace(",", " ").split()
    )
    if isinstance(target, str) and len(names) == 1 and re.search(r"[\\^$|()\[\]*+?]", target):
        names = _layers_of(target)
        if names:
            reader.note(f"{reader.name(key)} = {target} is taken for the layers {', '.join(names)} of every block")
        else:
            names = ["all-linear"]
            reader.misunderstood(key)
    chosen = "all-linear" if names in (["all"], ["all-linear"]) else "+".join(names)
    reader.facts["lora"] = f"r={rank},alpha={alpha or 2 * rank}" + (f",target={chosen}" if names else "")
    if isinstance(share := number(dropout), float) and 0 < share < 1:
        reader.facts["lora"] += f",dropout={share:g}"


_ENDS = {
    "embed_tokens": "embedding",
    "wte": "embedding",
    "embed_in": "embedding",
    "lm_head": "head",
    "embed_out": "head",
}
"""Roles of modules outside the blocks, by their names in transformers' models."""


def read_copied(reader: SettingsReader, key: str, dtype: str) -> None:
    """Reads modules of which peft trains a copy beside adapters (`modules_to_save`), in a dtype."""
    value = reader.get(key)
    names = value if isinstance(value, list) else str(value or "").replace(",", " ").split()
    reader.facts["copied_ends"] = {_ENDS[name]: dtype for name in names if name in _ENDS}
    if set(names) - _ENDS.keys():
        reader.misunderstood(key)


_MOMENTA = ("optimizer.params.momentum", "optimizer.init_args.momentum", "optimizer.momentum", "sgd_momentum")
"""Settings of SGD's momentum, which is a state of each parameter."""


def read_optimizer(reader: SettingsReader, *keys: str) -> None:
    """Takes the states of the optimizer into account; redline's own AdamW has two in float32."""
    value = reader.get(*keys)
    if value is None:
        return
    lowered = str(value).lower()
    reader.facts["optimizer"] = str(value)
    facts = settings_of("every")
    optimizer = next((optimizer for part, optimizer in facts["optimizers"].items() if part in lowered), None)
    key = next(key for key in keys if reader.has(key))
    for name, rank in facts["low_rank"].items():
        if name in lowered and not _reads_projection(reader, rank):
            reader.misunderstood(key)
    if optimizer is None or any(odd in lowered for odd in facts["odd_optimizers"]):
        reader.misunderstood(key)
        return
    name = optimizer["states"]
    if name == "sgd" and number(reader.get(*_MOMENTA)):
        name = "sgd-momentum"
    if "likeness" in optimizer:
        reader.note(f"{reader.name(*keys)} = {value} is taken for an optimizer with {optimizer['likeness']}")
    if name not in ("adamw", "adam"):
        reader.conventions["optimizer"] = name
    if "8bit" in lowered:
        reader.conventions["optimizer_dtype"] = "int8"


def _reads_projection(reader: SettingsReader, rank: int) -> bool:
    """Reads GaLore's and APOLLO's rank and layers, of transformers' arguments; False for others than all of the blocks."""
    arguments, target = str(reader.get("optim_args") or ""), reader.get("optim_target_modules")
    if match := re.search(r"\brank['\"]?\s*[=:]\s*(\d+)", arguments):
        rank = int(match[1])
    names = " ".join(map(str, target)) if isinstance(target, list) else str(target or "")
    if names == "all-linear" or ("attn" in names and "mlp" in names):
        reader.facts["low_rank"] = rank
        return True
    reader.misunderstood("optim_target_modules")
    return False


def read_one_unit(reader: SettingsReader, why: str) -> None:
    """Reads FSDP without a wrapping policy: the model is one unit, whose weights and gradients are whole at once."""
    if reader.knobs.get("zero", 0) >= 2:
        reader.knobs["zero"] = 2
        reader.facts["one_unit"] = True
        reader.note(f"{why} the model is one unit: all weights and gradients of a step are whole at once")


def read_stage(
    reader: SettingsReader, key: str, shown: str = "", *, reference: bool | None = None, fuses_loss: bool = False
) -> None:
    """Reads the kind of training: pairs and a second model are counted; generated samples are not.

    Args:
        reader: the settings.
        key: the setting with the kind.
        shown: the kind in a note; None for the setting.
        reference: False if there is no reference model in memory, whatever the kind.
        fuses_loss: True if the trainer's own losses of the kind are fused too: others take whole logits from the model, whatever
            kernels it has.
    """
    value = reader.get(key)
    if value is None:
        return
    shown = shown or f"{reader.name(key)} = {value}"
    stage = settings_of("every")["stages"].get(str(value).lower())
    if str(value).lower() not in ("pt", "sft") and not fuses_loss:
        reader.conventions["loss"] = "plain"
    if stage is None:
        reader.misunderstood(key)
        reader.note(
            f"{shown}: estimated like supervised training; samples that are generated, and further models, are not counted"
        )
        return
    sequences, second, words = stage["sequences"], stage["second"], stage.get("words")
    if stage.get("incomplete"):
        reader.misunderstood(key)
    if sequences > 1:
        reader.facts["sequences"] = sequences
    if second and reference is not False:
        reader.facts["reference_model"] = True
    elif second:
        pairs = "pairs of sequences; " if sequences > 1 else ""
        words = f"{pairs}no reference model in memory, and the time of its passes not counted"
    if words:
        reader.note(f"{shown}: estimated like supervised training, with {words}")


QUANTIZED_BITS = {4: 4.5, 8: 8.25}
"""Bits of a quantized weight with its scales, of bitsandbytes: one in 32 bits for 64 weights of 4 bits."""


def read_quantized(reader: SettingsReader, *names: str) -> None:
    """Reads a setting that quantizes the frozen weights."""
    value = reader.get(*names)
    if value is None or reader.flag(*names) is False:
        return
    name = reader.name(*names)
    bits = 8 if re.search(r"8", f"{name} {value}") else 4
    if "lora" not in reader.facts:
        reader.misunderstood(*names)
        reader.note(f"{name} = {value} without adapters: quantized weights cannot be trained")
        return
    reader.conventions["frozen_bits"] = QUANTIZED_BITS[bits]
    reader.note(
        f"{name} = {value}: frozen weights are taken to have {QUANTIZED_BITS[bits]} bits with their scales, except "
        "embeddings and head; the time to expand them is not taken into account"
    )
