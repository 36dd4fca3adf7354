"""What is tuned, resolved: a workload or a callable, its space, and where it runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..device import Device, detect, usable_cores
from ..errors import SpaceError, UsageError
from ..models import Workload
from ..models.request import TrainingRequest, resolve
from ..models.spaces import lossy_of_space
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
        assert self.function is not None, "a task has a workload or a function"
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
    if not callable(target):
        raise UsageError(f"what to tune must be a model's name, a Workload or a callable, but got {target!r}")
    if simulated is not None:
        raise UsageError("the runner 'simulate' needs a model or a workload; a callable can only be called")
    if any(getattr(request, name) is not None for name in _OF_A_WORKLOAD):
        names = f"{', '.join(_OF_A_WORKLOAD[:-1])} and {_OF_A_WORKLOAD[-1]}"
        raise UsageError(f"{names} belong to a workload, not to a callable")
    space, _ = request.space_or(_no_default)
    _check_effects(space, request.fix)
    name = getattr(target, "__name__", type(target).__name__)
    return Task(name=name, space=space, function=target, notes=notes, device=device, devices=count)


def _no_default(allow: Sequence[str]) -> Space:
    raise UsageError("tuning a callable needs a space: redline.tune(fn, space)")


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
