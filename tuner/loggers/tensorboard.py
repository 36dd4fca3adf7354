"""TensorBoard: event files in the run's folder, with its HParams page."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...base.errors import MissingDependency
from ...results import Trial
from ..listener import SearchPlan
from ..result import Result
from ..train.listener import TrainingStart
from . import training as trained
from .tracker import Tracker, TrialLogger, headline_of, plain
from .training import TrainLogger

FOLDER = "tensorboard"
FLUSH_S = 5
"""Longest delay before numbers of a training are written, s."""


class _TensorBoard(Tracker):
    name = "tensorboard"
    _writer: Any

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        super().__init__(folder, say)
        try:
            import tensorboard  # noqa: F401
        except ImportError as error:
            raise MissingDependency("--log-to tensorboard needs TensorBoard: pip install tensorboard") from error

    def close(self) -> None:
        self._writer.close()


class TensorBoardLogger(_TensorBoard, TrialLogger):
    """Logs each trial as a step and an entry of the HParams page: `tensorboard --logdir RUN/tensorboard`."""

    def open(self, plan: SearchPlan) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder / FOLDER))
        self._writer.add_text("search", f"{plan.name} on {plan.where}, sampler {plan.sampler}")

    def log(self, trial: Trial, metrics: Mapping[str, float], best: float | None) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"trial/{name}", value, trial.number)
        if best is not None:
            self._writer.add_scalar("best_so_far", best, trial.number)
        hparams = {**plain(trial.config), "status": str(trial.measured.status)}
        self._writer.add_hparams(
            hparams,
            {f"hparam/{name}": value for name, value in metrics.items()},
            run_name=f"trial-{trial.number}",
            global_step=trial.number,
        )
        self._writer.flush()

    def summarise(self, result: Result) -> None:
        for name, value in headline_of(result).items():
            self._writer.add_scalar(f"result/{name}", value, len(result.all_trials))


class TensorBoardTraining(_TensorBoard, TrainLogger):
    """Logs curves over steps: `tensorboard --logdir TRAINING/tensorboard`."""

    purges = True

    def open(self, training: TrainingStart, before: str | None) -> None:
        self._write(training.step if (self.folder / FOLDER).exists() else None)
        self._writer.add_text("training", f"{training.name} on {training.where}", training.step)
        rows = [f"| {name} | {value} |" for name, value in trained.hyperparameters_of(training).items()]
        self._writer.add_text("hyperparameters", "\n".join(["| name | value |", "|---|---|", *rows]), training.step)

    def configured(self, training: TrainingStart) -> None:
        self._writer.add_text("configuration", trained.in_words(training), training.step)
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_event(self, step: int, text: str) -> None:
        self._writer.add_text("events", text, step)

    def back(self, step: int) -> None:
        self._writer.close()
        self._write(step)

    def _write(self, step: int | None) -> None:
        """Opens the writer. Entries after `step` are purged; None purges nothing."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(self.folder / FOLDER), purge_step=None if step is None else step + 1, flush_secs=FLUSH_S
        )


LOGGER = TensorBoardLogger
TRAINING = TensorBoardTraining
