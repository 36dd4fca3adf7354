"""Weights & Biases: a run for the search, a step for each trial."""

from collections.abc import Callable, Mapping
from pathlib import Path

from ...errors import MissingDependency
from ...results import Trial
from ...results.columns import fold
from ..listener import SearchPlan
from ..result import Result
from .logger import TrialLogger, headline_of, knobs_of

PROJECT = "redline"


class WandbLogger(TrialLogger):
    """Writes below the run's folder and syncs as WANDB_MODE says (`offline` for later, by `wandb sync`)."""

    name = "wandb"

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        super().__init__(folder, say)
        try:
            import wandb
        except ImportError as error:
            raise MissingDependency("--log-to wandb needs Weights & Biases: pip install wandb") from error
        self.failures = (OSError, wandb.Error)

    def open(self, plan: SearchPlan) -> None:
        import wandb

        self._run = wandb.init(
            # An environment variable of the user's decides first.
            project=None if wandb.Settings().project not in (None, "", "uncategorized") else PROJECT,
            name=f"{plan.name} {self.folder.name}",
            dir=str(self.folder),
            config={"model": plan.name, "where": plan.where, "sampler": plan.sampler, "runner": plan.runner},
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("trial")
        self._run.define_metric("*", step_metric="trial")
        self._columns: list[str] = []
        self._rows: list[dict[str, object]] = []

    def log(self, trial: Trial, metrics: Mapping[str, float], best: float | None) -> None:
        row = {f"knob.{name}": value for name, value in knobs_of(trial).items()}
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
            self._run.summary.update({f"best.{k}": v for k, v in knobs_of(result.best.trial).items()})

    def close(self) -> None:
        self._run.finish()


LOGGER = WandbLogger
