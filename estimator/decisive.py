"""What decides a prediction of a training: each fact with its source, so that a reader sees what was missed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..frameworks.framework import as_flag
from ..frameworks.reading import COMMAND
from ..frameworks.registry import find_framework
from ..frameworks.trainer_config import TrainerConfig
from ..knobs.meaning import FORMATS
from ..knobs.text import config_text, value_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A fact that decides memory or time."""

    name: str
    value: str
    source: str
    """`file`, `command`, an option, `default of NAME`, or `assumed`."""


def without(trainer: TrainerConfig) -> tuple[str, ...]:
    """Settings that are on, do not enter the prediction, and may change memory or speed."""
    return tuple(
        f"{name}={value}" if isinstance(value, str | bool) and len(str(value)) < 40 and not as_flag(value) else name
        for name, value in trainer.unread.items()
        if name not in trainer.unread_off
    )


def deciding_facts(
    trainer: TrainerConfig,
    conventions: Mapping[str, Any],
    model: str,
    hardware: str,
    options: Mapping[str, Any],
    length: int | None,
    assume: Mapping[str, Any],
) -> tuple[Fact, ...]:
    """The facts of a training that is complete (`TrainerConfig.on`).

    Args:
        trainer: the training.
        conventions: fields of the setup that its framework sets.
        model: its model, in words.
        hardware: name of the devices.
        options: the facts that are given beside the file: `model`, `devices`, `seq_len`, `global_batch`.
        length: tokens of a sample.
        assume: facts of the trainer's software that are given beside the file.
    """
    config, framework = trainer.config, find_framework(trainer.framework)
    title = framework.title
    written = "command" if all(source.where == COMMAND for source in trainer.sources) else "file"

    def of_knob(*knobs: str) -> str:
        if any(knob in trainer.given for knob in knobs):
            return "--fix"
        if any(knob in trainer.stated for knob in knobs):
            return written
        return f"default of {title}" if any(knob in config for knob in knobs) else "assumed"

    def of_fact(name: str, value: Any, otherwise: str) -> str:
        if name in options:
            return f"--{name.replace('_', '-')}"
        return otherwise if value is None else f"default of {title}" if name in trainer.defaults else written

    of_optimizer = written if trainer.optimizer else f"default of {title}" if framework.makes_optimizer else "assumed"
    architecture = trainer.architecture if "model" not in options else None
    lengths = "" if trainer.sequences == 1 else f", {trainer.sequences} sequences each"
    degrees = {
        name: int(config[name] or 1)
        for name in ("tp", "sp", "cp", "pp", "ep", "hsdp", "dp")
        if config.get(name, 1) != 1
    }
    batch = " x ".join(f"{name} {config[name]}" for name in ("micro_batch", "grad_accum", "dp") if name in config)
    bits = conventions.get("frozen_bits") or 16
    rows = (
        ("model", model, of_fact("model", architecture or trainer.model, "assumed")),
        ("adapters", _adapters(trainer), written if trainer.lora or trainer.trained_blocks else f"default of {title}"),
        (
            "quantization",
            f"{bits} bits a frozen weight" if bits < 16 else "none",
            written if bits < 16 else f"default of {title}",
        ),
        ("optimizer", _optimizer(trainer, conventions), of_optimizer),
        ("precision", _precision(trainer, conventions), of_knob("precision")),
        ("batch", f"{batch} = {trainer.global_batch}{lengths}", of_knob("micro_batch")),
        ("length", f"{length:,} tokens" if length else "the model's", of_fact("seq_len", trainer.seq_len, "assumed")),
        ("checkpointing", _checkpointing(config, conventions), of_knob("checkpoint_ratio")),
        ("sharding", _sharding(trainer, degrees), of_knob("zero", *(degrees.keys() - {"dp"}))),
        (
            "offload",
            _offload(config, conventions),
            written if "offload_activations" in conventions else of_knob("offload"),
        ),
        ("loss", _loss(config, conventions), of_knob("kernels") if "kernels" in config else f"default of {title}"),
        ("compiled", value_text(config.get("fusion", False)), of_knob("fusion")),
        ("devices", f"{trainer.devices} x {hardware}", of_fact("devices", trainer.devices, "assumed")),
    )
    assumed = (("assumed", config_text(assume), "--assume"),) if assume else ()
    return tuple(Fact(name=name, value=value, source=source) for name, value, source in (*rows, *assumed))


