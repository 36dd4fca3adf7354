"""Plans the configuration of a training on the devices at hand, and the fallback after an out-of-memory failure."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.device import Device, detect, share_of_host
from ..base.errors import NothingFound, RunnerError, SpaceError, UsageError
from ..knobs.lossy import LOSSY
from ..knobs.rules import RuleContext
from ..knobs.strategy import ON_REQUEST, STANDARD
from ..knobs.text import config_text, value_text
from ..models import Workload
from ..models.spaces import fix_knob, make_space
from ..space import Config, Space
from ..tuner.default_prior import assumed_hardware
from ..tuner.feasibility import HEADROOM, OutOfMemoryKnowledge

if TYPE_CHECKING:
    import numpy as np

    from ..estimator import Estimate, Estimator, Hardware
    from ..estimator.estimate import EstimateTable
    from ..estimator.survey import Survey


COMPUTED: Mapping[str, Any] = {"precision": "fp32", "reduce_dtype": "fp32", "capacity_factor": 0}
"""Knobs of `LOSSY`, which change the results of the computation, with the value that a configuration without them
has. Attention, fusion and kernels compute the same up to rounding.
"""


def training_space(
    workload: Workload,
    device: Device,
    devices: int,
    like: Mapping[str, Any] | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> tuple[Space, tuple[str, ...]]:
    """Returns the default space restricted to configurations that compute the same training as `like`, and a note for
    each knob that had to change.

    Args:
        workload: what is trained.
        device, devices: as for `make_space`.
        like: the previous configuration; None at the start of a training.
        fixed: values of knobs that do not vary, regardless of their previous values.

    Raises:
        SpaceError: the devices cannot share the global batch, or a knob cannot have its fixed value.
    """
    fixed = fixed or {}
    lossy = like is not None and any(like.get(name) in values for name, values in LOSSY.items())
    space = make_space(workload, device, devices, allow=("lossy",) if lossy and workload.space is None else ())
    for name, value in fixed.items():
        fix_knob(space, name, value)
    notes: list[str] = []
    if like is None:
        return space, ()
    for name, plain in COMPUTED.items():
        value = like.get(name, plain)
        if name in ON_REQUEST and value != plain and name not in fixed:
            fix_knob(space, name, value)
        if name not in space.by_name or space[name].derived or name in fixed:
            continue
        try:
            space.fix(name, value)
        except SpaceError as error:
            exact = [value for value in space[name].values if value not in LOSSY[name]]
            space.override(name, exact or list(space[name].values))
            notes.append(f"{name}={value_text(value)} could not be kept: {error}")
    mixing = space.beyond.mixing if isinstance(space.beyond, RuleContext) else ""
    if mixing and "micro_batch" in like and "micro_batch" not in fixed:
        try:
            space.fix("micro_batch", like["micro_batch"])
        except SpaceError as error:
            notes.append(f"micro_batch={like['micro_batch']} could not be kept, although {mixing}: {error}")
    for knob in space.free:  # a knob of the user's own may be part of the model
        if knob.name not in STANDARD and knob.name in like and knob.name not in fixed:
            space.fix(knob.name, like[knob.name])
    return space, tuple(notes)


def with_samples_of(workload: Workload, like: Mapping[str, Any] | None) -> Workload:
    """Returns the workload with the samples per step of a configuration that determines them: either the workload's
    own global batch, or one that was chosen with the configuration.
    """
    if like is None or "micro_batch" not in like or "grad_accum" not in like:
        return workload
    total = like["micro_batch"] * like["grad_accum"] * like.get("dp", 1)
    return workload.with_global_batch(total)


def beginning_with(space: Space, config: Config) -> Space:
    """Returns a copy of a space whose default configuration is the nearest to `config`."""
    copy = space.copy()
    for knob in copy.knobs:
        if not knob.derived and knob.name in config and config[knob.name] in knob.values:
            knob.default = config[knob.name]
    return copy


ADVICE = " `redline estimate` names changes with which a configuration fits."
CLEARLY_LESS = 0.9
"""Share of the smallest failed configuration's predicted memory below which another configuration counts as safer.

