"""Weights & Biases: one run per training, or per search with a step for each trial."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...base.errors import MissingDependency
from ...results import Trial
from ...results.columns import fold
from ..listener import SearchPlan
from ..result import Result
from ..train.listener import TrainingStart
from . import training as trained
from .tracker import Tracker, TrialLogger, headline_of, plain
from .training import TrainLogger

PROJECT = "redline"


class _Wandb(Tracker):
    """Writes below the folder and syncs according to WANDB_MODE (`offline` for later, by `wandb sync`)."""

    name = "wandb"
    _run: Any

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        super().__init__(folder, say)
        try:
            import wandb
        except ImportError as error:
            raise MissingDependency("--log-to wandb needs Weights & Biases: pip install wandb") from error
        self.failures = (OSError, wandb.Error)

    def _begin(self, title: str, config: Mapping[str, Any], **which: Any) -> Any:
        """Starts a run; `which` identifies an existing one."""
        import wandb

        return wandb.init(
            # The user's environment variable has precedence.
            project=None if wandb.Settings().project not in (None, "", "uncategorized") else PROJECT,
            name=f"{title} {self.folder.name}",
            dir=str(self.folder),
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off"),
            **which,
        )

    def close(self) -> None:
        self._run.finish()


class WandbLogger(_Wandb, TrialLogger):
    """Logs a search as a run, with a step per trial."""

    def open(self, plan: SearchPlan) -> None:
        config = {"model": plan.name, "where": plan.where, "sampler": plan.sampler, "runner": plan.runner}
        self._run = self._begin(plan.name, config)
        self._run.define_metric("trial")
        self._run.define_metric("*", step_metric="trial")
        self._rows: list[dict[str, object]] = []

    def log(self, trial: Trial, metrics: Mapping[str, float], best: float | None) -> None:
        row = {f"knob.{name}": value for name, value in plain(trial.config).items()}
        status = str(trial.measured.status)
        out = {"trial": trial.number, **metrics, **row, "status": status}
        if best is not None:
            out["best_so_far"] = best
        self._run.log(out)
        self._rows.append({**out, "reason": fold(trial.measured.reason)})

    def summarise(self, result: Result) -> None:
        import wandb

        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        cells = [[None if row.get(name) is None else str(row[name]) for name in columns] for row in self._rows]
        self._run.log({"trials": wandb.Table(columns=columns, data=cells)})
        self._run.summary.update(headline_of(result))
        if result.best is not None:
            self._run.summary.update({f"best.{k}": v for k, v in plain(result.best.trial.config).items()})


class WandbTraining(_Wandb, TrainLogger):
    """Logs a training as one run with its own id, which a resumed training continues."""

    def open(self, training: TrainingStart, before: str | None) -> None:
        import uuid

        run = before or uuid.uuid4().hex[:12]
        config = {"model": training.name, "where": training.where, **trained.hyperparameters_of(training)}
        self._run = self._begin(training.name, config, id=run, resume="allow")
        self.keep(run)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def configured(self, training: TrainingStart) -> None:
        knobs = {f"knob.{name}": value for name, value in trained.knobs_of(training).items()}
        self._run.config.update(knobs, allow_val_change=True)
        self._run.log({"step": training.step, **knobs, "event": trained.in_words(training)})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_event(self, step: int, text: str) -> None:
        self._run.log({"step": step, "event": fold(text)})

    def close(self) -> None:
        self._run.finish(exit_code=0 if self.ended else 1)


LOGGER = WandbLogger
TRAINING = WandbTraining
