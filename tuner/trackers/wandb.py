"""Weights & Biases: one run per training, or per search with a step for each trial."""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...results.columns import fold
from .listeners import Ended, Plain, Tracker

PROJECT = "redline"


class Wandb(Tracker):
    """Writes below the folder and syncs according to WANDB_MODE (`offline` for later, by `wandb sync`)."""

    name = package = "wandb"
    _run: Any

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import wandb

        self.failures = (OSError, wandb.Error)

    def start(self, title: str, settings: Mapping[str, Plain], runs: Mapping[str, str]) -> str:
        import wandb

        run = runs.get(self.name) or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            # The user's environment variable has precedence.
            project=None if wandb.Settings().project not in (None, "", "uncategorized") else PROJECT,
            name=f"{title} {self.folder.name}",
            dir=str(self.folder),
            config=dict(settings),
            settings=wandb.Settings(silent=True, console="off"),
            id=run,
            resume="allow",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def event(self, step: int, description: str) -> None:
        self._run.log({"step": step, "event": fold(description)})

    def trial(self, number: int, config: Mapping[str, Plain], metrics: Mapping[str, float], outcome: str) -> None:
        self._run.log({"step": number, **{f"knob.{knob}": value for knob, value in config.items()}, "outcome": outcome})

    def end(self, ended: Ended, results: Mapping[str, Plain]) -> None:
        self._run.summary.update(dict(results))
        self._run.finish(exit_code=1 if ended == "failed" else 0)


TRACKER = Wandb