The configurations of one model share most of a prediction's error. The rest is about 5 % of memory, which the headroom
covers, and a fragmented allocator cache holds a few percent more than the live tensors. A step of 10 % exceeds both
together, and costs little speed. If it is not enough, the next failure takes another 10 % off, so that the need is
halved after seven failures.
"""
LEADERS = 64
"""Number of the fastest configurations that are checked against known failures."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A configuration to train with."""

    config: Config
    estimate: "Estimate | None" = None
    """Estimate of the configuration, if it was chosen by one."""
    why: str
    """Reason for this configuration, in a sentence."""
    predicted: float | None = None
    """Throughput, measured or estimated; None if unknown."""
    notes: tuple[str, ...] = ()
    """Parts of a given strategy that are not followed."""


def plan(
    workload: Workload,
    *,
    devices: int | None = None,
    memory_limit_mib: float | None = None,
    like: Config | None = None,
    fixed: Mapping[str, Any] | None = None,
    hardware: "str | Path | Hardware | None" = None,
) -> Planned:
    """Returns the configuration to train with on these devices: the estimate's best.

    Only one process of a training may call it and has to send the result to the others: it looks up free memory and
    the machine's speed.

    Args:
        workload: what is trained.
        devices: number of devices; None for all.
        memory_limit_mib: memory of a device; None for all of it, on a CPU for a rank's share of the free memory.
        like: the previous configuration, if any: its results and its samples per step are kept.
        fixed: values of knobs that do not vary.
        hardware: a name, a file or `Hardware` that describes the devices; None for those at hand.

    Raises:
        NothingFound: no configuration fits; the message says what would.
        UsageError: an argument is invalid, or no configuration is valid.
    """
    from ..estimator.request import machine_of
    from ..estimator.survey import device_of

    workload = with_samples_of(workload, like)
    machine: Hardware | None = None
    note = ""
    try:
        machine, count = machine_of(hardware, devices)
    except RunnerError as error:
        note, count = str(error), devices or detect().count
    device = detect() if machine is None or hardware is None else device_of(machine)
    if memory_limit_mib is None and hardware is None and device.type == "cpu":
        memory_limit_mib = share_of_host(count)
    where = f"{count} rank{'s'[: count > 1]} on {device.name}"
    if machine is not None and machine.kind != "cpu":
        where = f"{count} x {machine.name}"
    space, space_notes = training_space(workload, device, count, like, fixed)
    surveyed = None
    if machine is not None:
        estimator = _estimator(workload, machine, space, count, memory_limit_mib)
        try:
            surveyed, note = _surveyed(estimator, space)
        except UsageError as error:  # the model cannot be predicted
            note = str(error)
    best = next(iter(surveyed.best), None) if surveyed is not None else None
    if surveyed is None:
        reason = f"the default configuration, since nothing can be predicted: {note}"
        planned = Planned(config=space.default(), why=reason)
    elif best is None:
        raise NothingFound(_nothing_fits(workload, surveyed, where, estimator.memory_limit_mib))
    else:
        of = f"the estimate's best of {surveyed.predicted:,} configurations"
        reason = (
            f"{of if surveyed.predicted > 1 else 'the only configuration'} for {where}{f'; {note}' if note else ''}"
        )
        planned = Planned(config=best.config, estimate=best.estimate, why=reason, predicted=best.estimate.throughput)
    return replace(planned, why="; ".join((planned.why, *space_notes)))


def adapted(
    workload: Workload, config: Config, device: Device, *, devices: int, fixed: Mapping[str, Any], of: str
) -> Planned:
    """Returns the configuration of a run, or the valid one nearest to it that has these values of knobs and the workload's
    global batch.

    Args:
        workload: what is trained.
        config: the configuration, of a run on as many devices.
        device: kind of the devices.
        devices: number of devices.
        fixed: values of knobs.
        of: description of the configuration.

    Raises:
        SpaceError: no configuration has these values.
    """
    same_batch = with_samples_of(workload, config).global_batch == workload.global_batch
    if same_batch and all(config.get(name) == value for name, value in fixed.items()):
        return Planned(config=config, why=of)
    space, space_notes = training_space(workload, device, devices, config, fixed)
    for knob in space.knobs:
        if knob.derived or knob.name in fixed or knob.name not in config:
            continue
        if config[knob.name] not in knob.values:
            with suppress(SpaceError):  # impossible here
                space.override(knob.name, [*knob.values, config[knob.name]])
    nearest = beginning_with(space, config).default()
    return Planned(config=nearest, why="; ".join((f"the valid configuration nearest to {of}", *space_notes)))


