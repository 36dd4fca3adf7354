"""Listeners of searches and trainings that log to trackers."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base.writing import write_atomic
from ...results import Trial, summary
from ...results.columns import fold
from ...results.trained import highest_step
from ..listener import SearchListener, SearchPlan
from ..result import Result
from ..train.listener import TrainingStart, TrainListener
from .tracker import Ended, Plain, Tracker

OF_TRIALS = (
    "throughput", "step_ms", "step_ms_spread", "peak_memory_mib", "tflops_per_device", "mfu", "loss", "seconds_total",
)  # fmt: skip
"""Numbers of a trial that are logged, by column name, beside its predictions."""
OF_STEPS = (
    "loss", "lr", "grad_norm", "samples_per_second", "tokens_per_second", "step_ms", "tflops_per_device", "mfu",
    "memory_mib", "seconds_left",
)  # fmt: skip
"""Numbers of a step that are logged, by their names in the log."""
RUNS = "trackers.json"
"""File in a training's folder with the run id of each tracker."""


class _Tracking:
    """Trackers of one run. One that fails is reported once and not used again: it must not end a search or training."""

    def __init__(self, trackers: Sequence[Tracker], listener: Any) -> None:
        self._listener = listener
        self._trackers = list(trackers)
        """Trackers that have not failed."""
        self._started = False

    def _all(self, method: str, *arguments: Any) -> None:
        """Calls a method of every tracker."""
        for tracker in list(self._trackers):
            self._one(tracker, method, *arguments)

    def _one(self, tracker: Tracker, method: str, *arguments: Any) -> Any:
        try:
            return getattr(tracker, method)(*arguments)
        except tracker.failures as error:
            self._trackers.remove(tracker)
            self._listener.on_message(
                f"logging to {tracker.name} has stopped, because it failed: {fold(str(error))[:300]}"
            )

    def _start(self, title: str, settings: Mapping[str, Plain], runs: Mapping[str, str]) -> dict[str, str]:
        """Starts a run of each tracker, or continues that of `runs`. Returns their ids."""
        self._started = True
        ids = {t.name: self._one(t, "start", title, settings, runs.get(t.name)) for t in list(self._trackers)}
        return {name: run for name, run in ids.items() if run is not None}

    def _end(self, ended: Ended, results: Mapping[str, Plain]) -> None:
        if self._started:
            self._all("end", ended, results)
        self._trackers.clear()


class SearchTracking(_Tracking, SearchListener):
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
        self._all("trial", trial.number, plain(trial.config), metrics, outcome)
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
        self._end("stopped" if result.interrupted else "finished", _without_missing(results))

    def on_wait(self, stage: str) -> None:
        self._listener.on_wait(stage)

    def on_trial_start(self, trial: Trial) -> None:
        self._listener.on_trial_start(trial)

    def pauses(self) -> bool:
        return bool(self._listener.pauses())

    def on_remeasure(self, leaders: list[Trial], done: int, total: int, seconds: float = 0.0) -> None:
        self._listener.on_remeasure(leaders, done, total, seconds)

    def on_alternate(self, leaders: list[Trial], seconds: float) -> None:
        self._listener.on_alternate(leaders, seconds)

    def on_message(self, message: str) -> None:
        self._listener.on_message(message)

    def close(self) -> None:
        """Ends the trackers of a search without a result."""
        self._end("failed", {})


class TrainTracking(_Tracking, TrainListener):
    """Logs the steps and events of a training. Forwards all events to `listener`.

    A resumed training continues its run in each tracker. Steps after the checkpoint are trained again, with the same
    results, and are not logged again.
    """

    def on_start(self, training: TrainingStart) -> None:
        self._listener.on_start(training)
        if not self._started:
            self._step = training.step
            self._ended: Ended = "failed"
            runs = _runs(training.folder)
            self._logged: dict[str, int] = {}
            """The last step logged, by kind of line."""
            self._before = highest_step(training.folder) if runs else 0
            settings = {"where": training.where, **_without_missing(training.hyperparameters)}
            ids = self._start(training.name, settings, runs)
            if self._trackers:
                write_atomic(training.folder / RUNS, (json.dumps(runs | ids, indent=2) + "\n").encode())
        config = {"devices": training.strategy.devices, **_without_missing(training.strategy.config)}
        self._all("configure", training.step, config, training.strategy.why)

    def on_line(self, line: Mapping[str, Any]) -> None:
        self._listener.on_line(line)
        kind, step = str(line.get("kind")), int(line.get("step") or self._step)
        if kind in ("step", "evaluation", "resumed"):
            self._step = step
        metrics = numbers_of_line(line)
        if metrics and step > self._logged.get(kind, self._before):
            self._logged[kind] = step
            self._all("log", step, metrics)
        if kind == "checkpoint" and line.get("failure"):
            self._all("event", step, f"the checkpoint of step {step} was not saved: {line['failure']}")
        elif kind == "note":
            self._all("event", step, str(line.get("text", "")))
        elif kind == "end":
            self._ended = "stopped" if line.get("stopped") else "finished"

    def on_message(self, message: str) -> None:
        self._listener.on_message(message)
        if self._started:
            self._all("event", self._step, message)

    def on_wait(self, stage: str) -> None:
        self._listener.on_wait(stage)

    def on_read(self, share: float) -> None:
        self._listener.on_read(share)

    def close(self) -> None:
        """Ends the trackers."""
        self._end(self._ended if self._started else "failed", {})


def plain(values: Mapping[str, Any]) -> dict[str, Plain]:
    """Returns the values as types that every tracker supports."""
    return {name: value if isinstance(value, Plain) else str(value) for name, value in values.items()}


def _without_missing(values: Mapping[str, Any]) -> dict[str, Plain]:
    return plain({name: value for name, value in values.items() if value is not None})


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: float(value) for name, value in values.items() if value is not None}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def numbers_of_trial(trial: Trial) -> dict[str, float]:
    """Returns the finite numbers of a finished trial, by name."""
    predicted = ("predicted_throughput", "predicted_memory_mib")
    return _finite(
        {
            **{name: getattr(trial.measured, name) for name in OF_TRIALS},
            **{name: getattr(trial, name) for name in predicted},
        }
    )


def numbers_of_line(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a line of a training's log, by their names in all trackers."""
    kinds = {
        "step": ("train", OF_STEPS),
        "evaluation": ("held_out", ("loss",)),
        "checkpoint": ("checkpoint", ("seconds", "stalled")),
    }
    section, names = kinds.get(str(line.get("kind")), ("", ()))
    return _finite({f"{section}/{name}": line.get(name) for name in names})


def _runs(folder: Path) -> dict[str, str]:
    """Returns the run id of each tracker; empty if the file is missing or unreadable."""
    try:
        runs = json.loads((folder / RUNS).read_bytes())
    except (OSError, ValueError):
        return {}
    return {name: run for name, run in runs.items() if isinstance(run, str)} if isinstance(runs, dict) else {}
