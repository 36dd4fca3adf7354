"""TensorBoard: event files in the run's folder, with trials on the HParams page."""

from collections.abc import Mapping

from .listeners import Ended, Plain, Tracker

FOLDER = "tensorboard"
FLUSH_S = 5
"""Longest delay before numbers are written, s."""


class TensorBoard(Tracker):
    """Curves over steps or trials: `tensorboard --logdir FOLDER/tensorboard`."""

    name = package = "tensorboard"

    def start(self, title: str, settings: Mapping[str, Plain], runs: Mapping[str, str]) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder / FOLDER), flush_secs=FLUSH_S)
        if self.name not in runs:
            rows = [f"| {name} | {value} |" for name, value in settings.items()]
            self._writer.add_text(title, "\n".join(["| name | value |", "|---|---|", *rows]))
        return FOLDER

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def event(self, step: int, description: str) -> None:
        self._writer.add_text("events", description, step)

    def trial(self, number: int, config: Mapping[str, Plain], metrics: Mapping[str, float], outcome: str) -> None:
        self._writer.add_hparams(
            {**config, "outcome": outcome},
            {f"hparam/{name}": value for name, value in metrics.items()},
            run_name=f"trial-{number}",
            global_step=number,
        )

    def end(self, ended: Ended, results: Mapping[str, Plain]) -> None:
        for name, value in results.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"result/{name}", value)
        self._writer.close()


TRACKER = TensorBoard
