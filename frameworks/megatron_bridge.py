"""Megatron-Bridge: a recipe's script with `section.field=value`, in Megatron-LM's own configuration."""

from typing import Any

from ..knobs.strategy import Strategy
from .framework import Framework, KnobSettings, KnobTable, SettingsReader
from .launcher import Launcher
from .megatron import DEFAULTS, KNOBS as MEGATRON, conventions, read_overlap, read_recomputation, read_stages

_TOTAL = "train.global_batch_size"
_STAGES = (
    "model.pipeline_model_parallel_layout",
    "model.num_layers_in_first_pipeline_stage",
    "model.num_layers_in_last_pipeline_stage",
)
_RECOMPUTATION = tuple(f"model.recompute_{name}" for name in ("granularity", "method", "num_layers", "modules"))
_FULL = {"model.recompute_granularity": "full", "model.recompute_method": "uniform", "model.recompute_num_layers": 1}
KNOBS = KnobTable(
    KnobSettings(knob="micro_batch", keys=("train.micro_batch_size",)),
    *(
        KnobSettings(knob=knob, keys=(f"model.{MEGATRON[knob].keys[0].replace('-', '_')}",))
        for knob in ("tp", "pp", "cp", "ep", "etp", "capacity_factor")
    ),
    KnobSettings(
        knob="sequence_parallel", alternatives=({value: {"model.sequence_parallel": value} for value in (False, True)},)
    ),
    # As in ModelParallelConfig of Megatron Core: model chunks of a rank, rather than layers of a chunk.
    KnobSettings(knob="virtual_stages", keys=("model.virtual_pipeline_model_parallel_size",)),
    KnobSettings(
        knob="zero", alternatives=({value: {"ddp.use_distributed_optimizer": bool(value)} for value in (0, 1)},)
    ),
    KnobSettings(
        knob="precision",
        alternatives=(
            {
                "bf16": {"mixed_precision": "bf16_mixed"},
                "fp16": {"mixed_precision": "fp16_mixed"},
                "fp8": {"mixed_precision": "bf16_with_fp8_current_scaling_mixed"},
            },
            {"fp8": {"mixed_precision": "bf16_with_fp8_delayed_scaling_mixed"}},
        ),
    ),
    KnobSettings(
        knob="checkpoint_ratio",
        alternatives=({0: {"model.recompute_granularity": None}, 1: _FULL}, {1: dict(list(_FULL.items())[:2])}),
    ),
)
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


LAUNCHER = Launcher(
    name="megatron-bridge",
    knobs={"micro_batch": (1, 2, 4, 8), "tp": (1, 2, 4, 8), "pp": (1, 2, 4)},
    options=KNOBS.options("{}={}", dict.fromkeys(("micro_batch", "tp", "pp", "cp", "ep", "sequence_parallel")))
    | {"grad_accum": f"{_TOTAL}={{global_batch}}"},
    short="train.train_iters=1000 logger.log_interval=1",
    bounds="train.eval_iters=0 checkpoint.save={trial_dir} checkpoint.save_interval=1000000",
    total=_TOTAL,
    own_total=True,
    several=("tp", "pp"),
)
FRAMEWORK = Framework(
    name="megatron-bridge",
    title="Megatron-Bridge",
    knobs=KNOBS,
    signs=(
        *(
            "model.tensor_model_parallel_size & train.*",
            "train.global_batch_size & train.train_iters",
            "logger.log_interval & model.*",
        ),
        *(
            "train.micro_batch_size & model.*",
            "dataset.sequence_length & train.*",
            "model.seq_length & train.*",
            "ddp.* & model.*",
        ),
        "train.micro_batch_size & train.global_batch_size & recipe",
    ),
    programs=("*megatron_bridge*", "*megatron-bridge*", "run_recipe.py"),
    model=("recipe", "hf_path", "hf_model_id"),
    seq_len=("model.seq_length", "dataset.sequence_length", "dataset.seq_length"),
    defaults={**DEFAULTS, "precision": "bf16", "zero": 1},
    conventions=conventions,
    read=_read,
    write=_write_batch,
    assigns=True,
)