def safer(
    workload: Workload,
    config: Config,
    *,
    devices: int,
    memory_limit_mib: float | None = None,
    failed: Sequence[Config] = (),
    fixed: Mapping[str, Any] | None = None,
    hardware: "str | Path | Hardware | None" = None,
) -> Planned | None:
    """Returns the fastest configuration, by estimate, of those that need clearly less memory than the failed ones
    (`CLEARLY_LESS`). Nothing is measured, since the devices may still be in use.

    Args:
        workload: what is trained.
        config: the configuration that ran out of memory.
        devices: number of devices.
        memory_limit_mib: memory of a device; None for all of it.
        failed: configurations that ran out of memory before, on the same number of devices.
        fixed: values of knobs that do not vary.
        hardware: a name, a file or `Hardware`; None for the kind of the devices at hand.

    Returns:
        None if no configuration needs clearly less.

    Raises:
        UsageError: the model cannot be predicted.
    """
    from ..estimator.hardware import find_hardware
    from ..estimator.survey import device_of, survey

    workload = with_samples_of(workload, config)
    machine = find_hardware(hardware) if hardware is not None else None
    device = detect() if machine is None else device_of(machine)
    space, space_notes = training_space(workload, device, devices, config, fixed)
    machine = machine or assumed_hardware(device, space, devices)
    estimator = _estimator(workload, machine, space, devices, memory_limit_mib)
    fallen = list(dict.fromkeys((config, *failed)))
    failed_table = estimator.table(fallen)
    least_mib = float(failed_table.fullest_memory_mib.min())
    knowledge = OutOfMemoryKnowledge(space)
    order = _order(CLEARLY_LESS * least_mib, lambda table: table.preference)
    sound = (
        ranked
        for ranked in survey(estimator, space, top=LEADERS, order=order).best
        if not any(knowledge.needs_as_much(ranked.config, failed_config) for failed_config in fallen)
    )
    chosen = next(sound, None)
    if chosen is None:
        return None
    ratio = chosen.estimate.throughput / float(failed_table.throughput[0])
    reason = (
        f"the fastest configuration that is predicted to need clearly less memory than the one that failed: "
        f"{_mib(chosen.estimate.peak_memory_mib)} instead of {_mib(least_mib)}, at {100 * ratio:.0f} % of its speed"
    )
    return Planned(config=chosen.config, estimate=chosen.estimate, why="; ".join((reason, *space_notes)))


def _estimator(
    workload: Workload, machine: "Hardware", space: Space, devices: int, limit_mib: float | None
) -> "Estimator":
    from ..estimator import Estimator, TrainingSetup
    from ..estimator.request import without_knobs

    setup = TrainingSetup(
        devices=devices,
        seq_len=workload.seq_len,
        global_batch=workload.global_batch,
        memory_limit_mib=limit_mib,
        **without_knobs(space),
    )
    return Estimator(workload, machine, setup)


def _surveyed(estimator: "Estimator", space: Space) -> "tuple[Survey, str]":
    """Returns the best configuration, by throughput less its risk times the probability to run (running out of memory sets a
    training back to its last checkpoint, and then costs speed), and a remark on it. Configurations that leave too little
    headroom count only if no other fits.
    """
    from ..estimator.survey import survey

    for headroom in (HEADROOM, 0.0):
        order = _order(
            (1.0 - headroom) * estimator.memory_limit_mib, lambda table: table.preference * table.probability_runs
        )
        surveyed = survey(estimator, space, top=1, order=order)
        if surveyed.best:
            break
    return surveyed, "" if headroom else f"less than {100 * HEADROOM:g} % of the memory stays free"


def _order(room_mib: float, value: "Callable[[EstimateTable], np.ndarray]") -> "Callable[[EstimateTable], np.ndarray]":
    """Returns the order of the configurations that need at most `room_mib`: the highest value first, then the least memory."""
    import numpy as np

    def order(table: "EstimateTable") -> np.ndarray:
        fits = np.flatnonzero(np.isfinite(table.step_ms) & (table.fullest_memory_mib <= room_mib))
        return fits[np.lexsort((table.fullest_memory_mib[fits], -value(table)[fits]))]

    return order


def _nothing_fits(workload: Workload, surveyed: "Survey", where: str, limit_mib: float) -> str:
    message = (
        f"none of the {surveyed.predicted:,} configurations of {workload.name} is predicted to fit {where}, with "
        f"{_mib(limit_mib)} each."
    )
    if (least := surveyed.smallest) is not None:
        message += f" The least that any needs is {_mib(least.estimate.peak_memory_mib)} ({config_text(least.config)})."
    return message + ADVICE


def _mib(value: float) -> str:
    return f"{value:,.0f} MiB"
