"""LitGPT: `litgpt pretrain MODEL ...` and `litgpt finetune_lora MODEL ...`, and their YAML."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..knobs.strategy import Strategy
from .common import read_lora, read_optimizer, read_quantized
from .framework import SettingsReader, framework_of, knob_table, settings_of
from .trainer import conventions as trainer_conventions

_TOTAL = "train.global_batch_size"
KNOBS = knob_table("litgpt")
"""LitGPT's names of the knobs; it uses FSDP whenever there are several devices."""

_FEW = {"finetune_adapter": 1, "finetune_adapter_v2": 1}
"""Subcommands that train few weights, with the rank of adapters in all linear layers that have about as many."""


def prepare(reader: SettingsReader) -> None:
    """Fills in the subcommand of a file: only finetuning has a checkpoint_dir, and only adapters their rank."""
    if reader.has("subcommand"):
        return
    if reader.has("lora_r"):
        reader.set("subcommand", "finetune_lora")
    elif reader.has("checkpoint_dir") and not reader.has("model_name"):
        reader.set("subcommand", "finetune_full")


def read(reader: SettingsReader) -> None:
    """Reads the batch, with the subcommand's defaults (TrainArgs), the devices, the adapters, and recomputation, which
    finetuning by FSDP has for each block (litgpt/finetune), and what pretraining alone has: compilation and hybrid shards.
    """
    command = str(reader.get("subcommand") or "pretrain")
    finetunes = command.startswith("finetune")
    if (name := reader.facts.get("model")) is not None:  # as `litgpt download` places a model of the hub
        reader.facts["model"] = name.rpartition("checkpoints/")[2].removesuffix("/").removesuffix("/lit_model.pth")
    if not reader.stated("subcommand"):
        reader.note(f"the subcommand is taken to be {command}")
    reader.default("micro_batch", 1 if finetunes else 4)
    if (total := reader.whole(_TOTAL)) is not None:
        reader.facts["global_batch"] = total
    else:
        reader.default("global_batch", 16 if finetunes else 512)
    devices, hosts = reader.whole("devices"), reader.whole("num_nodes") or 1
    if devices is not None:
        reader.facts |= {"devices": devices * hosts, "per_host": devices}
    if command in ("finetune", "finetune_lora"):
        facts = settings_of("litgpt")
        chosen = [
            layer
            for name, layers in facts["adapted"].items()
            for layer in layers
            if (name in facts["adapted_by_default"] if (flag := reader.flag(name)) is None else flag)
        ]
        if not chosen:
            reader.misunderstood(*facts["adapted_by_default"])
            reader.note(
                "all flags of adapted layers are false: LitGPT has no weights to train; peft's choice is assumed"
            )
        dropout = reader.get("lora_dropout")
        read_lora(
            reader,
            reader.whole("lora_r") or 8,
            list(dict.fromkeys(chosen)),
            reader.whole("lora_alpha") or 16,
            dropout or 0.05,
        )
    elif command in _FEW:
        read_lora(reader, _FEW[command], "all-linear", 1)
        reader.note(
            f"{command} is taken for adapters of rank {_FEW[command]} in all linear layers, which have about as many weights"
        )
    elif command not in ("finetune_full", "pretrain"):
        reader.misunderstood("subcommand")
    elif command == "pretrain":
        reader.default("fusion", True)  # torch.compile(model)
        reader.facts["hybrid"] = True  # sharding_strategy="HYBRID_SHARD"
    if "lora" in reader.facts:  # adapters have the dtype of the model that Fabric makes
        narrow = reader.knobs.get("precision") == "bf16_pure"
        reader.facts["loaded_dtype"] = reader.facts["adapter_dtype"] = "bf16" if narrow else "fp32"
    read_quantized(reader, "quantize")
    if reader.has("quantize") and (devices or 1) * hosts > 1:
        reader.note("LitGPT refuses quantize on more than one device")
    read_optimizer(reader, "optimizer", "optimizer.class_path")
    if finetunes and (devices or 1) * hosts > 1:
        reader.default("checkpoint_ratio", 1)  # activation_checkpointing_policy={Block}
    if finetunes and not reader.has("train.max_seq_length"):
        reader.note(
            "train.max_seq_length is not set: LitGPT takes the longest sample, the estimate the model's default length"
        )


def conventions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fabric accumulates without synchronising (`no_backward_sync`), where FSDP keeps whole gradients of 16 bits."""
    sharded = trainer_conventions(config) if config.get("precision") == "bf16" else {}
    return {"unsharded_gradients": True, **sharded}


def write(strategy: Strategy, reader: SettingsReader) -> dict[str, Any]:
    """Writes the global batch."""
    return {_TOTAL: strategy.micro_batch * strategy.grad_accum * strategy.dp}


def _read_words(command: Sequence[str], settings: dict[str, Any]) -> tuple[str, ...]:
    """Reads the subcommand, and the model that follows it."""
    if Path(command[0]).name == "litgpt" and len(command) > 1:
        settings["subcommand"] = command[1]
        if len(command) > 2 and not command[2].startswith("-"):
            settings.setdefault("model_name", command[2])
    return ()


FRAMEWORK = framework_of(
    "litgpt", KNOBS, conventions=conventions, prepare=prepare, read=read, read_words=_read_words, write=write
)
