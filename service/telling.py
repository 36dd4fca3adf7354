"""What a search tells the store while it runs, as events that pages and clients follow."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..results import Trial
from ..tuner.listener import SearchListener, SearchPlan
from .store import Store

if TYPE_CHECKING:
    from ..tuner import Result


class Telling(SearchListener):
    """Tells events of a search: `plan`, `started`, `finished`, `remeasuring`, `waiting`, `said`, `ended`.

    Args:
        store: where they are kept.
        search: whose they are.
    """

    def __init__(self, store: Store, search: str) -> None:
        self._store, self._search = store, search
        self.done = 0
        """Trials that are finished."""
        self.finished_one: Callable[[Trial], None] = lambda trial: None
        """Called with each trial that was finished."""
        self.trying = threading.Event()
        """Set with the first trial."""

    def began(self, plan: SearchPlan) -> None:
        self.done = plan.done
        self._tell(
            "plan",
            name=plan.name,
            where=plan.where,
            valid=plan.valid,
            trials=plan.trials,
            seconds=plan.seconds,
            done=plan.done,
            sampler=plan.sampler,
        )

    def waiting(self, what: str) -> None:
        self._tell("waiting", what=what)

    def started(self, trial: Trial) -> None:
        self.trying.set()
        self._tell(
            "started",
            trial=trial.number,
            config=trial.config.to_dict(),
            sampler=trial.sampler,
            predicted_throughput=_finite(trial.predicted_throughput),
            predicted_memory_mib=_finite(trial.predicted_memory_mib),
        )

    def finished(self, trial: Trial) -> None:
        self.done += 1
        measured = trial.measured
        told = {
            "trial": trial.number,
            "config": trial.config.to_dict(),
            "status": str(measured.status),
            "reason": measured.reason,
            "throughput": _finite(measured.throughput),
            "unit": measured.unit,
            "peak_memory_mib": _finite(measured.peak_memory_mib),
        }
        self._store.tell_trial(self._search, self.done, told)
        self.finished_one(trial)

    def remeasuring(self, leaders: list[Trial], done: int, total: int, seconds: float = 0.0) -> None:
        self._tell("remeasuring", leaders=[each.number for each in leaders], done=done, total=total)

    def said(self, message: str) -> None:
        self._tell("said", message=message)

    def ended(self, result: "Result") -> None:
        best = result.best
        self._tell("ended", why=result.ended, best=None if best is None else best.trial.number)

    def _tell(self, kind: str, **data: Any) -> None:
        self._store.tell(self._search, kind, data)


def _finite(value: float | None) -> float | None:
    """A number that JSON has a word for."""
    return value if value is None or abs(value) < float("inf") else None
