"""What is tuned, resolved: a workload or a callable, its space, and where it runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..device import Device, detect, usable_cores
from ..errors import SpaceError, UsageError
from ..models import Workload
from ..models.global_batch import free_accumulation, shared
from ..models.spaces import checked_allowance, lossy_of_space, make_space, nothing_allowed
from ..models.spaces import fix as fix_knob
from ..space import Config, Space

if TYPE_CHECKING:
    from ..estimator import Hardware

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


def resolve_task(
    target: Any,
    space: Space | None = None,
    *,
    devices: int | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    data: str | Path | None = None,
    lora: str | None = None,
    allow: str | Sequence[str] = (),
    override: Mapping[str, Sequence[Any]] | None = None,
    fix: Mapping[str, Any] | None = None,
    cluster: bool = False,
    simulated: "Hardware | None" = None,
) -> Task:
    """What the arguments of `tune` of these names come to.

    With `cluster` devices may be on other hosts, and whoever places the trials counts them. With `simulated` they
    are this hardware's, of a node where no number is given.

    Raises:
        UsageError: one of them is invalid.
    """
    for what, value in (("devices", devices), ("seq_len", seq_len), ("global_batch", global_batch)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UsageError(f"{what} must be a whole number of at least 1, but got {value!r}")
    allow = checked_allowance(allow, own_space=space is not None)
    if simulated is not None:
        from ..estimator.planning import device_of

        device = device_of(simulated)
        count = devices or device.count
        notes: tuple[str, ...] = (f"simulated: nothing is run, trials are predictions for {count} x {device.name}",)
    else:
        device = detect()
        count = devices or device.count
        notes = _check_devices(count, device, cluster)
    if isinstance(target, (str, Path, Workload)):
        from ..models import workload as resolve_workload

        workload = resolve_workload(target, seq_len=seq_len, global_batch=global_batch, data=data, lora=lora)
        accumulation = free_accumulation(workload, space, global_batch, override, fix)
        if accumulation is None:
            workload, said = shared(workload, count, target=target, asked=global_batch)
            notes += said
        made = (
            space.copy()
            if space is not None
            else make_space(workload, device, devices=count, grad_accum=accumulation, allow=allow)
        )
        notes += nothing_allowed(made, allow)
        name, function = workload.name, None
    elif callable(target):
        if simulated is not None:
            raise UsageError("the runner 'simulate' needs a model or a workload; a callable can only be called")
        if space is None:
            raise UsageError("tuning a callable needs a space: redline.tune(fn, space)")
        if any(each is not None for each in (seq_len, global_batch, data, lora)):
            raise UsageError("seq_len, global_batch, data and lora belong to a workload, not to a callable")
        workload, function, made, accumulation = None, target, space.copy(), None
        name = getattr(target, "__name__", type(target).__name__)
    else:
        raise UsageError(f"what to tune must be a model's name, a Workload or a callable, but got {target!r}")
    for knob, values in (override or {}).items():
        made.override(knob, values)
    for knob, value in (fix or {}).items():
        fix_knob(made, knob, value)
    for knob, value in (fix or {}).items():
        _check_effect(made, knob, value)
    return Task(
        name=name,
        space=made,
        device=device,
        devices=count,
        workload=workload,
        function=function,
        free_batch=accumulation is not None,
        simulated=simulated is not None,
        lossy=lossy_of_space(made) if workload is not None else {},
        notes=notes,
    )


def _check_effect(space: Space, name: str, value: Any) -> None:
    """Refuses to fix a knob that no configuration has.

    Raises:
        UsageError: so it is.
    """
    when = space[name].when
    if when is None:
        return
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
