"""Resolves the target of a search (a workload, a callable or a command), its space, and its devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.device import Device, detect, usable_cores
from ...base.errors import SpaceError, UsageError, WorkloadError
from ...base.option import option
from ...frameworks.registry import find_launcher
from ...knobs.strategy import SPLITS, STANDARD
from ...knobs.text import value_text
from ...models import Workload
from ...models.huggingface import hugging_face_workload
from ...models.presets import ServerModel
from ...models.request import TrainingRequest, resolve
from ...models.resolve import workload as resolve_workload
from ...models.samples import samples_of_a_pass
from ...models.spaces import lossy_of_space
from ...runners.command.command import Command
from ...runners.command.trained import CommandTraining
from ...runners.command.work import Commands
from ...space import Config, Space

if TYPE_CHECKING:
    from ...estimator import Hardware

_OF_A_WORKLOAD = ("seq_len", "global_batch", "lora")
CPU_RANKS_PER_CORE = 4
MIN_CPU_RANKS = 8
"""Largest numbers of ranks on a CPU, by core and in any case; the larger one counts. Ranks are processes there: somewhat
more than the cores are useful for experiments, dozens are a mistake.
"""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A workload, a callable or a command to tune, its space, and its devices."""

    name: str
    space: Space
    device: Device
    devices: int
    workload: Workload | None = None
    """Workload that is trained, if known."""
    function: Callable[[Config], Any] | None = None
    """Callable to tune, in place of a training."""
    command: Commands | None = None
    """Command to tune, in place of redline's own training."""
    trained: CommandTraining | None = None
    """Description of the command's training."""
    free_batch: bool = False
    """True if the samples per step vary with `grad_accum`, because no global batch was given."""
    emulated: bool = False
    """True if a trial runs some of its ranks, on one device."""
    stands_for: Device | None = None
    """The hardware that this device is emulated as, if that is another."""
    lossy: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values of each knob in the space that trade accuracy for speed."""
    notes: tuple[str, ...] = ()

    @property
    def shown(self) -> Device:
        """Devices that the results describe: those that are emulated, otherwise those in use."""
        return self.stands_for or self.device

    @property
    def own(self) -> Workload | None:
        """The workload, if trials are redline's own training of it."""
        return self.workload if self.command is None else None

    @property
    def without(self) -> dict[str, Any]:
        """Values of knobs that a configuration may lack, if the command states them."""
        if self.trained is None:
            return {}
        values: dict[str, Any] = {}
        if self.free_batch:
            values = {"global_batch": total} if (total := self.trained.global_batch) else {"grad_accum": 1}
        return values | ({"precision": self.trained.precision} if self.trained.precision else {})

    @property
    def callable(self) -> Callable[[Config], Any]:
        """Callable of a task without a workload."""
        assert self.function is not None, "a task has a workload, a function or a command"
        return self.function


def resolve_task(
    request: TrainingRequest,
    *,
    cluster: bool = False,
    emulated: bool = False,
    stands_for: "Hardware | None" = None,
    device: Device | None = None,
) -> Task:
    """Resolves a request on the devices at hand.

    With `cluster`, devices may be on other hosts and are counted by the runner. With `emulated`, one device of this
    machine stands for all, as if it were `stands_for`. With `device`, devices are of this kind, on any host.

    Raises:
        UsageError: the request is invalid.
    """
    from ...estimator.survey import device_of

    request.check_values()
    target = request.target
    cluster = cluster or device is not None
    device = device or detect()
    count = request.devices or device.count
    notes = (
        _check_devices(count, device, cluster)
        if not emulated
        else (f"emulated: one device here stands for {count}; ranks run alone, and their communication is priced",)
    )
    if isinstance(target, (str, Path, Workload, ServerModel)):
        resolved = resolve(request, device, count)
        _check_effects(resolved.space, request.fix)
        return Task(
            name=resolved.workload.name,
            space=resolved.space,
            workload=resolved.workload,
            free_batch=resolved.free_batch,
            lossy=lossy_of_space(resolved.space),
            notes=notes + resolved.notes,
            device=device,
            devices=count,
            emulated=emulated,
            stands_for=None if stands_for is None else device_of(stands_for),
        )
    if emulated:
        raise UsageError("the runner 'emulate' needs a model or a workload")
    common: dict[str, Any] = {
        "notes": notes,
        "device": device,
        "devices": count,
        "emulated": emulated,
    }
    if isinstance(target, Command):
        return _command_task(target, request, common)
    if not callable(target):
        raise UsageError(f"the target must be a model's name, a Workload, a Command or a callable, but got {target!r}")
    _refuse_parts(request, _OF_A_WORKLOAD, "a callable")
    space, space_notes = request.space_or(_no_default)
    _check_effects(space, request.fix)
    common["notes"] += space_notes
    return Task(name=getattr(target, "__name__", type(target).__name__), function=target, space=space, **common)


