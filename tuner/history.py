"""Trials of this run and of earlier ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from operator import is_not
from pathlib import Path
from typing import Any

from ..base.errors import StudyError, UsageError
from ..results import Trial, View
from ..results.measurement import REFINEMENT
from ..runners import Reference
from ..space import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierRun:
    """A run to learn from."""

    name: str
    """Its folder, for messages."""
    trials: Sequence[Trial]
    """Its finished trials."""
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
        trials = [trial for trial in view.trials() if not trial.pending and trial.sampler != REFINEMENT]
        runs.append(EarlierRun(name=str(folder), trials=trials, asked=view.document["asked"]))
    return runs


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
        """Trials of the space. A refined configuration is outside the space and not included.
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
        """Highest throughput; None if no trial succeeded."""
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
        if self._speeds.pop(number, None) == self._best:
            self._best = None
        self._probed.pop(number, None)
        if measured is not None and measured.ok:
            speed = self._speeds[number] = trial.throughput
            if self._best is not None and speed > self._best:
                self._best = speed
            if measured.probe is not None:
                self._probed[number] = Reference(probe=measured.probe, config_id=trial.config.id)
        if trial.sampler == REFINEMENT:
            return
        if trial.skipped:
            self._skipped.add(number)
        if number in self._places:
            self.comparable[self._places[number]] = trial
        else:
            self._places[number] = len(self.comparable)
            self.comparable.append(trial)