def _adapters(trainer: TrainerConfig) -> str:
    if trainer.trained_blocks is not None:
        return f"none: {abs(trainer.trained_blocks)} of the blocks are trained at a time"
    if trainer.lora is None:
        return "none: all weights are trained"
    settings = dict(pair.split("=", 1) for pair in trainer.lora.split(","))
    copies = f"; copies of {' and '.join(trainer.copied_ends)} are trained" if trainer.copied_ends else ""
    return f"rank {settings['r']} on {settings.get('target', 'the usual layers').replace('+', ', ')}{copies}"


def _optimizer(trainer: TrainerConfig, conventions: Mapping[str, Any]) -> str:
    name = conventions.get("optimizer", "adamw")
    shown = f"{trainer.optimizer} as {name}" if trainer.optimizer and trainer.optimizer.lower() != name else name
    master = conventions.get("master_weights")
    copy = f", master weights in {master}" if master not in (None, "none") else ""
    states = conventions.get("optimizer_dtype", "fp32")
    if not copy and states != "int8" and _formats(trainer.config, conventions)[0] != "fp32":
        states = _formats(trainer.config, conventions)[0]  # of the weights that are updated
    rank = "" if trainer.low_rank is None else f" of rank {trainer.low_rank} in blocks"
    return f"{shown}, states in {states}{rank}{copy}"


def _formats(config: Mapping[str, Any], conventions: Mapping[str, Any]) -> tuple[str, str]:
    """Formats of the weights and of their gradients."""
    formats = FORMATS[str(conventions.get("precision", config.get("precision", "fp32")))]
    weights = str(conventions.get("parameter_dtype") or formats.weights)
    gradients = str(conventions.get("gradient_dtype") or conventions.get("parameter_dtype") or formats.gradients)
    if config.get("precision") == "fp16":  # as many bytes as bf16
        weights, gradients = (name.replace("bf16", "fp16") for name in (weights, gradients))
    return weights, gradients


def _precision(trainer: TrainerConfig, conventions: Mapping[str, Any]) -> str:
    config = trainer.config
    weights, gradients = _formats(config, conventions)
    if trainer.lora:
        bits = conventions.get("frozen_bits") or 16
        is_wide = bits == 32 or conventions.get("precision", config.get("precision", "fp32")) in ("fp32", "tf32")
        frozen = f"{bits} bits" if bits < 16 else "fp32" if is_wide else "16 bits"
        return f"{config.get('precision', 'fp32')}: adapters in {weights}, other weights in {frozen}, gradients in {gradients}"
    if config.get("precision", "fp32") == "fp32" and weights == "bf16":
        return f"all in bf16: weights in {weights}, gradients in {gradients}"
    ends = ", embeddings and head in fp32" if trainer.wide_ends else ""
    return f"{config.get('precision', 'fp32')}: weights in {weights}, gradients in {gradients}{ends}"


def _checkpointing(config: Mapping[str, Any], conventions: Mapping[str, Any]) -> str:
    ratio = config.get("checkpoint_ratio", 0)
    if not ratio:
        return "every other product is kept" if conventions.get("keeps_products") else "none"
    return "all blocks" if ratio == 1 else f"{100 * ratio:.0f} % of the blocks"


def _sharding(trainer: TrainerConfig, degrees: Mapping[str, int]) -> str:
    zero = trainer.strategy().zero
    unit = " in one unit" if trainer.one_unit else " in units of blocks" if zero >= 2 else ""
    return ", ".join(
        (f"ZeRO {zero}{unit}" if zero else "replicas", *(f"{name} {size}" for name, size in degrees.items()))
    )


def _offload(config: Mapping[str, Any], conventions: Mapping[str, Any]) -> str:
    parts = []
    if config.get("offload", "none") != "none":
        parts.append("optimizer, weights and gradients" if conventions.get("offload_weights") else "optimizer")
    if conventions.get("offload_activations"):
        parts.append("activations")
    return "; ".join(parts) or "none"


def _loss(config: Mapping[str, Any], conventions: Mapping[str, Any]) -> str:
    loss = conventions.get("loss")
    if loss == "chunked" or (config.get("kernels") and loss is None):
        return "in chunks, without logits"
    return {
        "compiled": "compiled: 16-bit logits and their gradient",
        "fused": "one kernel over 16-bit logits",
        "parallel": "logits in fp32, by parts of the vocabulary",
    }.get(str(loss), "logits in fp32")
