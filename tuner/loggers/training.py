"""Logging of a training to an experiment tracker."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...base.writing import write_atomic
from ...knobs.text import config_text
from ...results.trained import highest_step, step_before
from ..train.listener import TrainingStart, TrainListener
from .tracker import Tracker, finite, plain

METRICS = (
    "loss",
    "lr",
    "grad_norm",
    "samples_per_second",
    "tokens_per_second",
    "step_ms",
    "tflops_per_device",
    "mfu",
    "memory_mib",
    "seconds_left",
)
"""Numbers of a step that are logged, by their names in the log."""
RUNS = "trackers.json"
"""File in a training's folder with the run id of each tracker."""


class TrainLogger(Tracker, TrainListener):
    """Logs a training's steps to a tracker. A subclass defines `open`, `configured`, `log`, `log_event` and `close`.

    A resumed training continues its run in the tracker. Steps after the checkpoint are trained again: if the tracker
    can remove them (`purges`), they are logged again, otherwise not.
    """

    purges = False
    """True if `back` can remove entries after a step."""

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        super().__init__(folder, say)
        self._step = 0
        self._has = 0
        self.ended: str = ""
        """How the training ended: `finished` or `stopped`; empty while it runs, or if its ranks were lost."""

    def open(self, training: TrainingStart, before: str | None) -> None:
        """Starts a run, or continues the tracker's run `before`. A new run's id is saved by `keep`."""
        raise NotImplementedError

    def configured(self, training: TrainingStart) -> None:
        """Logs the configuration that the training continues in, from this step."""
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs numbers of a step."""
        raise NotImplementedError

    def log_event(self, step: int, text: str) -> None:
        """Logs an event in words."""
        raise NotImplementedError

    def back(self, step: int) -> None:
        """Removes entries after a step, because the training continues from there."""

    def on_start(self, training: TrainingStart) -> None:
        if self._state == "new":
            before = _runs(self.folder).get(self.name)
            self._step = training.step
            self._has = highest_step(self.folder) if before and not self.purges else 0
            self._guarded("open", training, before)
        self._guarded("configured", training)

    def on_line(self, line: Mapping[str, Any]) -> None:
        kind, step = line.get("kind"), int(line.get("step") or self._step)
        again = step_before(line, self._step)
        if again is not None:
            self._has = max(self._has, self._step)
            self._guarded("back", again)
        if kind in ("step", "evaluation", "resumed"):
            self._step = step
        metrics = metrics_of(line)
        if metrics and (self.purges or step > self._has or kind == "checkpoint"):
            self._guarded("log", step, metrics)
        if kind == "checkpoint" and line.get("failure"):
            self._guarded("log_event", step, f"the checkpoint of step {step} was not saved: {line['failure']}")
        elif kind == "note":
            self._guarded("log_event", step, str(line.get("text", "")))
        elif kind == "end":
            self.ended = "stopped" if line.get("stopped") else "finished"

    def on_message(self, message: str) -> None:
        self._guarded("log_event", self._step, message)

    def keep(self, run: str) -> None:
        """Saves the tracker's run id, for a resumed training."""
        text = json.dumps({**_runs(self.folder), self.name: run}, indent=2) + "\n"
        write_atomic(self.folder / RUNS, text.encode())


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers of a line of the log, by their names in all trackers."""
    kind = line.get("kind")
    if kind == "step":
        found = {f"train/{name}": line.get(name) for name in METRICS}
    elif kind == "evaluation":
        found = {"held_out/loss": line.get("loss")}
    elif kind == "checkpoint":
        found = {f"checkpoint/{name}": line.get(name) for name in ("seconds", "stalled")}
    else:
        return {}
    return finite(found)


def knobs_of(training: TrainingStart) -> dict[str, bool | int | float | str]:
    """The configuration and the number of ranks, with values of types that every tracker supports."""
    return {"devices": training.strategy.devices, **_given(training.strategy.config)}


def hyperparameters_of(training: TrainingStart) -> dict[str, bool | int | float | str]:
    """Hyperparameters, with values of types that every tracker supports, without those left at None."""
    return _given(training.hyperparameters)


def _given(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    return plain({name: value for name, value in values.items() if value is not None})


def in_words(training: TrainingStart) -> str:
    """The configuration in a line."""
    return f"from step {training.step}: {config_text(knobs_of(training))} ({training.strategy.why})"


def _runs(folder: Path) -> dict[str, str]:
    """Run id by tracker; empty if the file is missing or unreadable."""
    try:
        found = json.loads((folder / RUNS).read_bytes())
    except (OSError, ValueError):
        return {}
    return {name: run for name, run in found.items() if isinstance(run, str)} if isinstance(found, dict) else {}
