"""Applies a configuration to a model, for the user's own loop."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..base.errors import ScheduleError
from ..knobs.strategy import Strategy
from ..models.families import schedule_of, strategies_of
from .precision import dtype_of

if TYPE_CHECKING:
    from torch import nn

    from ..schedule import Schedule


def apply_schedule(model: "nn.Module", config: Mapping[str, Any], mesh: Any = None) -> "Schedule":
    """Returns the schedule of a model with a configuration applied, ready for `redline.build`.

    It applies the knobs that rewrite a model (`tp`, `sequence_parallel`, `pp`, `checkpoint_ratio`, `fusion`,
    `kernels`, `offload`, `zero` and their options). Micro-batches, their accumulation, autocast and the loop remain
    the caller's task.

    Args:
        model: any model of transformers, or one with its repeated blocks in a list.
        config: knobs and their values, such as the `best.config` of a search.
        mesh: a DeviceMesh with axes out of `pp`, `dp` and `tp`, if there are several devices.

    Raises:
        ScheduleError: the mesh does not match the configuration, or the model cannot be rewritten.
    """
    from ..schedule import create_schedule

    sch = create_schedule(model, mesh)
    replicas = _check_mesh(mesh, config)
    follows = schedule_of(str(getattr(getattr(model, "config", None), "model_type", "")))
    blocks = follows.blocks(sch)
    follows(sch, dict(config))
    strategy = Strategy.of({**config, "dp": replicas // (config.get("sp", 1) * config.get("cp", 1))})
    if strategy.offload == "optimizer":
        sch.offload("optimizer")
    if has_replicas(sch):
        share_out(sch, strategy, [block.path for block in blocks])
    return sch


def _check_mesh(mesh: Any, config: Mapping[str, Any]) -> int:
    """Number of replicas of a mesh.

    Raises:
        ScheduleError: the sizes of its axes differ from the configuration.
    """
    sizes = dict(zip(mesh.mesh_dim_names, mesh.mesh.shape)) if mesh is not None else {}
    for name in ("tp", "pp"):
        if sizes.get(name, 1) != config.get(name, 1):
            raise ScheduleError(
                f"apply_schedule: the configuration has {name}={config.get(name, 1)}, so the mesh must have an axis "
                f"{name} of that size, but has {sizes or 'no axes'}"
            )
    return int(sizes.get("dp", 1))


def has_replicas(sch: "Schedule") -> bool:
    """True if ranks have copies of a weight that they train on different samples or tokens."""
    from ..schedule.parallel.collectives import axis_of
    from ..schedule.parallel.experts import copied_experts

    along = axis_of(sch.mesh, "dp")
    return (along is not None and along.size > 1) or bool(sch.tree.shared) or copied_experts(sch.module)


def share_out(sch: "Schedule", strategy: Strategy, blocks: Sequence[str]) -> None:
    """Shards the model among replicas by a strategy's ZeRO stages; exchanges use its number formats."""
    formats = strategy.formats
    layers = strategies_of({"strategy": strategy.strategy, "zero": strategy.zero}, len(blocks)) or ()
    sch.shard_data(
        zero=strategy.zero,
        hsdp=strategy.hsdp,
        stages={path: layer.zero for path, layer in zip(blocks, layers) if layer.zero != strategy.zero},
        param_dtype=None if formats.gathered == formats.weights else dtype_of(formats.gathered),
        reduce_dtype=None if formats.reduced == formats.gradients else dtype_of(formats.reduced),
    )
