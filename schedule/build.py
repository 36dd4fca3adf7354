"""build: turns a schedule into a module and an optimizer that are ready to train."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.errors import ScheduleError, unknown
from .engines import deepspeed
from .materialise import Init, materialise
from .parallel.agreement import check_first_call, check_weights
from .parallel.collectives import axis_of
from .parallel.pipeline import Pipeline
from .primitives.tensor_parallel import check_synced
from .schedule import Schedule
from .tree import PHASES, find_module

TARGETS = ("deepspeed",)
"""Engines that `build` makes."""


@dataclass(slots=True)
class Context:
    """What deferred work may know and change while a schedule is built."""

    device: torch.device
    """Where the weights live."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
    """Makes the optimizer; deferred work may put another in its place."""
    loss: Callable[..., torch.Tensor] | None = None
    """`loss(output, target)`, where the model itself computes none."""
    pipeline: Pipeline | None = None
    """This rank's part of the pipeline, where the model is cut into stages."""


def build(
    sch: Schedule,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    init: Init | None = None,
    broadcast: bool = False,
    target: str | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Makes the scheduled model ready to train; the schedule takes no primitive afterwards.

    Weights are moved to the device; those of a model made within `deferred` get the values that its constructor
    gives them after `torch.manual_seed(seed)`, those on the meta device otherwise are initialised from the seed by
    the Hugging Face model's own rule, or by `reset_parameters`. The same seed gives bit-equal weights whatever
    was scheduled. Then casts, checkpointing, compilation and data sharding take effect, in
    this order. Names in `state_dict` stay those of the original model.

    Args:
        sch: the schedule at its root, or at a module below that is to be trained by itself; of the rest of the model
            nothing is built then, nor can be.
        optimizer: called with the parameters, returns the optimizer; without it None is returned for one.
        loss: `loss(output, target)`, for a model cut into pipeline stages that returns no loss itself.
        device: where to train; default: where the weights are, or the CPU for a model on the meta device.
        seed: of the initial weights.
        init: `init(module)` or `init(module, path)` sets a module's own tensors and returns true, where the module
            has no rule.
        broadcast: where the ranks of the `tp` or `dp` axis hold other values of what all are to hold alike, all take
            those of the first; without it that is refused.
        target: `deepspeed` gives DeepSpeed's engine of the scheduled model in the place of the module. What the schedule
            says of replicas and of a pipeline's order is written into the engine's configuration.
        config: the engine's own, as a mapping or the path of a file, such as `redline export --to deepspeed` writes.

    Returns:
        The module (in training mode as it was) and the optimizer. A model cut into pipeline stages is this
        rank's part of it, and runs by `module.pipeline.step(**batch)`; that of an engine by `engine.train_batch`.

    Raises:
        ScheduleError: built already; weights that nothing initialises; weights that differ between
            ranks which are to hold them alike; what the engine cannot do, or its configuration contradicts.
        MissingDependency: the engine is not installed.
    """
    if sch.tree.built:
        raise ScheduleError("build: a schedule is built once, and this one already is")
    whole, sch = sch, itself(sch)
    tree = sch.tree
    for each in tree.deferred:
        find_module(tree.module, each.path)
    settings = _engine_settings(sch, target, config, optimizer is not None)
    place = torch.device(device) if device is not None else home(tree.module)
    context = Context(device=place, optimizer=optimizer, loss=loss)
    prepare(sch, context, seed, init, broadcast)
    whole.tree.built = True
    if settings is None:
        return complete(sch, context)
    module, made = complete(sch, context, [phase for phase in PHASES if phase != "data"])
    return deepspeed.start(module, made, settings, sch.mesh, context.pipeline)


def _engine_settings(sch: Schedule, target: str | None, config: Any, optimizer: bool) -> dict[str, Any] | None:
    """The configuration of the engine that is to be built; None where there is none."""
    if target is None:
        if config is not None:
            raise ScheduleError("build: config is an engine's; name that by target=")
        return None
    if target not in TARGETS:
        raise ScheduleError(f"build: {unknown('target', target, TARGETS)}")
    return deepspeed.settings_of(sch, config, optimizer)


def itself(sch: Schedule) -> Schedule:
    """The schedule of a module as that of a model of its own, with what was applied at and below it."""
    return Schedule(sch.tree.below(sch.path)) if sch.path else sch


def prepare(sch: Schedule, context: Context, seed: int, init: Init | None = None, broadcast: bool = False) -> None:
    """The first half of `build`: checks, and weights on the device."""
    check_synced(sch)
    axis = axis_of(sch.mesh, "pp")
    if sch.tree.cuts and axis is not None and axis.size > 1:
        context.pipeline = Pipeline(sch.tree, axis, context.device, context.loss)
    made = materialise(sch.tree.module, context.device, seed, init)
    check_weights(sch.tree.module, sch.mesh, made, seed, broadcast)
    sch.tree.built = True


def complete(
    sch: Schedule, context: Context, phases: Sequence[str] = PHASES
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """The second half: applies what was deferred, attaches annotations, makes the optimizer.

    Within a phase inner modules come before outer ones.
    """
    for phase in phases:
        due = [each for each in sch.tree.deferred if each.phase == phase]
        for each in sorted(due, key=lambda item: -item.path.count(".") if item.path else 1):
            at = Schedule(sch.tree, each.path)
            # Number formats matter to those who receive from the module, too.
            if phase != "cast" and context.pipeline is not None and context.pipeline.absent(each.path):
                continue
            each.apply(at, at.module, context, **each.arguments)
    for (path, name), values in sch.tree.annotations.items():
        if context.pipeline is not None and context.pipeline.absent(path):
            continue
        tensor = getattr(find_module(sch.tree.module, path), name)
        for key, value in values.items():
            setattr(tensor, key, value)
    module = sch.tree.module
    if context.pipeline is not None:
        context.pipeline.start()
    check_first_call(module, sch.mesh)
    # What is frozen has no gradient: the optimizer neither keeps state for it nor exchanges it.
    params = [each for each in module.parameters() if each.requires_grad]
    return module, context.optimizer(params) if context.optimizer is not None and params else None


def home(module: nn.Module) -> torch.device:
    """Where a model's weights are; the CPU where all are on the meta device."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta:
            return tensor.device
    return torch.device("cpu")
