"""MLflow: a run for the search, a child run for each trial."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ...errors import MissingDependency
from ...results import Trial
from ...results.columns import fold
from ..listener import SearchPlan
from ..result import Result
from .logger import TrialLogger, headline_of, knobs_of

DATABASE = "mlflow.db"


class MLflowLogger(TrialLogger):
    """Writes to MLFLOW_TRACKING_URI, and without that to `RUN/mlflow.db`.

    Through a client of its own: the process's active run and experiment stay as they are.
    """

    name = "mlflow"

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        super().__init__(folder, say)
        try:
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise MissingDependency("--log-to mlflow needs MLflow: pip install mlflow-skinny") from error
        self.failures = (OSError, MlflowException)

    def open(self, plan: SearchPlan) -> None:
        from mlflow import MlflowClient

        local = f"sqlite:///{(self.folder / DATABASE).absolute()}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or local)
        name = f"redline {plan.name}"
        found = self._client.get_experiment_by_name(name)
        self._experiment = found.experiment_id if found else self._client.create_experiment(name)
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
        for knob, chosen in knobs_of(trial).items():
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
            for knob, chosen in knobs_of(result.best.trial).items():
                self._client.log_param(self._run, knob, chosen)

    def close(self) -> None:
        self._client.set_terminated(self._run)


LOGGER = MLflowLogger
