"""The listener of a training that logs to trackers."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.writing import write_atomic
from ..results.trained import highest_step
from ..tuner.trackers import open_trackers
from ..tuner.trackers.listeners import Tracking, finite, without_missing
from ..tuner.trackers.tracker import Ended
from .listener import TrainingStart, TrainListener

OF_STEPS = (
    "loss", "lr", "grad_norm", "samples_per_second", "tokens_per_second", "step_ms", "tflops_per_device", "mfu",
    "memory_mib", "seconds_left",
)  # fmt: skip
"""Numbers of a step that are logged, by their names in the log."""
RUNS = "trackers.json"
"""File in a training's folder with the run id of each tracker."""


@contextlib.contextmanager
def logging_training_to(
    names: str | Sequence[str] | None, folder: str | Path, listener: TrainListener
) -> Iterator[TrainListener]:
    """Yields a listener of a training, as `logging_to` does for a search."""
    trackers = open_trackers(names, folder)
    if not trackers:
        yield listener
        return
    with contextlib.closing(TrainTracking(trackers, listener)) as tracking:
        yield tracking


class TrainTracking(Tracking, TrainListener):
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
            settings = {"where": training.where, **without_missing(training.hyperparameters)}
            ids = self._start(training.name, settings, runs)
            if self._trackers:
                write_atomic(training.folder / RUNS, (json.dumps(runs | ids, indent=2) + "\n").encode())
        config = {"devices": training.strategy.devices, **without_missing(training.strategy.config)}
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


def numbers_of_line(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a line of a training's log, by their names in all trackers."""
    kinds = {
        "step": ("train", OF_STEPS),
        "evaluation": ("held_out", ("loss",)),
        "checkpoint": ("checkpoint", ("seconds", "stalled")),
    }
    section, names = kinds.get(str(line.get("kind")), ("", ()))
    return finite({f"{section}/{name}": line.get(name) for name in names})


def _runs(folder: Path) -> dict[str, str]:
    """Returns the run id of each tracker; empty if the file is missing or unreadable."""
    try:
        runs = json.loads((folder / RUNS).read_bytes())
    except (OSError, ValueError):
        return {}
    return {name: run for name, run in runs.items() if isinstance(run, str)} if isinstance(runs, dict) else {}
