"""The listener of a training that logs to trackers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.writing import write_atomic
from ..knobs.text import config_text
from ..results.trained import highest_step
from ..tuner.trackers.listeners import Ended, Tracking, finite
from .listener import TrainingStart, devices_text

SECTIONS = {"step": "train", "evaluation": "held_out", "checkpoint": "checkpoint"}
"""Group of the numbers of each kind of line in all trackers."""
RUNS = "trackers.json"
"""File in a training's folder with the run id of each tracker."""


class TrainTracking(Tracking):
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
            knobs = {f"knob.{name}": value for name, value in training.strategy.config.items()}
            settings = {"where": training.where, **training.hyperparameters, **knobs}
            ids = self._start(training.name, settings, runs)
            if self._trackers:
                write_atomic(training.folder / RUNS, (json.dumps(runs | ids, indent=2) + "\n").encode())
        strategy = training.strategy
        self._all(
            "event", training.step, f"{devices_text(strategy.devices)}: {config_text(strategy.config)} ({strategy.why})"
        )

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

    def close(self) -> None:
        """Ends the trackers."""
        self._end(self._ended if self._started else "failed", {})


def numbers_of_line(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a line of a training's log, by their names in all trackers."""
    section = SECTIONS.get(str(line.get("kind")))
    numbers = {f"{section}/{name}": value for name, value in line.items() if name not in ("step", "time")}
    return {} if section is None else finite(numbers)


def _runs(folder: Path) -> dict[str, str]:
    """Returns the run id of each tracker; empty if the file is missing or unreadable."""
    try:
        runs = json.loads((folder / RUNS).read_bytes())
    except (OSError, ValueError):
        return {}
    return {name: run for name, run in runs.items() if isinstance(run, str)} if isinstance(runs, dict) else {}
