"""The trials of a run, and whether the machine still runs as fast as when the search began."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, count
from operator import is_not

import numpy as np

from ..results import Measurement, Status, Trial
from ..runners import Reference
from ..runners.load import CHANGED_CORES
from .listener import SearchListener

WORTH_SAYING = 0.1
"""Share by which the default configuration's speed must differ from the last one told."""


def at_first_speed(trial: Trial) -> Trial:
    """The trial with the throughput it would have had in the conditions in which the search began."""
    measured = trial.measurement
    if measured is None or not measured.ok or not measured.machine_speed:
        return trial
    return replace(trial, measurement=replace(measured, throughput=measured.reached / measured.machine_speed))


def unsteady(trials: Sequence[Trial]) -> bool:
    """Whether what others took of the machine was not the same for all of these."""
    loads = [trial.measured.foreign_cores for trial in trials]
    known = [each for each in loads if each is not None]
    return bool(known) and max(known) - min(known) > CHANGED_CORES


@dataclass
class Conditions:
    """Compares what others take of the machine now with what they took when the default configuration, the canary, was
    last measured; where that has changed, measures it again."""

    measure: Callable[[Trial], Measurement]
    """A trial's configuration measured anew, to the end."""
    listener: SearchListener
    """Hears when the machine has become slower or faster."""
    speed: float = 1.0
    """How fast the canary ran last over how fast it ran at first."""
    _seen: list[tuple[float, float]] = field(default_factory=list)
    """Others' load and the canary's speed, of every time that it was measured; the last is the newest."""
    _told: float = 1.0

    def judge(self, trials: Sequence[Trial], measured: Measurement) -> Measurement:
        """A new outcome with the machine's speed at its time.

        Args:
            trials: those that are finished.
            measured: what has just been measured.
        """
        canary = next((trial for trial in trials if trial.ok), None)
        if canary is None:
            self._seen = [] if measured.foreign_cores is None else [(measured.foreign_cores, 1.0)]
            return measured
        load = measured.foreign_cores
        if load is None or not self._seen:
            return measured
        if abs(load - self._seen[-1][0]) > CHANGED_CORES:
            again = self.measure(canary)
            if again.ok and again.foreign_cores is not None:
                self.speed = again.reached / (canary.first or canary.throughput)
                self._seen.append((again.foreign_cores, self.speed))
                self._say(canary)
        speed = self._at(load)
        return measured if speed == 1.0 else replace(measured, machine_speed=speed)

    def _at(self, load: float) -> float:
        """How fast the canary would have run under a load: the load may have gone before it ran again."""
        for seen, speed in reversed(self._seen):
            if abs(seen - load) <= CHANGED_CORES:
                return speed
        known = dict(sorted(dict(self._seen).items()))  # the newest of equal loads
        loads, logs = np.array(list(known)), np.log(list(known.values()))
        # Beyond the heaviest a core costs what it did before.
        slope = min(0.0, (logs[-1] - logs[0]) / (loads[-1] - loads[0])) if len(loads) > 1 else 0.0
        return float(np.exp(np.interp(load, loads, logs) + slope * max(0.0, load - loads[-1])))

    def _say(self, canary: Trial) -> None:
        if abs(self.speed / self._told - 1) > WORTH_SAYING:
            self._told = self.speed
            slower = "other work slows the machine down: " if self.speed < 1 else ""
            self.listener.on_message(
                f"{slower}trial {canary.number} now runs at {100 * self.speed:.0f} % of its first speed; trials are "
                "compared as if all had run at that"
            )


REFINEMENT = "layerwise"
"""Who proposed the trial that refines the winner, in place of a sampler."""


class History:
    """What follows from a run's trials, brought up to date by those alone that have changed.

    Args:
        trials: the run's trials in the order of their numbers. One that has not changed is the same object.
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
        """The trials of the space, at the throughput they would have had when the search began. A refined
        configuration is beyond the space, so it says nothing to who proposes from it."""

    def update(self) -> "History":
        """This, as the trials are now."""
        now = self._trials()
        # Compared in C: five thousand take a tenth of a millisecond.
        changed = list(compress(count(), map(is_not, now, self._known)))
        for place in [*changed, *range(len(self._known), len(now))]:
            self._take(now[place])
        self._known = list(now)
        return self

    @property
    def tried(self) -> int:
        """Trials of the space that were not skipped, pending ones too."""
        return len(self.comparable) - len(self._skipped)

    @property
    def best(self) -> float | None:
        """The highest throughput, as it would have been when the search began; None where nothing worked."""
        if self._best is None:
            self._best = max(self._speeds.values(), default=None)
        return self._best

    def reference(self, number: int) -> Reference | None:
        """What trial `number` must reproduce: the first that ran in the finest number format, other than itself.

        Trial 0 is the default configuration, which applies nothing, so it sets it where it runs until one in a finer
        format has run: on a GPU the default computes in bf16.
        """
        others = {at: each for at, each in self._probed.items() if at != number}
        if not others:
            return None
        return others[min(others, key=lambda at: (others[at].probe.roundoff, at))]

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
        if measured is not None and measured.status is Status.SKIPPED:
            self._skipped.add(number)
        if number in self._places:
            self.comparable[self._places[number]] = compared
        else:
            self._places[number] = len(self.comparable)
            self.comparable.append(compared)
