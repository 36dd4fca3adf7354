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
from ..results import Trial
from ..results.columns import speed
from ..space import Config, Space
from ..tuner.default_prior import assumed_hardware
from ..tuner.feasibility import HEADROOM, OutOfMemoryKnowledge
from ..tuner.listener import SearchListener

if TYPE_CHECKING:
    import numpy as np

    from ..estimator import Estimate, Estimator, Hardware
    from ..estimator.estimate import EstimateTable
    from ..estimator.survey import Ranked, Survey


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
DIGITS = 4
"""Significant digits of the predictions that decide what is safer. Further digits may depend on the host's processor."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A configuration to train with."""

    config: Config
    estimate: "Estimate | None"
    """Estimate of the configuration; None if the model or the machine cannot be predicted."""
    why: str
    """Reason for this configuration, in a sentence."""
    trials: tuple[Trial, ...] = ()
    """Dry runs of the short search; empty if the estimate alone decided."""


def plan(
    workload: Workload,
    *,
    devices: int | None = None,
    memory_limit_mib: float | None = None,
    like: Config | None = None,
    trials: int = 0,
    fixed: Mapping[str, Any] | None = None,
    hardware: "str | Path | Hardware | None" = None,
    seed: int = 0,
    out: str | Path | None = None,
    listener: SearchListener | None = None,
) -> Planned:
    """Returns the configuration to train with on these devices: the estimate's best, or the best of a short search
    that starts from it.

    Only one process of a training may call it and has to send the result to the others: it looks up free memory and
    the machine's speed, and measures dry runs.

    Args:
        workload: what is trained.
        devices: number of devices; None for all.
        memory_limit_mib: memory of a device; None for all of it, on a CPU for a rank's share of the free memory.
        like: the previous configuration, if any: its results and its samples per step are kept.
        trials: dry runs on this host; 0 uses the estimate's best.
        fixed: values of knobs that do not vary.
        hardware: a name, a file or `Hardware` that describes the devices; None for those at hand.
        seed: seed of the dry runs.
        out: a new folder for the search; None saves nothing.
        listener: receives the events of the search.

    Raises:
        NothingFound: no configuration fits; the message says what would.
        UsageError: an argument is invalid, or no configuration is valid.
        KeyboardInterrupt: the search was interrupted.
    """
    site = _site(with_samples_of(workload, like), devices, memory_limit_mib, hardware, like, fixed or {})
    space, space_notes = site.space(site.devices)
    outlook = _outlook(site, space)
    if not trials:
        return _with_notes(_by_estimate(site, space, outlook), space_notes)
    search = {"runner": "local", "trials": trials, "seed": seed, "hardware": hardware, "out": out}
    return _with_notes(_by_dry_runs(site, space, outlook, listener or SearchListener(), search), space_notes)


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
        return Planned(config=config, estimate=None, why=of)
    space, space_notes = training_space(workload, device, devices, config, fixed)
    for knob in space.knobs:
        if knob.derived or knob.name in fixed or knob.name not in config:
            continue
        if config[knob.name] not in knob.values:
            with suppress(SpaceError):  # impossible here
                space.override(knob.name, [*knob.values, config[knob.name]])
    nearest = beginning_with(space, config).default()
    return _with_notes(
        Planned(config=nearest, estimate=None, why=f"the valid configuration nearest to {of}"), space_notes
    )


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
    (`CLEARLY_LESS`).

    The result depends only on the arguments, the kind of device and the installed packages. Nothing is measured, so
    all ranks of a training get the same result without communication.

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
    from ..estimator.survey import survey

    machine = find_hardware(hardware) if hardware is not None else None
    site = _Site(
        workload=with_samples_of(workload, config),
        device=_device(machine),
        devices=devices,
        machine=machine,
        limit_mib=memory_limit_mib,
        like=config,
        fixed=fixed or {},
    )
    space, space_notes = site.space(devices)
    if machine is None:
        site = replace(site, machine=assumed_hardware(site.device, space, devices))
    estimator = site.estimator(space, devices)
    fallen = list(dict.fromkeys((config, *failed)))
    failed_table = estimator.table(fallen)
    least_mib = float(failed_table.fullest_memory_mib.min())
    knowledge = OutOfMemoryKnowledge(space)
    fastest = survey(estimator, space, top=LEADERS, order=_needing(CLEARLY_LESS * least_mib)).best
    sound = (
        ranked
        for ranked in fastest
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
    return _with_notes(Planned(config=chosen.config, estimate=chosen.estimate, why=reason), space_notes)


@dataclass(frozen=True, kw_only=True)
class _Site:
    """Workload and devices of a plan."""

    workload: Workload
    device: Device
    devices: int
    machine: "Hardware | None"
    """None if the machine cannot be measured; `note` has the reason."""
    limit_mib: float | None
    like: Config | None
    fixed: Mapping[str, Any]
    note: str | None = None

    def space(self, devices: int) -> tuple[Space, tuple[str, ...]]:
        return training_space(self.workload, self.device, devices, self.like, self.fixed)

    def estimator(self, space: Space, devices: int) -> "Estimator":
        from ..estimator import Estimator, TrainingSetup
        from ..estimator.request import without_knobs

        assert self.machine is not None, "predictions need a machine"
        setup = TrainingSetup(
            devices=devices,
            seq_len=self.workload.seq_len,
            global_batch=self.workload.global_batch,
            memory_limit_mib=self.limit_mib,
            **without_knobs(space),
        )
        return Estimator(self.workload, self.machine, setup)

    @property
    def words(self) -> str:
        if self.machine is not None and self.machine.kind != "cpu":
            return f"{self.devices} x {self.machine.name}"
        return f"{self.devices} rank{'s'[: self.devices > 1]} on {self.device.name}"


@dataclass(frozen=True, kw_only=True)
class _Outlook:
    """Predictions for the configurations of a space."""

    estimator: "Estimator | None"
    survey: "Survey | None"
    note: str | None
    """Reason why there is no prediction, or a remark on the best configuration."""

    @property
    def best(self) -> "Ranked | None":
        return None if self.survey is None else next(iter(self.survey.best), None)


def _site(
    workload: Workload,
    devices: int | None,
    limit_mib: float | None,
    hardware: "str | Path | Hardware | None",
    like: Config | None,
    fixed: Mapping[str, Any],
) -> _Site:
    from ..estimator.request import machine_of

    note, machine = None, None
    try:
        machine, count = machine_of(hardware, devices)
    except RunnerError as error:
        note, count = str(error), devices or detect().count
    device = _device(machine if hardware is not None else None)
    if limit_mib is None and hardware is None and device.type == "cpu":
        limit_mib = share_of_host(count)
    return _Site(
        workload=workload,
        device=device,
        devices=count,
        machine=machine,
        limit_mib=limit_mib,
        like=like,
        fixed=fixed,
        note=note,
    )


def _device(machine: "Hardware | None") -> Device:
    from ..estimator.survey import device_of

    return detect() if machine is None else device_of(machine)


def _outlook(site: _Site, space: Space) -> _Outlook:
    """Predicts the best configuration, by throughput times the probability to run. Configurations that leave too
    little headroom count only if no other fits.
    """
    from ..estimator.survey import survey

    if site.machine is None:
        return _Outlook(estimator=None, survey=None, note=site.note)
    estimator = site.estimator(space, site.devices)
    limit_mib = estimator.memory_limit_mib
    try:
        surveyed = survey(estimator, space, top=1, order=_hopeful((1.0 - HEADROOM) * limit_mib))
        if surveyed.best:
            return _Outlook(estimator=estimator, survey=surveyed, note=None)
        surveyed = survey(estimator, space, top=1, order=_hopeful(limit_mib))
    except UsageError as error:
        return _Outlook(estimator=None, survey=None, note=str(error))
    note = f"less than {100 * HEADROOM:g} % of the memory stays free" if surveyed.best else None
    return _Outlook(estimator=estimator, survey=surveyed, note=note)


def _by_estimate(site: _Site, space: Space, outlook: _Outlook) -> Planned:
    if outlook.survey is None:
        reason = f"the default configuration, since nothing can be predicted: {outlook.note}"
        return Planned(config=space.default(), estimate=None, why=reason)
    if outlook.best is None:
        raise NothingFound(_nothing_fits(site, outlook))
    predicted = outlook.survey.predicted
    of = f"the estimate's best of {predicted:,} configurations" if predicted > 1 else "the only configuration"
    reason = f"{of} for {site.words}{f'; {outlook.note}' if outlook.note else ''}"
    return Planned(config=outlook.best.config, estimate=outlook.best.estimate, why=reason)


def _by_dry_runs(
    site: _Site, space: Space, outlook: _Outlook, listener: SearchListener, search: Mapping[str, Any]
) -> Planned:
    """Returns the winner of a short search whose first trial is the estimate's best."""
    from ..tuner.tuning import tune

    start = outlook.best.config if outlook.best is not None else None
    result = tune(
        site.workload,
        space if start is None else beginning_with(space, start),
        devices=site.devices,
        memory_limit=site.limit_mib,
        listener=listener,
        **search,
    )
    if result.interrupted:
        raise KeyboardInterrupt
    if result.best is None:
        raise NothingFound(f"{result.why}.{ADVICE}")
    best, count = result.best, len([trial for trial in result.all_trials if trial.measurement is not None])
    chosen_of = f"the fastest of {count} dry runs" if count > 1 else "the one dry run"
    return Planned(
        config=best.config,
        estimate=None if outlook.estimator is None else outlook.estimator(best.config),
        why=f"{chosen_of} on {site.words}: {speed(best.throughput, best.measurement.unit)}",
        trials=result.all_trials,
    )


def _nothing_fits(site: _Site, outlook: _Outlook) -> str:
    assert outlook.survey is not None and outlook.estimator is not None, "something was predicted"
    least, limit_mib = outlook.survey.smallest, outlook.estimator.memory_limit_mib
    message = (
        f"none of the {outlook.survey.predicted:,} configurations of {site.workload.name} is predicted to fit "
        f"{site.words}, with {_mib(limit_mib)} each."
    )
    if least is not None:
        message += f" The least that any needs is {_mib(least.estimate.peak_memory_mib)} ({config_text(least.config)})."
    return message + ADVICE


def _with_notes(planned: Planned, notes: Sequence[str]) -> Planned:
    return replace(planned, why="; ".join((planned.why, *notes)))


def _hopeful(room_mib: float) -> "Callable[[EstimateTable], np.ndarray]":
    """Orders configurations that need at most `room_mib` by throughput less its risk times the probability to run: running out of
    memory sets a training back to its last checkpoint, and then costs speed.
    """
    import numpy as np

    def order(table: "EstimateTable") -> np.ndarray:
        fits = np.flatnonzero(np.isfinite(table.step_ms) & (table.fullest_memory_mib <= room_mib))
        hope = (table.preference * table.probability_runs)[fits]
        return fits[np.lexsort((table.fullest_memory_mib[fits], -hope))]

    return order


def _needing(at_most_mib: float) -> "Callable[[EstimateTable], np.ndarray]":
    """Orders configurations that need at most `at_most_mib` by throughput less its risk."""
    import numpy as np

    def rounded(values: np.ndarray) -> np.ndarray:
        return np.array([float(f"{value:.{DIGITS}g}") for value in values.tolist()])

    def order(table: "EstimateTable") -> np.ndarray:
        need, fast = rounded(table.fullest_memory_mib), rounded(table.preference)
        less = np.flatnonzero(np.isfinite(table.step_ms) & (need <= at_most_mib))
        return less[np.lexsort((need[less], -fast[less]))]

    return order


def _mib(value: float) -> str:
    return f"{value:,.0f} MiB"
