"""The trials of a run as a search asks for them before each of its trials, however many they become."""

from collections.abc import Callable, Sequence
from itertools import compress, count
from operator import is_not

from ..results import Status, Trial
from ..runners import Reference
from .conditions import at_first_speed

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
