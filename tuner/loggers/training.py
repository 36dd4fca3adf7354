"""What a tracker must offer to have a training written to it, and what is written."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...base.writing import write_atomic
from ...results.trained import highest_step, step_before
from ..train.listener import TrainingStart, TrainListener
from .tracker import Tracker

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
"""The numbers of a step that are logged, by their names in the log."""
RUNS = "trackers.json"
"""In a training's folder: which run of a tracker it is, by the tracker's name."""


class TrainLogger(Tracker, TrainListener):
    """Writes a training to a tracker, by its steps. A subclass fills in `open`, `configured`, `log`, `told` and `close`.

    A training that is taken up again goes on in the run that it had there. Steps behind its checkpoint are done again: where a
    tracker can take them back (`purges`), they are, and elsewhere those that it has are not logged again.

    Args:
        folder: the training's folder.
        say: told what the user should know.
    """

    purges = False
    """Whether what was logged behind a step can be taken back, by `back`."""

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        super().__init__(folder, say)
        self._step = 0
        self._has = 0
        self.ended: str = ""
        """How the training ended: `finished` or `stopped`; empty while it runs, or where its ranks were lost."""

    def open(self, training: TrainingStart, before: str | None) -> None:
        """The training starts, or goes on in the tracker's run `before`; `keep` says which it is otherwise."""
        raise NotImplementedError

    def configured(self, training: TrainingStart) -> None:
        """It goes on in this configuration, from this step."""
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of a step."""
        raise NotImplementedError

    def told(self, step: int, text: str) -> None:
        """Something happened that is no number."""
        raise NotImplementedError

    def back(self, step: int) -> None:
        """The training goes on from an earlier step."""

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
            self._guarded("told", step, f"the checkpoint of step {step} was not saved: {line['failure']}")
        elif kind == "note":
            self._guarded("told", step, str(line.get("text", "")))
        elif kind == "end":
            self.ended = "stopped" if line.get("stopped") else "finished"

    def on_message(self, message: str) -> None:
        self._guarded("told", self._step, message)

    def keep(self, run: str) -> None:
        """Notes which of the tracker's runs this is, for whoever takes the training up again."""
        text = json.dumps({**_runs(self.folder), self.name: run}, indent=2) + "\n"
        write_atomic(self.folder / RUNS, text.encode())


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a line of the log, by the names that all trackers have them under."""
    kind = line.get("kind")
    if kind == "step":
        found = {f"train/{name}": line.get(name) for name in METRICS}
    elif kind == "evaluation":
        found = {"held_out/loss": line.get("loss")}
    elif kind == "checkpoint":
        found = {f"checkpoint/{name}": line.get(name) for name in ("seconds", "stalled")}
    else:
        return {}
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(float(value))}


def knobs_of(training: TrainingStart) -> dict[str, bool | int | float | str]:
    """The configuration and the number of ranks, as values that every tracker takes."""
    return {"devices": training.strategy.devices, **_plain(training.strategy.config)}


def hyperparameters_of(training: TrainingStart) -> dict[str, bool | int | float | str]:
    """How it learns, as values that every tracker takes; what is left to its default has none."""
    return _plain(training.hyperparameters)


def in_words(training: TrainingStart) -> str:
    """The configuration in a line."""
    knobs = " ".join(f"{name}={value}" for name, value in knobs_of(training).items())
    return f"from step {training.step}: {knobs} ({training.strategy.why})"


def _plain(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    plain = (bool, int, float, str)
    return {name: each if isinstance(each, plain) else str(each) for name, each in values.items() if each is not None}


def _runs(folder: Path) -> dict[str, str]:
    """Which run it is, by the tracker's name; nothing where that was never noted, or cannot be read any more."""
    try:
        found = json.loads((folder / RUNS).read_bytes())
    except (OSError, ValueError):
        return {}
    return {name: run for name, run in found.items() if isinstance(run, str)} if isinstance(found, dict) else {}
