"""build: converts a schedule to a module and an optimizer that are ready to train."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base._torch import parameters_of
from ..base.errors import ScheduleError, unknown
from . import deepspeed
from .materialise import Init, materialise
from .parallel.agreement import check_first_call, check_weights
from .parallel.collectives import axis_of
from .parallel.pipeline import Pipeline
from .primitives.data_parallel import Cutting, cutting_of
from .primitives.formats import final_formats
from .primitives.tensor_parallel import check_synced
from .schedule import Schedule
from .tree import PHASES, find_module, is_within, own_tensors

TARGETS = ("deepspeed",)
"""Engines that `build` supports."""


@dataclass(slots=True)
class Context:
    """State for deferred work while a schedule is built."""

    device: torch.device
    """Device of the weights."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
    """Makes the optimizer; deferred work may replace it."""
    loss: Callable[..., torch.Tensor] | None = None
    """`loss(output, target)`, if the model itself computes none."""
    pipeline: Pipeline | None = None
    """This rank's part of the pipeline, if the model is cut into stages."""
    cutting: Cutting | None = None
    """Sharding of the model over its replicas at ZeRO 2 and 3."""
    done: set[int] = field(default_factory=set)
    """Positions of applied entries in the tree's list of deferred work."""


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
    """Makes the scheduled model ready to train; the schedule accepts no primitives afterwards.

    Weights are moved to the device. Those on the meta device are initialised from the seed by the Hugging Face model's own
    rule, or by `reset_parameters` or `init_weights`. The same seed gives bit-equal weights for any schedule. Then casts,
    checkpointing, compilation and data sharding take effect, in this order. Names in `state_dict` stay those of the original
    model. New weights of a model on the meta device are cast one at a time and sharded over replicas block by block, so that
    the whole model never exists in its original form.

    Args:
        sch: the schedule at its root, or at a module below that is to be trained alone; the rest of the model is then
            not built, and cannot be.
        optimizer: called with the parameters, returns the optimizer; without it None is returned instead of an
            optimizer.
        loss: `loss(output, target)`, for a model cut into pipeline stages that returns no loss itself.
        device: device to train on; by default that of the weights, or the CPU for a model on the meta device.
        seed: seed of the initial weights of a model on the meta device.
        init: `init(module)` or `init(module, path)` sets a module's own tensors and returns true, for modules without
            a rule.
        broadcast: copy replicated tensors from the first rank if they differ between ranks of the `tp` or `dp` axis;
            by default a difference is refused.
        target: `deepspeed` returns DeepSpeed's engine of the scheduled model in place of the module. The schedule's
            settings of replicas and of a pipeline's order are written into the engine's configuration.
        config: configuration of the engine, as a mapping or the path of a file, such as `redline export --to
            deepspeed` writes.

    Returns:
        The module (in its original training mode) and the optimizer. A model cut into pipeline stages is this rank's
            part of it, and runs by `module.pipeline.step(**batch)`; that of an engine by `engine.train_batch`.

    Raises:
        ScheduleError: the schedule is built already; weights have no initialisation; replicated weights differ between
            ranks; or the engine does not support the schedule, or its configuration contradicts it.
        MissingDependency: the engine is not installed.
    """
    if sch.tree.built:
        raise ScheduleError("build: a schedule can be built only once, and this one is built already")
    full_model, sch = sch, separated(sch)
    tree = sch.tree
    # A replaced parent may lack a module with deferred work: refuse before anything changes.
    for work in tree.deferred:
        find_module(tree.module, work.path)
    settings = _engine_settings(sch, target, config, optimizer is not None)
    weights_device = torch.device(device) if device is not None else device_of(tree.module)
    context = Context(device=weights_device, optimizer=optimizer, loss=loss)
    phases = PHASES if settings is None else [phase for phase in PHASES if phase != "data"]
    prepare(sch, context, seed, init, broadcast, phases)
    full_model.tree.built = True
    module, built_optimizer = complete(sch, context, phases)
    if settings is None:
        return module, built_optimizer
    return deepspeed.start(module, built_optimizer, settings, sch.mesh, context.pipeline)


def _engine_settings(sch: Schedule, target: str | None, config: Any, optimizer: bool) -> dict[str, Any] | None:
    """Returns the configuration of the requested engine; None without an engine."""
    if target is None:
        if config is not None:
            raise ScheduleError("build: config= is the configuration of an engine; pass target= with the engine's name")
        return None
    if target not in TARGETS:
        raise ScheduleError(f"build: {unknown('target', target, TARGETS)}")
    return deepspeed.settings_of(sch, config, optimizer)


def separated(sch: Schedule) -> Schedule:
    """Returns the schedule of a module as that of a separate model, with everything applied at and below it."""
    return Schedule(sch.tree.below(sch.path)) if sch.path else sch


