"""NeMo 2: `nemo llm pretrain --factory RECIPE field=value`; and the YAML of NeMo 1's `model:`."""

from typing import Any

from .framework import Framework, KnobSettings, KnobTable, Stated
from .megatron import DEFAULTS, KNOBS as MEGATRON, conventions, read_recomputation
from .megatron_bridge import launcher, read_batch, write_batch

_TOTAL, _OLD_TOTAL = "data.global_batch_size", "model.global_batch_size"
_RECOMPUTATION = tuple(f"model.config.recompute_{each}" for each in ("granularity", "method", "num_layers", "modules"))
_OLD_RECOMPUTATION = tuple(
    f"model.activations_checkpoint_{each}" for each in ("granularity", "method", "num_layers", "modules")
)


def _recomputation(names: tuple[str, ...]) -> tuple[dict[Any, dict[str, Any]], ...]:
    """Ways to set recomputation: Megatron refuses full granularity without a method and a number of layers."""
    granularity, method, count, _ = names
    full = {granularity: "full", method: "uniform", count: 1}
    return {0: {granularity: None}, 1: full}, {1: {granularity: "full"}}


def _degree(knob: str, name: str = "") -> KnobSettings:
    name = name or MEGATRON[knob].keys[0].replace("-", "_")
    return KnobSettings(knob=knob, keys=(f"trainer.strategy.{name}", f"model.{name}"))


KNOBS = KnobTable(
    KnobSettings(knob="micro_batch", keys=("data.micro_batch_size", "model.micro_batch_size")),
    *map(_degree, ("tp", "pp", "cp", "ep", "etp")),
    _degree("virtual_stages", "virtual_pipeline_model_parallel_size"),
    KnobSettings(
        knob="sequence_parallel",
        ways=tuple(
            {value: {f"{section}.sequence_parallel": value} for value in (False, True)}
            for section in ("trainer.strategy", "model")
        ),
    ),
    KnobSettings(
        knob="precision",
        ways=(
            {"bf16": {"trainer.plugins": "bf16_mixed"}, "fp16": {"trainer.plugins": "fp16_mixed"}},
            {
                "bf16": {"trainer.precision": "bf16"},
                "fp16": {"trainer.precision": 16},
                "fp32": {"trainer.precision": 32},
            },
            {"bf16": {"trainer.precision": "bf16-mixed"}, "fp16": {"trainer.precision": "16-mixed"}},
        ),
    ),
    KnobSettings(
        knob="checkpoint_ratio",
        ways=(
            *_recomputation(_RECOMPUTATION),
            *_recomputation(_OLD_RECOMPUTATION),
        ),
    ),
)
"""NeMo's names of the knobs: NeMo 2 in its strategy and data, NeMo 1 in its model."""


def read(stated: Stated) -> None:
    """Reads the batch, the optimizer, recomputation and the devices."""
    read_batch(stated, _TOTAL if stated.has(_TOTAL) else _OLD_TOTAL, "factory")
    if (optimizer := stated.get("model.optim.name")) is not None:
        stated.knobs["zero"] = int(optimizer in ("distributed_fused_adam", "mcore_distributed_optim"))
    if stated.knobs.get("virtual_stages", 1) > 1:
        stated.knobs["pipeline_schedule"] = "interleaved"
    names = _OLD_RECOMPUTATION if stated.has(_OLD_RECOMPUTATION[0]) else _RECOMPUTATION
    read_recomputation(stated, stated.whole("model.config.num_layers", "model.num_layers"), names)
    devices, hosts = stated.whole("trainer.devices"), stated.whole("trainer.num_nodes") or 1
    if devices is not None:
        stated.facts |= {"devices": devices * hosts, "per_host": devices}


LAUNCHER = launcher(
    "nemo",
    KNOBS,
    _TOTAL,
    # It asks for confirmation.
    short="--yes trainer.max_steps=1000 trainer.log_every_n_steps=1",
    bounds="trainer.limit_val_batches=0 trainer.num_sanity_val_steps=0 log.log_dir={trial_dir}",
)
FRAMEWORK = Framework(
    name="nemo",
    title="NeMo",
    knobs=KNOBS,
    signs=(
        *("trainer.strategy.*_parallel_size", "trainer.strategy.sequence_parallel", "data.micro_batch_size", "factory"),
        *("data.global_batch_size", "model.micro_batch_size", "model.global_batch_size", "model.megatron_amp_o2"),
        *("model.tensor_model_parallel_size", "model.encoder_seq_length", "exp_manager.*"),
    ),
    programs=("nemo", "megatron_gpt_*.py"),
    model=("factory", "model.restore_from_path", "model.config.name"),
    seq_len=("data.seq_length", "model.encoder_seq_length", "model.config.seq_length"),
    defaults={**DEFAULTS, "precision": "bf16", "zero": 1},
    conventions=conventions,
    read=read,
    write=lambda strategy, stated: write_batch(strategy, _OLD_TOTAL if stated.has(_OLD_TOTAL) else _TOTAL),
    option="{key}={value}",
)
