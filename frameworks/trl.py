"""TRL: `trl sft --config FILE`, its scripts and their YAML; arguments of the Trainer, and some of its own."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .common import read_copied, read_lora, read_quantized, read_stage
from .framework import SettingsReader, framework_of, number, settings_of
from .trainer import KNOBS, conventions, loads_narrow, option, prepare, read as read_trainer, write

SUBCOMMAND = "subcommand"
"""The trainer: `sft`, `dpo`, ...; in a YAML alone it follows from the settings that only one trainer has, or is asked for."""
_GENERATES = ("grpo", "rloo")
"""Trainers whose samples are prompts with generated completions."""
_FUSED = ("sft", "dpo", "kto", *_GENERATES)
"""Trainers whose models project and score a tile of tokens at a time (`add_fused_lm_head`), without all logits."""


def _prepare(reader: SettingsReader) -> None:
    """Fills in TRL's defaults (trl/trainer/base_config.py)."""
    kinds: dict[str, list[str]] = settings_of("trl")["kinds"]
    losses = re.findall(r"\w+", str(reader.get("loss_type") or ""))
    matching = [kind for kind, signs in kinds.items() if set(losses) & {*signs} or any(map(reader.has, signs))]
    if not matching and not reader.has(SUBCOMMAND):
        stages = ", ".join(settings_of("trl")["stages"][:8])
        reader.facts["unset"] = {"the command trl STAGE --config FILE": f"the stage, {stages}"}
    reader.set(SUBCOMMAND, next(iter(matching), "sft"))
    reader.set("gradient_checkpointing", True)
    if not reader.flag("fp16"):
        reader.set("bf16", True)
    prepare(reader)


def _read_words(command: Sequence[str], settings: dict[str, Any]) -> tuple[str, ...]:
    """Reads the trainer from the subcommand or the name of the script, if it has one."""
    program = Path(command[0])
    words = [command[1]] if program.name == "trl" and len(command) > 1 else program.stem.lower().split("_")
    if stage := next((word for word in words if program.name == "trl" or word in settings_of("trl")["stages"]), None):
        settings[SUBCOMMAND] = stage
    return ()


def _read(reader: SettingsReader) -> None:
    """Reads the Trainer's arguments, the adapters, and the kind of training."""
    read_trainer(reader)
    kind = reader.get(SUBCOMMAND)
    if kind in _GENERATES:  # a prompt and a completion, with the lengths of GRPOConfig
        prompt, completion = reader.whole("max_prompt_length") or 512, reader.whole("max_completion_length") or 512
        if reader.has("max_prompt_length") or reader.has("max_completion_length"):
            reader.facts["seq_len"] = prompt + completion
        else:
            reader.default("seq_len", prompt + completion)
    reader.default("seq_len", 1024)
    reader.facts["loaded_dtype"] = "bf16" if loads_narrow(reader) else "fp32"
    if reader.flag("use_peft"):
        _read_adapters(reader)
    # With adapters the reference model is the model without them.
    reference = not reader.flag("use_peft") and not reader.flag("precompute_ref_log_probs")
    read_stage(reader, SUBCOMMAND, f"trl {kind}", reference=reference, fuses_loss=kind in (*_FUSED, "reward"))
    if reader.flag("activation_offloading"):
        reader.conventions["offload_activations"] = True
    _read_accelerate(reader)
    if kind in _FUSED and not (kind == "sft" and number(reader.get("label_smoothing_factor"))):
        reader.conventions["loss"] = "chunked"
        reader.note(
            "the loss is that of TRL 1.16, without all logits; versions before it form them (--assume loss=plain)"
        )
    if kind == "sft" and not reader.flag("packing"):
        reader.note("samples may be shorter than max_length (no packing): the estimate is of full ones")


def _read_adapters(reader: SettingsReader) -> None:
    """Reads the adapters. peft keeps them in fp32, and TRL casts those beside quantized weights to bf16."""
    rank, alpha = reader.whole("lora_r") or 16, reader.whole("lora_alpha") or 32
    dropout = reader.get("lora_dropout")
    target = reader.get("lora_target_modules")
    # Its default of 0.05 costs a mask and a copy of each adapter's input.
    read_lora(reader, rank, target, alpha, 0.05 if dropout is None else dropout, "lora_target_modules")
    if "lm_head" in reader.facts["lora"]:
        reader.note("TRL refuses an adapter on lm_head: its losses read the weight of that layer alone")
    read_quantized(reader, "load_in_4bit")
    read_quantized(reader, "load_in_8bit")
    is_quantized = "frozen_bits" in reader.conventions
    if is_quantized:
        reader.facts["adapter_dtype"] = "bf16"
    read_copied(reader, "lora_modules_to_save", "bf16" if is_quantized else reader.facts["loaded_dtype"])


def _read_accelerate(reader: SettingsReader) -> None:
    """Reads the devices, and the configurations of accelerate that `trl` has by name (trl/accelerate_configs)."""
    if (processes := reader.whole("num_processes")) is not None:
        reader.facts["devices"] = processes
    name = str(reader.get("accelerate_config") or "multi_gpu")
    if name in ("fsdp1", "fsdp2"):
        reader.knobs["zero"] = 3
    elif name in ("zero1", "zero2", "zero3"):
        reader.knobs["zero"] = int(name[-1])
        reader.conventions["deepspeed_update"] = True
    elif name not in ("single_gpu", "multi_gpu"):
        reader.misunderstood("accelerate_config")


FRAMEWORK = framework_of(
    "trl",
    KNOBS,
    option=option,
    prepare=_prepare,
    conventions=conventions,
    read=_read,
    read_words=_read_words,
    write=write,
)
