"""Megatron-Bridge: a recipe's script with `section.field=value`, in Megatron-LM's own configuration."""

from typing import Any

from ..knobs.strategy import Strategy
from .framework import SettingsReader, framework_of, knob_table
from .megatron import conventions, read_overlap, read_recomputation, read_stages

_TOTAL = "train.global_batch_size"
_STAGES = (
    "model.pipeline_model_parallel_layout",
    "model.num_layers_in_first_pipeline_stage",
    "model.num_layers_in_last_pipeline_stage",
)
_RECOMPUTATION = tuple(f"model.recompute_{name}" for name in ("granularity", "method", "num_layers", "modules"))
KNOBS = knob_table("megatron-bridge")
"""Megatron-Bridge's names of the knobs."""


def _read(reader: SettingsReader) -> None:
    """Reads the batch, recomputation, and stages given by their layers; notes that the settings of a named recipe are
    not read.
    """
    layers = reader.whole("model.num_layers")
    if (samples := reader.whole(_TOTAL)) is not None:
        reader.facts["global_batch"] = samples
    if (name := reader.get("recipe")) is not None:
        reader.misunderstood("recipe")
        reader.note(
            f"the batch, degrees and recomputation that recipe = {name} sets are not read: give those that are not Megatron's "
            "defaults by --fix, such as --fix cp=2"
        )
    read_stages(reader, layers, reader.knobs.get("pp", 1), _STAGES)
    if reader.knobs.get("virtual_stages", 1) > 1:
        reader.knobs["pipeline_schedule"] = "interleaved"
    read_recomputation(reader, layers, _RECOMPUTATION)
    read_overlap(reader)


def _write_batch(strategy: Strategy, reader: SettingsReader) -> dict[str, Any]:
    """Writes the global batch."""
    return {_TOTAL: strategy.micro_batch * strategy.grad_accum * strategy.dp}


FRAMEWORK = framework_of("megatron-bridge", KNOBS, conventions=conventions, read=_read, write=_write_batch)