def prepare(
    sch: Schedule,
    context: Context,
    seed: int,
    init: Init | None = None,
    broadcast: bool = False,
    phases: Sequence[str] = (),
) -> None:
    """First half of `build`: checks, and weights on the device.

    Args:
        phases: phases that may be applied to a unit of the model before the weights of the next one exist.
    """
    check_synced(sch)
    if sch.tree.pipeline is not None and not sch.tree.cuts:
        raise ScheduleError("build: pipeline has no stages: call cut_pipeline_stage on the modules that end one")
    axis = axis_of(sch.mesh, "pp")
    if sch.tree.cuts and axis is not None and axis.size > 1:
        context.pipeline = Pipeline(sch.tree, axis, context.device, context.loss)
    arrivals = _Arrivals(sch, context, phases)
    initialised = materialise(sch.tree.module, context.device, seed, init, arrivals, sch.tree.hub)
    # Before the remaining phases shard the weights over replicas.
    check_weights(sch.tree.module, sch.mesh, initialised, seed, broadcast)
    sch.tree.built = True


class _Arrivals:
    """Casts weights as they are initialised, and shards each unit of ZeRO once all of its weights exist.

    Units with existing weights are sharded later, because ranks compare these weights first.
    """

    def __init__(self, sch: Schedule, context: Context, phases: Sequence[str]) -> None:
        self._sch, self._context, self._phases = sch, context, phases
        self._cutting = cutting_of(sch, context) if "data" in phases else None
        formats = final_formats(sch) if "cast" in phases else {}
        self._formats = {
            (module, name): formats[param]
            for module in sch.tree.module.modules()
            for name, param in parameters_of(module).items()
            if param in formats
        }
        self._missing: dict[nn.Module, set[tuple[nn.Module, str]]] = {}
        """Units without existing weights, and the modules and names of their tensors that have no values yet."""
        for unit in self._cutting.units if self._cutting is not None else ():
            places = [(module, name, tensor) for module in unit.modules() for name, tensor in own_tensors(module)]
            missing = {(module, name) for module, name, tensor in places if tensor.is_meta}
            if missing and all(tensor.is_meta for _, _, tensor in places if isinstance(tensor, nn.Parameter)):
                self._missing[unit] = missing

    @torch.enable_grad()
    def __call__(self, module: nn.Module, name: str) -> None:
        dtype = self._formats.get((module, name))
        param = parameters_of(module).get(name)
        if dtype is not None and param is not None and param.dtype != dtype:
            param.data = param.data.to(dtype)
        for unit, missing in list(self._missing.items()):
            missing.discard((module, name))
            if missing:
                continue
            del self._missing[unit]
            path = next(path for path, submodule in self._sch.tree.module.named_modules() if submodule is unit)
            for phase in self._phases:
                if phase != "data":
                    _apply(self._sch, self._context, phase, path)
            assert self._cutting is not None, "units exist only with sharding"
            self._cutting.cut(unit)


def _apply(sch: Schedule, context: Context, phase: str, path: str = "") -> None:
    """Applies the deferred work of a phase for a module and those below it, inner ones before outer ones."""
    pending = [
        (number, work)
        for number, work in enumerate(sch.tree.deferred)
        if work.phase == phase and number not in context.done and is_within(work.path, path)
    ]
    for number, work in sorted(pending, key=lambda item: -item[1].path.count(".") if item[1].path else 1):
        context.done.add(number)
        # Number formats also matter to stages that receive from the module.
        if phase != "cast" and context.pipeline is not None and context.pipeline.absent(work.path):
            continue
        target = Schedule(sch.tree, work.path)
        work.apply(target, target.module, context, **work.arguments)


def complete(
    sch: Schedule, context: Context, phases: Sequence[str] = PHASES
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Second half of `build`: applies deferred work, attaches annotations, makes the optimizer.

    Within a phase inner modules come before outer ones.
    """
    for phase in phases:
        _apply(sch, context, phase)
    # After all phases: FSDP replaces parameters, and the new ones lack the annotations.
    for (path, name), values in sch.tree.annotations.items():
        if context.pipeline is not None and context.pipeline.absent(path):
            continue
        tensor = getattr(find_module(sch.tree.module, path), name)
        for key, value in values.items():
            setattr(tensor, key, value)
    module = sch.tree.module
    # After compilation and sharding, since gates wrap the calls of these modules.
    if context.pipeline is not None:
        context.pipeline.start()
    check_first_call(module, sch.mesh)
    # Frozen parameters have no gradient: the optimizer neither keeps their state nor communicates them.
    params = [param for param in module.parameters() if param.requires_grad]
    if not params and context.pipeline is not None:
        # Every stage steps its optimizer, and torch's optimizers refuse an empty list of parameters.
        params = [nn.Parameter(torch.zeros(0, device=context.device))]
    return module, context.optimizer(params) if context.optimizer is not None and params else None


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of a model's weights; the CPU if all are on the meta device."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta:
            return tensor.device
    return torch.device("cpu")
