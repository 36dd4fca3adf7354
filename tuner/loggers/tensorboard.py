"""TensorBoard: event files in the run's folder, with its HParams page."""

from collections.abc import Callable, Mapping
from pathlib import Path

from ...errors import MissingDependency
from ...results import Trial
from ..listener import SearchPlan
from ..result import Result
from .logger import TrialLogger, headline_of, knobs_of

FOLDER = "tensorboard"


class TensorBoardLogger(TrialLogger):
    """One step a trial, and one entry of the HParams page: `tensorboard --logdir RUN/tensorboard`."""

    name = "tensorboard"

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        super().__init__(folder, say)
        try:
            import tensorboard  # noqa: F401
        except ImportError as error:
            raise MissingDependency("--log-to tensorboard needs TensorBoard: pip install tensorboard") from error

    def open(self, plan: SearchPlan) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder / FOLDER))
        self._writer.add_text("search", f"{plan.name} on {plan.where}, sampler {plan.sampler}")

    def log(self, trial: Trial, metrics: Mapping[str, float], best: float | None) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"trial/{name}", value, trial.number)
        if best is not None:
            self._writer.add_scalar("best_so_far", best, trial.number)
        hparams = {**knobs_of(trial), "status": str(trial.measured.status)}
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

    def close(self) -> None:
        self._writer.close()


LOGGER = TensorBoardLogger
