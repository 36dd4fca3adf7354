"""Events of a training, the configuration that it runs in, and the listener that logs to trackers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.writing import write_atomic
from ..knobs.text import config_text
from ..results import Measurement
from ..results.names import highest_step
from ..space import Config
from ..tuner.trackers import Ended, Tracking, finite


@dataclass(frozen=True, kw_only=True)
class TrainingStrategy:
    """A configuration of a training, and the reason for it."""

    config: Config
    devices: int
    why: str
    """Reason, in a sentence."""
    step: int = 0
    """Number of steps done before it."""

    def to_dict(self) -> dict[str, Any]:
        """Converts to the form of train.yaml."""
        return {
            "step": self.step,
            "devices": self.devices,
            "configuration": self.config.to_dict(),
            "why": self.why,
        }

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> "TrainingStrategy":
        """Converts back from `to_dict`."""
        return TrainingStrategy(
            step=document["step"],
            devices=document["devices"],
            config=Config(document["configuration"]),
            why=str(document.get("why", "")),
        )


def devices_text(devices: int) -> str:
    """Returns a number of devices as text."""
    return f"{devices} device{'s'[: devices > 1]}"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a training."""

    folder: Path
    step: int
    """Number of steps done."""
    stopped: bool
    """True if it was ended before the last step."""
    measurement: Measurement | None
    """Measurement of the last configuration; None if all steps were done before."""
    strategies: tuple[TrainingStrategy, ...]
    """All configurations of the training, in order."""
    predicted: float | None = None
    """Throughput of a dry run of the last configuration; None if there was none."""
    exports_to: str | None = None
    """Layout that `redline convert` writes without further options; None if no other tool has one."""


class TrainListener:
    """Receives the events of a training. Override any method; by default each does nothing."""

    def on_start(self, training: "TrainingStart") -> None:
        """Called when the training starts or continues."""

    def on_wait(self, stage: str) -> None:
        """Called before a slow preparation step, which `stage` describes."""

    def on_read(self, share: float) -> None:
        """Called now and then with the share of the data that is read, from 0 to 1."""

    def on_line(self, line: Mapping[str, Any]) -> None:
        """Called with each line of the log."""

    def on_message(self, message: str) -> None:
        """Called with a note or warning for the user."""


@dataclass(frozen=True, kw_only=True)
class TrainingStart:
    """A training as it starts or continues."""

    name: str
    folder: Path
    strategy: TrainingStrategy
    where: str
    """Description of the hardware."""
    data: Mapping[str, Any]
    steps: int
    """Number of steps in all."""
    step: int
    """Number of steps done."""
    unit: str
    """Unit that throughput counts."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)


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
