"""MLflow: one run per training, or a run with child runs for a search and its trials."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ...base.errors import MissingDependency
from ...results import Trial
from ...results.columns import fold
from ..listener import SearchPlan
from ..result import Result
from ..train.listener import TrainingStart
from . import training as trained
from .tracker import Tracker, TrialLogger, headline_of, plain
from .training import TrainLogger

DATABASE = "mlflow.db"
_LONGEST = 500
"""Largest number of characters of a tag."""


class _MLflow(Tracker):
    """Writes to MLFLOW_TRACKING_URI, or to `mlflow.db` in the folder if it is not set.

    Uses its own client: the process's active run and experiment do not change.
    """

    name = "mlflow"

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        super().__init__(folder, say)
        try:
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise MissingDependency("--log-to mlflow needs MLflow: pip install mlflow-skinny") from error
        self.failures = (OSError, MlflowException)

    def _connect(self, model: str) -> None:
        """Creates the client, and finds or creates the experiment of the model."""
        from mlflow import MlflowClient

        local = f"sqlite:///{(self.folder / DATABASE).absolute()}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or local)
        name = f"redline {model}"
        found = self._client.get_experiment_by_name(name)
        self._experiment = found.experiment_id if found else self._client.create_experiment(name)


class MLflowLogger(_MLflow, TrialLogger):
    """Logs a search as a run, with a child run per trial."""

    def open(self, plan: SearchPlan) -> None:
        self._connect(plan.name)
        tags = {"redline.where": plan.where, "redline.sampler": plan.sampler, "redline.runner": plan.runner}
        self._run = self._client.create_run(self._experiment, run_name=self.folder.name, tags=tags).info.run_id

    def log(self, trial: Trial, metrics: Mapping[str, float], best: float | None) -> None:
        status = str(trial.measured.status)
        tags = {
            "mlflow.parentRunId": self._run,
            "redline.status": status,
            "redline.sampler": trial.sampler,
            "redline.reason": fold(trial.measured.reason)[:500],
        }
        run = self._client.create_run(self._experiment, run_name=f"trial {trial.number}", tags=tags).info.run_id
        for knob, chosen in plain(trial.config).items():
            self._client.log_param(run, knob, chosen)
        for name, value in metrics.items():
            self._client.log_metric(run, name, value)
            self._client.log_metric(self._run, name, value, step=trial.number)
        if best is not None:
            self._client.log_metric(self._run, "best_so_far", best, step=trial.number)
        self._client.set_terminated(run, "FINISHED" if trial.ok else "FAILED")

    def summarise(self, result: Result) -> None:
        for name, value in headline_of(result).items():
            self._client.log_metric(self._run, name, value)
        if result.best is not None:
            for knob, chosen in plain(result.best.trial.config).items():
                self._client.log_param(self._run, knob, chosen)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class MLflowTraining(_MLflow, TrainLogger):
    """Logs a training as one run, also if it is resumed or changes its configuration."""

    def open(self, training: TrainingStart, before: str | None) -> None:
        self._connect(training.name)
        if before is not None:
            self._run = before
            self._client.update_run(before, status="RUNNING")
            return
        tags = {"redline.where": training.where}
        self._run = self._client.create_run(self._experiment, run_name=self.folder.name, tags=tags).info.run_id
        self.keep(self._run)
        # The configuration may change and is a tag, because the value of a parameter cannot change.
        for name, value in trained.hyperparameters_of(training).items():
            self._client.log_param(self._run, name, value)

    def configured(self, training: TrainingStart) -> None:
        for name, value in trained.knobs_of(training).items():
            self._client.set_tag(self._run, f"redline.knob.{name}", value)
        self._client.set_tag(self._run, f"redline.configuration.{training.step}", trained.in_words(training)[:_LONGEST])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1e3)
        self._client.log_batch(self._run, [Metric(name, value, now, step) for name, value in metrics.items()])

    def log_event(self, step: int, text: str) -> None:
        self._client.set_tag(self._run, f"redline.event.{step}", fold(text)[:_LONGEST])

    def close(self) -> None:
        status = {"finished": "FINISHED", "stopped": "KILLED"}.get(self.ended, "FAILED")
        self._client.set_terminated(self._run, status)


LOGGER = MLflowLogger
TRAINING = MLflowTraining
