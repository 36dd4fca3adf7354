"""Whether the machine is as fast as it was when the search began: the default configuration tells."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..results import Measurement, Trial
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
            self.listener.said(
                f"{slower}trial {canary.number} now runs at {100 * self.speed:.0f} % of its first speed; trials are "
                "compared as if all had run at that"
            )
