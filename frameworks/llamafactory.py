"""LLaMA-Factory: `llamafactory-cli train FILE key=value ...`; arguments of the Trainer, and some of its own."""

from ..knobs.strategy import Strategy
from .common import read_copied, read_lora, read_quantized, read_stage
from .framework import SettingsReader, framework_of, knob_table, number
from .trainer import (
    KNOBS as TRAINER,
    conventions,
    option,
    prepare as prepare_trainer,
    read as read_trainer,
    write,
)

KNOBS = knob_table("llamafactory", TRAINER)
"""LLaMA-Factory's names of the knobs; by default it recomputes every block."""


_LAYERWISE = ("galore", "apollo")


def prepare(reader: SettingsReader) -> None:
    """Fills in the Trainer's defaults, and those of version 1's files."""
    if _is_v1(reader):
        reader.set("bf16", True)
        reader.set("micro_batch_size", 1)
        if reader.flag("enable_activation_checkpointing") is False:
            reader.set("disable_gradient_checkpointing", True)
        if str(reader.get("dist_config.name") or "") == "fsdp2":
            reader.set("fsdp", True)
        reader.set("finetuning_type", reader.get("peft_config.name") or "full")
        names = {
            "r": "lora_rank",
            "lora_alpha": "lora_alpha",
            "lora_dropout": "lora_dropout",
            "target_modules": "lora_target",
        }
        for name, setting in names.items():
            if (value := reader.get(f"peft_config.{name}")) is not None:
                reader.set(setting, value)
        if reader.has("quant_config.name"):
            reader.set("quantization_bit", reader.get("quant_config.quantization_bit") or 4)
    prepare_trainer(reader)


def _is_v1(reader: SettingsReader) -> bool:
    return reader.has("model") and not reader.has("model_name_or_path")


def read(reader: SettingsReader) -> None:
    """Reads the Trainer's arguments, and the adapters; LLaMA-Factory's own defaults are in its hparams."""
    if reader.flag("neat_packing"):
        reader.set("packing", True)
    read_trainer(reader)
    if reader.flag("gradient_checkpointing"):  # the Trainer then recomputes, whatever LLaMA-Factory's own switch is
        reader.knobs["checkpoint_ratio"] = 1
    reader.default("seq_len", 2048)
    if _is_v1(reader) and (total := reader.whole("global_batch_size")) is not None:
        reader.facts["global_batch"] = total
    kind = reader.get("finetuning_type") or "lora"
    if kind == "lora":
        target = reader.get("lora_target") or "all"
        dropout = reader.get("lora_dropout")
        read_lora(reader, reader.whole("lora_rank") or 8, target, reader.whole("lora_alpha"), dropout, "lora_target")
        read_copied(reader, "additional_target", "fp32")
    elif kind == "freeze":
        _read_frozen(reader)
    elif kind != "full":
        reader.misunderstood("finetuning_type")
    # Weights are loaded in 16 bits; those that are trained, adapters too, are cast to float32 (model/adapter.py).
    reader.facts["loaded_dtype"] = "bf16"
    if reader.flag("pure_bf16"):
        reader.conventions["precision"] = "bf16_pure"
    read_quantized(reader, "quantization_bit")
    read_stage(
        reader, "stage", reference=kind != "lora" and str(reader.get("pref_loss") or "") not in ("orpo", "simpo")
    )
    if not reader.flag("packing"):
        reader.note("samples may be shorter than cutoff_len (no packing): the estimate is of full ones")
    for name in _LAYERWISE:
        if reader.flag(f"{name}_layerwise"):
            reader.misunderstood(f"{name}_layerwise")
            reader.note(f"{name}_layerwise: LLaMA-Factory refuses it on more than one device")
        rank, target = reader.whole(f"{name}_rank") or 16, reader.get(f"{name}_target") or "all"
        if not reader.flag(f"use_{name}"):
            continue
        if reader.has("deepspeed"):
            reader.note("LLaMA-Factory refuses GaLore and APOLLO with deepspeed")
        if str(target) == "all" and kind == "full":
            reader.facts["low_rank"] = rank
        else:
            reader.misunderstood(f"use_{name}")
    if kind not in ("lora", "oft") and reader.has("quantization_bit"):
        reader.note(f"LLaMA-Factory refuses quantization_bit with finetuning_type = {kind}")
    if reader.flag("use_badam"):
        _read_blocks_in_turn(reader)
        if not reader.has("deepspeed"):
            reader.note("use_badam: LLaMA-Factory refuses it on more than one device without deepspeed's ZeRO 3")
    reader.misunderstood(*(name for name in ("use_adam_mini", "use_muon") if reader.flag(name)))


def _read_frozen(reader: SettingsReader) -> None:
    """Reads the blocks that are trained: the last ones, or the first if their number is negative."""
    count = number(reader.get("freeze_trainable_layers") or 2)
    modules, extra = str(reader.get("freeze_trainable_modules") or "all"), reader.get("freeze_extra_modules")
    if not isinstance(count, int) or not count or modules != "all" or extra is not None:
        reader.misunderstood("finetuning_type", "freeze_trainable_modules", "freeze_extra_modules")
        return
    reader.facts["trained_blocks"] = count
    reader.conventions["frozen_bits"] = 16
    if count > 0:
        reader.note(
            "finetuning_type = freeze: backward ends at the trained blocks, so that a step is faster than predicted"
        )


def _read_blocks_in_turn(reader: SettingsReader) -> None:
    """Reads BAdam, which trains one block after the other with weights and states of its own in fp32 (arXiv:2404.02827)."""
    if str(reader.get("badam_mode") or "layer") != "layer":
        reader.misunderstood("badam_mode", "use_badam")
        return
    reader.facts["trained_blocks"] = -1
    reader.conventions |= {"precision": "bf16_pure", "master_weights": "fp32"}


def cannot(knob: str, strategy: Strategy, reader: SettingsReader) -> bool:
    """True for what its files leave to another engine's, and for files of version 1."""
    return (knob in ("zero", "offload") and not reader.has("fsdp")) or _is_v1(reader)


FRAMEWORK = framework_of(
    "llamafactory",
    KNOBS,
    prepare=prepare,
    conventions=conventions,
    read=read,
    write=write,
    cannot=cannot,
    option=option,
)
