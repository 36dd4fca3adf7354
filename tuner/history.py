"""Trials of this run and of earlier ones, and changes of the machine's speed since the search began."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, count
from operator import is_not
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import StudyError, UsageError
from ..results import Measurement, Trial, View
from ..results.measurement import REFINEMENT
from ..runners import Reference
from ..runners.trial.load import CHANGED_CORES
from ..space import Config
from .listener import SearchListener

WORTH_SAYING = 0.1
"""Relative change of the default configuration's speed that is reported."""


def at_first_speed(trial: Trial) -> Trial:
    """Returns the trial with the throughput and the step time that it would have had in the conditions at the start of
    the search.
    """
    measured = trial.measurement
    if measured is None or not measured.ok or not measured.machine_speed:
        return trial
    rates = ("throughput", "throughput_spread", "tokens_per_second", "samples_per_second")
    factors = dict.fromkeys(rates, 1 / measured.machine_speed)
    factors |= dict.fromkeys(("step_ms", "step_ms_spread"), measured.machine_speed)
    corrected: dict[str, Any] = {
        name: value * factor for name, factor in factors.items() if (value := getattr(measured, name)) is not None
    }
    return replace(trial, measurement=replace(measured, machine_speed=None, **corrected))


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierRun:
    """A run to learn from."""

    name: str
    """Its folder, for messages."""
    trials: Sequence[Trial]
    """Finished trials, in the conditions at the start of that run."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Its request, as in run.yaml."""


def read_runs(folders: Sequence[str | Path], own: str | Path | None = None) -> list[EarlierRun]:
    """Reads the finished trials of earlier runs, and their requests.

    Args:
        folders: folders of the runs.
        own: folder of the run that learns from them.

    Raises:
        UsageError: a folder contains no run, or no request, or is given twice, or is this run's own.
    """
    runs: list[EarlierRun] = []
    places: set[Path] = set()
    for folder in folders:
        place = Path(folder).resolve()
        if own is not None and place == Path(own).resolve():
            raise UsageError(f"warm start: {folder} is this run's own folder; resume continues it")
        if place in places:
            raise UsageError(f"warm start: {folder} is given twice; its trials count once")
        places.add(place)
        try:
            view = View(folder, Config)
        except StudyError as error:
            raise UsageError(f"warm start: {error}") from error
        if view.document is None:
            raise UsageError(f"warm start: {folder} has no run.yaml, so the request of its run is unknown")
        # A refined configuration names single blocks and is outside every space.
        trials = [at_first_speed(trial) for trial in view.trials() if not trial.pending and trial.sampler != REFINEMENT]
        runs.append(EarlierRun(name=str(folder), trials=trials, asked=view.document["asked"]))
    return runs


def unsteady(trials: Sequence[Trial]) -> bool:
    """True if the load of other processes differed between the measurements of these trials that were taken once."""
    loads = [trial.measured.foreign_cores for trial in trials if not trial.remeasured]
    known = [each for each in loads if each is not None]
    return bool(known) and max(known) - min(known) > CHANGED_CORES