def _command_task(target: Command, request: TrainingRequest, common: dict[str, Any]) -> Task:
    """Returns the task of a command, with its model if that is known."""
    count, total = common["devices"], request.global_batch
    trained = CommandTraining.by(target)
    workload, model_notes = _command_workload(target, trained, request)
    if workload is None:
        _refuse_parts(request, ("seq_len", "lora"), f"a command, unless {option('model')} names its model")
    space, allowed = request.space_or(partial(_command_space, target, trained, request, count))
    if "grad_accum" in space.by_name:
        trained = replace(trained, global_batch=None)
    if total is not None:
        _fix_global_batch(space, total, count)
    elif total is None and trained.global_batch and "micro_batch" in space.by_name:
        passed = samples_of_a_pass(space, max(1, count // trained.split))
        space.require(trained.global_batch % passed == 0, f"global batch {trained.global_batch}")
    _check_effects(space, request.fix)
    command = Commands(
        target,
        space,
        devices=count,
        global_batch=total,
        command_batch=trained.global_batch,
        command_knobs=trained.knobs,
        ranks=request.devices,
        workload=workload,
    )
    for expression in command.divisions:
        space.require(expression == expression, f"{expression} has a value")  # one without a value equals nothing
    if not space.knobs:
        common["notes"] += (
            "the command has no knob, so it is measured once: write {micro_batch} or any other name where a value belongs, and "
            f"give its values, such as {option('override')} micro_batch=8,16,32",
        )
    common["notes"] += (*model_notes, *allowed, *command.notes)
    return Task(
        name=target.name,
        command=command,
        workload=workload,
        trained=trained,
        space=space,
        free_batch=request.global_batch is None,
        lossy=lossy_of_space(space),
        **common,
    )


def _command_workload(
    command: Command, trained: CommandTraining, request: TrainingRequest
) -> tuple[Workload | None, tuple[str, ...]]:
    """Returns the workload that a command trains, None if unknown, and notes about it."""
    name = command.named(command.model) if command.model is not None else trained.model
    if name is None and trained.architecture is None:
        return None, ()
    length, total = request.seq_len or trained.seq_len, request.global_batch
    try:
        if name is not None:
            workload = resolve_workload(name, seq_len=length, global_batch=total, lora=request.lora)
        else:
            assert trained.architecture is not None
            workload = hugging_face_workload(
                trained.architecture, name=command.name, spec="", seq_len=length, global_batch=total
            )
    except WorkloadError as error:
        if command.model is not None:
            raise
        return None, (
            f"the search begins without an estimate of the command's model ({option('model')} names one): {error}",
        )
    of = f", {workload.seq_len} tokens a sample" if workload.seq_len else ""
    if name is None:
        return workload, (
            f"the estimate is that of the model that the command's flags describe{of}; {option('model')} names another",
        )
    source = "" if command.model is not None else f"; the command names it, and {option('model')} names another"
    return workload, (f"the estimate is that of {workload.name}{of}{source}",)


def _refuse_parts(request: TrainingRequest, names: Sequence[str], subject: str) -> None:
    """Checks that no option of a workload is given without one.

    Raises:
        UsageError: one of them is given.
    """
    if any(getattr(request, name) is not None for name in names):
        raise UsageError(f"{', '.join(names[:-1])} and {names[-1]} are for a workload, not for {subject}")


def _no_default(allow: Sequence[str]) -> Space:
    raise UsageError("tuning a callable needs a space: redline.tune(fn, space)")


def _command_space(
    command: Command, trained: CommandTraining, request: TrainingRequest, devices: int, allow: Sequence[str]
) -> Space:
    """Returns the space of the knobs with given values, and of those that the launcher knows; empty if there are none.

    The default of a launcher's knob is the value in the command itself, if that can be read; the default of any other
    knob is its first value. Knobs with a standard name declare their standard effect on memory.
    """
    values: dict[str, Sequence[Any]] = {}
    if command.launcher is not None:
        values |= find_launcher(command.launcher).values(command, devices, lossy="lossy" in allow)
        for name, choices in values.items():
            if (command_value := trained.knobs.get(name)) in choices:
                values[name] = [command_value, *(choice for choice in choices if choice != command_value)]
    values |= request.override or {}
    space = Space()
    for name, choices in values.items():
        _declare(space, name, choices)
    degrees = [space[name] for name in SPLITS if name in space.by_name]
    if degrees and devices > 1:
        space.require(devices % reduce(mul, degrees) == 0, f"degrees divide the {devices} devices")
    return space


def _declare(space: Space, name: str, values: Sequence[Any]) -> None:
    """Declares a knob by its values, the first of them its default. Numbers are sorted. A knob with a standard name
    declares its standard effect on memory.

    Raises:
        SpaceError: the name or the values are invalid for a knob.
    """
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    along = STANDARD[name].memory if numbers and name in STANDARD else 0
    default = values[0] if values else None
    space.choice(name, sorted(values) if numbers else values, default=default, monotone_memory=along)


def _fix_global_batch(space: Space, total: int, devices: int) -> None:
    """Fixes the samples per step, regardless of the micro-batch.

    Raises:
        UsageError: the space has no micro-batch, or has grad_accum itself.
    """
    if "micro_batch" not in space.by_name or "grad_accum" in space.by_name:
        raise UsageError(
            f"{option('global_batch')} needs the knob micro_batch, from which grad_accum follows, and no knob grad_accum"
        )
    together = samples_of_a_pass(space, devices)
    accumulate = space.derive("grad_accum", total // together, help="micro-batches per optimizer step")
    space.require(together * accumulate == total, f"global batch {total}")


def _check_effects(space: Space, fix: Mapping[str, Any] | None) -> None:
    """Checks that every fixed knob exists in some configuration.

    Raises:
        UsageError: such a knob is fixed.
    """
    for name, value in (fix or {}).items():
        if (when := space[name].when) is None:
            continue
        try:
            space.copy().require(when)
        except SpaceError:
            raise UsageError(
                f"{name}={value_text(value)} would have no effect: {name} exists where `{when.text}`, and no "
                "configuration that is left has that"
            ) from None


def _check_devices(count: int, device: Device, cluster: bool) -> tuple[str, ...]:
    """Returns notes about the number of devices of a trial.

    Raises:
        UsageError: there are fewer devices; on a CPU, more ranks than make sense.
    """
    if cluster:
        return ()
    if device.type == "cuda":
        if count > device.count:
            raise UsageError(
                f"{count} devices were requested, but there are {device.count} ({device.name}); those of several hosts need "
                f"a Ray cluster: {option('ray_address')}"
            )
        return ()
    cores = usable_cores()
    most = max(MIN_CPU_RANKS, cores * CPU_RANKS_PER_CORE)
    if count > most:
        raise UsageError(
            f"{count} devices were requested; on a CPU each is a process, and at most {most} are allowed with "
            f"{cores} core{'s'[: cores > 1]}"
        )
    if count > cores:
        cores_text = "one core" if cores == 1 else f"{cores} cores"
        return (f"{count} ranks share {cores_text}: compare their times with each other only",)
    return ()
