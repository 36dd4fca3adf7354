"""Experiment trackers: their interface, and logging of a search's trials."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...results import Trial, summary
from ...results.columns import fold
from ..listener import SearchListener, SearchPlan
from ..result import Result


class Tracker:
    """Common part of the trackers of searches and trainings. A subclass defines `open` and further steps.

    A tracker that fails is reported once and not used again: it must not end the search or training.

    Raises:
        MissingDependency: the tracker's package is not installed.
    """

    name = ""
    """Name for `--log-to`."""
    failures: tuple[type[BaseException], ...] = (OSError,)
    """Exceptions that the tracker may raise."""

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        self.folder = folder
        self._say = say or (lambda message: None)
        self._state = "new"

    def close(self) -> None:
        """Ends the run."""

    def finish(self) -> None:
        """Closes the tracker if it was opened; may be called twice."""
        self._guarded("close")
        self._state = "closed"

    def _guarded(self, step: str, *given: Any) -> None:
        if self._state in ("failed", "closed") or (self._state == "new" and step != "open"):
            return
        try:
            getattr(self, step)(*given)
            self._state = "open"
        except self.failures as error:
            self._state = "failed"
            self._say(f"logging to {self.name} has stopped, because it failed: {fold(str(error))[:300]}")


METRICS = (
    "throughput",
    "step_ms",
    "step_ms_spread",
    "peak_memory_mib",
    "tflops_per_device",
    "mfu",
    "loss",
    "seconds_total",
    "predicted_throughput",
    "predicted_memory_mib",
)
"""Numbers of a trial that are logged, by column name."""


class TrialLogger(Tracker, SearchListener):
    """Logs each trial to a tracker. A subclass defines `open`, `log`, `summarise` and `close`."""

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        super().__init__(folder, say)
        self._best: float | None = None

    def open(self, plan: SearchPlan) -> None:
        """Starts the run of a search."""
        raise NotImplementedError

    def log(self, trial: Trial, metrics: Mapping[str, float], best: float | None) -> None:
        """Logs a finished trial. `best` is the highest throughput so far."""
        raise NotImplementedError

    def summarise(self, result: Result) -> None:
        """Logs the result of the search."""

    def on_start(self, plan: SearchPlan) -> None:
        self._best = max((trial.throughput for trial in plan.earlier if trial.ok), default=None)
        self._guarded("open", plan)

    def on_trial_end(self, trial: Trial) -> None:
        if trial.ok and (self._best is None or trial.throughput > self._best):
            self._best = trial.throughput
        self._guarded("log", trial, metrics_of(trial), self._best)

    def on_end(self, result: Result) -> None:
        self._guarded("summarise", result)


def metrics_of(trial: Trial) -> dict[str, float]:
    """Finite numbers of a finished trial, by name."""
    measured = trial.measurement
    own = {
        "predicted_throughput": trial.predicted_throughput,
        "predicted_memory_mib": trial.predicted_memory_mib,
    }
    found = {name: own[name] if name in own else getattr(measured, name) for name in METRICS}
    return finite(found)


def finite(found: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among these."""
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(float(value))}


def plain(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Values of types that every tracker supports."""
    types = (bool, int, float, str)
    return {name: each if isinstance(each, types) else str(each) for name, each in values.items()}


def headline_of(result: Result) -> dict[str, float]:
    """Numbers of the result: throughput of the winner and of the default, their ratio, and trials per status."""
    found = {
        "best_throughput": result.best.throughput if result.best else None,
        "default_throughput": result.default.throughput if result.default else None,
        "gain": result.gain,
    }
    found |= {f"trials_{status}": count for status, count in summary.counts(result.all_trials).items()}
    return {name: float(value) for name, value in found.items() if value is not None}