@dataclass
class Conditions:
    """Compares the current load of other processes with their load when the canary was last measured: the first trial that
    succeeded, usually the default configuration. If it has changed, measures the canary again.
    """

    measure: Callable[[Trial], Measurement]
    """Measures a trial's configuration again, completely."""
    listener: SearchListener
    spare_cores: float = 0.0
    """Load of other processes up to which they slow nothing down."""
    speed: float = 1.0
    """Last speed of the canary over its first."""
    _seen: list[tuple[float, float]] = field(default_factory=list)
    """Others' load and the canary's speed of each of its measurements, the newest last."""
    _reported: float = 1.0
    _failed_at: float | None = None
    """Others' load at which the canary failed since its last success."""

    def judge(self, trials: Sequence[Trial], measured: Measurement) -> Measurement:
        """Returns the measurement with the machine's speed at its time."""
        canary, load = next((trial for trial in trials if trial.ok), None), self._load(measured)
        if canary is None:
            self._seen = [] if load is None else [(load, 1.0)]
            return measured
        first = self._load(canary.measured)
        if not self._seen and first is not None:  # an earlier process measured it
            self._seen = [(first, 1.0)]
        if load is None or not self._seen:
            return measured
        known = [self._seen[-1][0], *([] if self._failed_at is None else [self._failed_at])]
        if all(abs(load - each) > CHANGED_CORES for each in known):
            again = self.measure(canary)
            if again.ok and (now := self._load(again)) is not None:
                self.speed = again.reached / (canary.first or canary.throughput)
                self._seen.append((now, self.speed))
                self._failed_at = None
                self._say(canary)
            else:
                self._failed_at = load
                self.listener.on_message(
                    f"trial {canary.number} shows how fast the machine is, but failed when measured again: {again.status} "
                    f"({again.reason}); the effect of the present load is not known"
                )
        speed = self._at(load)
        return measured if speed == 1.0 else replace(measured, machine_speed=speed)

    def _load(self, measured: Measurement) -> float | None:
        """Cores that other processes kept busy beyond those that are spare; None if unknown."""
        load = measured.foreign_cores
        return None if load is None else max(0.0, load - self.spare_cores)

    def _at(self, load: float) -> float:
        """Speed of the canary under a load, which may have ended before the canary ran again."""
        for seen, speed in reversed(self._seen):
            if abs(seen - load) <= CHANGED_CORES:
                return speed
        known = dict(sorted(dict(self._seen).items()))  # keeps the newest of equal loads
        loads, logs = np.array(list(known)), np.log(list(known.values()))
        # Beyond the heaviest known load, a core costs as much as below it.
        slope = min(0.0, (logs[-1] - logs[0]) / (loads[-1] - loads[0])) if len(loads) > 1 else 0.0
        return float(np.exp(np.interp(load, loads, logs) + slope * max(0.0, load - loads[-1])))

    def _say(self, canary: Trial) -> None:
        if abs(self.speed / self._reported - 1) > WORTH_SAYING:
            self._reported, name = self.speed, f"trial {canary.number}"
            if self.speed < 1:
                change = (
                    f"other work slows the machine down: {name} now runs at {100 * self.speed:.0f} % of its first speed"
                )
            else:
                change = f"the machine is less busy: {name} now runs {self.speed:.1f} times as fast as at first"
            self.listener.on_message(
                f"{change}; trials are compared as if all had run under the load at the start of the search"
            )


class History:
    """Summary of a run's trials. `update` processes only the trials that have changed.

    Args:
        trials: returns the run's trials, ordered by number. An unchanged trial is the same object.
    """

    def __init__(self, trials: Callable[[], Sequence[Trial]]) -> None:
        self._trials = trials
        self._known: list[Trial] = []
        self._skipped: set[int] = set()
        self._speeds: dict[int, float] = {}
        self._best: float | None = None
        self._probed: dict[int, Reference] = {}
        self._places: dict[int, int] = {}
        self.comparable: list[Trial] = []
        """Trials of the space, with their throughput in the conditions at the start of the search. A refined
        configuration is outside the space and not included.
        """

    def update(self) -> "History":
        """Reads the current trials and returns itself."""
        now = self._trials()
        # Compared in C: five thousand take a tenth of a millisecond.
        changed = list(compress(count(), map(is_not, now, self._known)))
        for place in [*changed, *range(len(self._known), len(now))]:
            self._take(now[place])
        self._known = list(now)
        return self

    @property
    def tried(self) -> int:
        """Number of trials of the space that were not skipped, including pending ones."""
        return len(self.comparable) - len(self._skipped)

    @property
    def best(self) -> float | None:
        """Highest throughput in the conditions at the start of the search; None if no trial succeeded."""
        if self._best is None:
            self._best = max(self._speeds.values(), default=None)
        return self._best

    def reference(self, number: int) -> Reference | None:
        """Reference that trial `number` must reproduce: the first trial in the finest number format; None for that trial.

        Trial 0 is the default configuration, which applies no rewrites, so it is the reference until a trial in a
        finer format has run: on a GPU the default computes in bf16.
        """
        first = min(self._probed, key=lambda at: (self._probed[at].probe.roundoff, at), default=number)
        return None if first == number else self._probed[first]

    def _take(self, trial: Trial) -> None:
        number, measured = trial.number, trial.measurement
        compared = at_first_speed(trial)
        if self._speeds.pop(number, None) == self._best:
            self._best = None
        self._probed.pop(number, None)
        if measured is not None and measured.ok:
            speed = self._speeds[number] = compared.throughput
            if self._best is not None and speed > self._best:
                self._best = speed
            if measured.probe is not None:
                self._probed[number] = Reference(probe=measured.probe, config_id=trial.config.id)
        if trial.sampler == REFINEMENT:
            return
        if trial.skipped:
            self._skipped.add(number)
        if number in self._places:
            self.comparable[self._places[number]] = compared
        else:
            self._places[number] = len(self.comparable)
            self.comparable.append(compared)
