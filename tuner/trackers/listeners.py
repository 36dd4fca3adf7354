"""The interface of trackers, and the listeners that log to them: of a search, and what it shares with that of a training."""

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

from ...base.errors import MissingDependency
from ...base.option import option
from ...results import Trial, summary
from ...results.columns import fold
from ..listener import SearchPlan
from ..result import Result

Plain = bool | int | float | str
"""Types of values that every tracker supports."""
Ended = Literal["finished", "stopped", "failed"]


class Tracker:
    """One run of a tracker. A subclass defines all methods; their errors in `failures` end only the logging.

    Args:
        folder: folder of the search or training.

    Raises:
        MissingDependency: the tracker's package is not installed.
    """

    name: ClassVar[str]
    """Name for `--log-to`."""
    package: ClassVar[str]
    """Package that pip installs."""
    failures: tuple[type[BaseException], ...] = (OSError,)
    """Exceptions of its package for a full disk, a lost server and the like."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            import_module(self.name)
        except ImportError as error:
            raise MissingDependency(f"{option('log_to')} {self.name} needs it: pip install {self.package}") from error

    def start(self, title: str, settings: Mapping[str, Plain], runs: Mapping[str, str]) -> str:
        """Starts a run and returns its id; continues the run of this tracker in `runs`, ids by tracker, if there is one."""
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs numbers of a training's step, or of a search's trial with this number."""
        raise NotImplementedError

    def event(self, step: int, description: str) -> None:
        """Logs the description of an event, such as another configuration."""
        raise NotImplementedError

    def trial(self, number: int, config: Mapping[str, Plain], metrics: Mapping[str, float], outcome: str) -> None:
        """Logs a trial of a search by its configuration, in addition to `log`.

        Args:
            outcome: status of the trial, and the reason if it failed.
        """
        raise NotImplementedError

    def end(self, ended: Ended, results: Mapping[str, Plain]) -> None:
        """Ends the run, with results such as the winner's throughput and knobs."""
        raise NotImplementedError


OF_TRIALS = (
    "throughput", "step_ms", "step_ms_spread", "peak_memory_mib", "tflops_per_device", "mfu", "loss", "seconds_total",
)  # fmt: skip
"""Numbers of a trial that are logged, by column name, beside its predictions."""


class Tracking:
    """Trackers of one run. One that fails is reported once and not used again: it must not end a search or training."""

    def __init__(self, trackers: Sequence[Tracker], listener: Any) -> None:
        self._listener = listener
        self._trackers = list(trackers)
        """Trackers that have not failed."""
        self._started = False

    def __getattr__(self, name: str) -> Any:
        """Forwards events that are not logged."""
        return getattr(self._listener, name)

    def _all(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Calls a method of every tracker, and returns the results of those that succeed."""
        results = {}
        for tracker in list(self._trackers):
            try:
                results[tracker.name] = getattr(tracker, method)(*arguments)
            except tracker.failures as error:
                self._trackers.remove(tracker)
                self._listener.on_message(
                    f"logging to {tracker.name} has stopped, because it failed: {fold(str(error))[:300]}"
                )
        return results

    def _start(self, title: str, settings: Mapping[str, Any], runs: Mapping[str, str]) -> dict[str, str]:
        """Starts a run of each tracker, or continues that of `runs`. Returns their ids."""
        self._started = True
        return self._all("start", title, without_missing(settings), runs)

    def _end(self, ended: Ended, results: Mapping[str, Plain]) -> None:
        if self._started:
            self._all("end", ended, results)
        self._trackers.clear()

    def close(self) -> None:
        """Ends the trackers without a result."""
        self._end("failed", {})


class SearchTracking(Tracking):
    """Logs each trial of a search, and its result. Forwards all events to `listener`."""

    def on_start(self, plan: SearchPlan) -> None:
        self._listener.on_start(plan)
        self._best = max((trial.throughput for trial in plan.earlier if trial.ok), default=0.0)
        self._start(plan.name, {"where": plan.where, "sampler": plan.sampler, "runner": plan.runner}, {})

    def on_trial_end(self, trial: Trial) -> None:
        self._listener.on_trial_end(trial)
        measured = trial.measured
        metrics = numbers_of_trial(trial)
        outcome = ": ".join(filter(None, [str(measured.status), fold(measured.reason)]))
        self._all("trial", trial.number, without_missing(trial.config), metrics, outcome)
        if trial.ok:
            self._best = max(self._best, trial.throughput)
        best = {"best_so_far": self._best} if self._best else {}
        self._all("log", trial.number, {f"trial/{name}": value for name, value in metrics.items()} | best)

    def on_end(self, result: Result) -> None:
        self._listener.on_end(result)
        results: dict[str, Any] = {
            "best_throughput": result.best.throughput if result.best else None,
            "default_throughput": result.default.throughput if result.default else None,
            "gain": result.gain,
            **{f"trials_{status}": count for status, count in summary.counts(result.all_trials).items()},
        }
        if result.best is not None:
            results |= {f"best.{name}": value for name, value in result.best.trial.config.items()}
        self._end("stopped" if result.interrupted else "finished", without_missing(results))


def without_missing(values: Mapping[str, Any]) -> dict[str, Plain]:
    """Returns the values that are there, as types that every tracker supports."""
    return {
        name: value if isinstance(value, Plain) else str(value) for name, value in values.items() if value is not None
    }


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers among the values."""
    return {
        name: float(value) for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def numbers_of_trial(trial: Trial) -> dict[str, float]:
    """Returns the finite numbers of a finished trial, by name."""
    predicted = ("predicted_throughput", "predicted_memory_mib")
    return finite(
        {name: getattr(trial if name in predicted else trial.measured, name) for name in (*OF_TRIALS, *predicted)}
    )
