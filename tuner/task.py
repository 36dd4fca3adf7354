"""What is tuned, resolved: a workload or a callable, its space, and where it runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..device import Device, detect, usable_cores
from ..errors import SpaceError, UsageError
from ..models import Workload
from ..models.foreign import ForeignSpace
from ..models.request import TrainingRequest, resolve
from ..models.spaces import declare, lossy_of_space
from ..runners.command.command import Command
from ..runners.command.foreign import completed
from ..runners.command.launchers import find_launcher
from ..runners.command.work import Commands
from ..space import Config, Space

if TYPE_CHECKING:
    from ..estimator import Hardware

_OF_A_WORKLOAD = ("seq_len", "global_batch", "data", "lora")
CPU_RANKS_PER_CORE = 4
MIN_CPU_RANKS = 8
"""On a CPU ranks are processes: some more than cores are of use to try things out, dozens are a mistake."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is tuned, resolved: a workload or a callable, its space, and where it runs."""

    name: str
    space: Space
    device: Device
    devices: int
    workload: Workload | None = None
    function: Callable[[Config], Any] | None = None
    command: Command | None = None
    stated: frozenset[str] = frozenset()
    """Knobs of a command with one value, which another tool's file states rather than varies."""
    free_batch: bool = False
    """Whether the samples of a step vary with `grad_accum`, as no global batch was given."""
    simulated: bool = False
    """Whether trials are predictions."""
    lossy: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Of each knob the values in the space that trade accuracy for speed."""
    notes: tuple[str, ...] = ()
    """What its user should know beforehand."""

    @property
    def callable(self) -> Callable[[Config], Any]:
        """What is called, of a task without a workload."""
        assert self.function is not None, "a task has a workload, a function or a command"
        return self.function


def resolve_task(request: TrainingRequest, *, cluster: bool = False, simulated: "Hardware | None" = None) -> Task:
    """What a request comes to on the devices at hand.

    With `cluster` devices may be on other hosts, and whoever places the trials counts them. With `simulated` they
    are this hardware's, of a node where no number is given.

    Raises:
        UsageError: something that is asked is invalid.
    """
    request.check_numbers()
    target = request.target
    if simulated is not None:
        from ..estimator.survey import device_of

        device = device_of(simulated)
        count = request.devices or device.count
        notes: tuple[str, ...] = (f"simulated: nothing is run, trials are predictions for {count} x {device.name}",)
    else:
        device = detect()
        count = request.devices or device.count
        notes = _check_devices(count, device, cluster)
    if isinstance(target, (str, Path, Workload)):
        found = resolve(request, device, count)
        _check_effects(found.space, request.fix)
        return Task(
            name=found.workload.name,
            space=found.space,
            workload=found.workload,
            free_batch=found.free_batch,
            lossy=lossy_of_space(found.space),
            notes=notes + found.notes,
            device=device,
            devices=count,
            simulated=simulated is not None,
        )
    if not callable(target) and not isinstance(target, Command):
        raise UsageError(
            f"what to tune must be a model's name, a Workload, a Command or a callable, but got {target!r}"
        )
    what = "a command" if isinstance(target, Command) else "a callable"
    if simulated is not None:
        raise UsageError(f"the runner 'simulate' needs a model or a workload, and has no part in {what}")
    theirs = [name for name in _OF_A_WORKLOAD if name != "global_batch" or not isinstance(target, Command)]
    if any(getattr(request, name) is not None for name in theirs):
        names = f"{', '.join(theirs[:-1])} and {theirs[-1]}"
        raise UsageError(f"{names} belong to a workload, not to {what}")
    known: dict[str, Any] = {"device": device, "devices": count}
    foreign = request.source.read(count, request.global_batch) if request.source is not None else None
    if isinstance(target, Command):
        return _of_command(target, request, foreign, notes=notes, **known)
    space, said = request.space_or(_no_default, foreign)
    _check_effects(space, request.fix)
    name = getattr(target, "__name__", type(target).__name__)
    return Task(name=name, function=target, space=space, notes=notes + said, **known)


def _of_command(
    command: Command,
    request: TrainingRequest,
    foreign: ForeignSpace | None,
    *,
    notes: tuple[str, ...],
    device: Device,
    devices: int,
) -> Task:
    """What tuning a command comes to."""
    if foreign is not None:
        command = completed(command, foreign)
    space, said = request.space_or(partial(_declared, command, request, devices), foreign)
    if request.global_batch is not None and (foreign is None or "grad_accum" not in space.by_name):
        _share(space, request.global_batch, devices)
    _check_effects(space, request.fix)
    stated = foreign.stated if foreign is not None else frozenset()
    if foreign is not None and (unsaid := Commands(command, space, devices=devices, stated=stated).unsaid):
        values = ", ".join(f"{name}={space[name].default}" for name in unsaid)
        said += (f"the file states {values}, for which the command has no place: that it is so is up to the command",)
    return Task(
        name=command.name,
        command=command,
        space=space,
        stated=stated,
        device=device,
        devices=devices,
        notes=notes + said,
    )


def _no_default(allow: Sequence[str]) -> Space:
    raise UsageError("tuning a callable needs a space: redline.tune(fn, space)")


def _declared(command: Command, request: TrainingRequest, devices: int, allow: Sequence[str]) -> Space:
    """The space of the knobs whose values are given, and of those that its launcher knows; each has its first value by
    default, and those with a name that is standard in training need memory as they do there."""
    values = dict(find_launcher(command.launcher).values(devices)) if command.launcher is not None else {}
    values |= request.override or {}
    if not values:
        raise UsageError(
            "tuning a command needs knobs: --space FILE, --set KNOB=A,B,C for each, a --launcher, or --from FILE"
        )
    space = Space()
    for name, each in values.items():
        declare(space, name, each)
    ways = [space[name] for name in ("tp", "pp") if name in space.by_name]
    if ways and devices > 1:
        space.require(reduce(mul, ways) <= devices, f"there are {devices} devices")
    return space


def _share(space: Space, total: int, devices: int) -> None:
    """Has a step take so many samples, whatever the micro-batch.

    Raises:
        UsageError: the space has no micro-batch, or says itself how many are accumulated.
    """
    if "micro_batch" not in space.by_name or "grad_accum" in space.by_name:
        raise UsageError(
            "--global-batch needs the knob micro_batch, from which grad_accum follows, and no knob grad_accum"
        )
    ways = [space[name] for name in ("tp", "pp") if name in space.by_name]
    replicas = space["dp"] if "dp" in space.by_name else devices // reduce(mul, ways) if ways else devices
    together = space["micro_batch"] * replicas
    accumulate = space.derive("grad_accum", total // together, help="micro-batches per optimizer step")
    space.require(together * accumulate == total, f"global batch {total}")


def _check_effects(space: Space, fix: Mapping[str, Any] | None) -> None:
    """Refuses to fix a knob that no configuration has.

    Raises:
        UsageError: one of them is fixed.
    """
    for name, value in (fix or {}).items():
        if (when := space[name].when) is None:
            continue
        try:
            space.copy().require(when)
        except SpaceError:
            raise UsageError(
                f"{name}={value} would have no effect: {name} exists where `{when.text}`, and no configuration that is "
                "left has that"
            ) from None


def _check_devices(count: int, device: Device, cluster: bool) -> tuple[str, ...]:
    """What to say about so many devices of a trial.

    Raises:
        UsageError: more than there are; on a CPU, more ranks than make sense.
    """
    if cluster:
        return ()
    if device.type == "cuda":
        if count > device.count:
            raise UsageError(f"{count} devices were asked for, but there are {device.count} ({device.name})")
        return ()
    cores = usable_cores()
    most = max(MIN_CPU_RANKS, cores * CPU_RANKS_PER_CORE)
    if count > most:
        raise UsageError(
            f"{count} devices were asked for; on a CPU each is a process, and at most {most} are taken where there are "
            f"{cores} core{'s'[: cores > 1]}"
        )
    if count > cores:
        what = "one core" if cores == 1 else f"{cores} cores"
        return (f"{count} ranks share {what}: compare their times with each other only",)
    return ()
