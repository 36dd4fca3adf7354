"""MLflow: one run per training, or a run with a child run per trial of a search."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from ...results.columns import fold
from .listeners import Ended, Plain, Tracker

DATABASE = "mlflow.db"
LONGEST = 500
"""Largest number of characters of a tag, which MLflow limits."""
_ENDED: Mapping[Ended, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow(Tracker):
    """Writes to MLFLOW_TRACKING_URI, or to `mlflow.db` in the folder if it is not set.

    Uses a client of its own: the process's active run and experiment do not change.
    """

    name, package = "mlflow", "mlflow-skinny"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from mlflow.exceptions import MlflowException

        self.failures = (OSError, MlflowException)

    def start(self, title: str, settings: Mapping[str, Plain], runs: Mapping[str, str]) -> str:
        from mlflow import MlflowClient

        local = f"sqlite:///{(self.folder / DATABASE).absolute()}"
        self._client, self._events = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or local), 0
        name = f"redline {title}"
        experiment = self._client.get_experiment_by_name(name)
        self._experiment = experiment.experiment_id if experiment else self._client.create_experiment(name)
        if self.name in runs:
            self._run = runs[self.name]
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = self._created(self.folder.name, {}, settings)
        return self._run

    def _created(self, name: str, tags: Mapping[str, str], parameters: Mapping[str, Plain]) -> str:
        run: str = self._client.create_run(self._experiment, run_name=name, tags=dict(tags)).info.run_id
        for parameter, value in parameters.items():
            self._client.log_param(run, parameter, value)
        return run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(self._run, step, metrics)

    def _log(self, run: str, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1e3)
        self._client.log_batch(run, [Metric(name, value, now, step) for name, value in metrics.items()])

    def event(self, step: int, description: str) -> None:
        self._events += 1  # several events of a step are tags of their own
        self._client.set_tag(self._run, f"redline.event.{step}.{self._events}", fold(description)[:LONGEST])

    def trial(self, number: int, config: Mapping[str, Plain], metrics: Mapping[str, float], outcome: str) -> None:
        tags = {"mlflow.parentRunId": self._run, "redline.outcome": outcome[:LONGEST]}
        run = self._created(f"trial {number}", tags, config)
        self._log(run, 0, metrics)
        self._client.set_terminated(run, "FINISHED" if outcome == "ok" else "FAILED")

    def end(self, ended: Ended, results: Mapping[str, Plain]) -> None:
        for name, value in results.items():
            if isinstance(value, int | float) and not name.startswith("best."):
                self._client.log_metric(self._run, name, value)
            else:
                self._client.log_param(self._run, name, value)
        self._client.set_terminated(self._run, _ENDED[ended])


TRACKER = MLflow
