"""Experiment trackers that searches and trainings are logged to, and the listeners that feed them."""

import contextlib
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..base.errors import MissingDependency, UsageError, unknown
from ..base.option import option
from ..results import Trial, summary
from ..results.columns import fold
from .listener import SearchPlan
from .result import Result

Plain = bool | int | float | str
"""Types of values that every tracker supports."""
Ended = Literal["finished", "stopped", "failed"]


class Tracker:
    """One run of a tracker. A subclass defines all methods; their errors in `failures` end only the logging.

    Args:
        folder: folder of the search or training.

    Raises:
        MissingDependency: the tracker's package is not installed.
    """

    name: ClassVar[str]
    """Name for `--log-to`."""
    package: ClassVar[str]
    """Package that pip installs."""
    failures: tuple[type[BaseException], ...] = (OSError,)
    """Exceptions of its package for a full disk, a lost server and the like."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            import_module(self.name)
        except ImportError as error:
            raise MissingDependency(f"{option('log_to')} {self.name} needs it: pip install {self.package}") from error

    def start(self, title: str, settings: Mapping[str, Plain], runs: Mapping[str, str]) -> str:
        """Starts a run and returns its id; continues the run of this tracker in `runs`, ids by tracker, if there is one."""
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs numbers of a training's step, or of a search's trial with this number."""
        raise NotImplementedError

    def event(self, step: int, description: str) -> None:
        """Logs the description of an event, such as another configuration."""
        raise NotImplementedError

    def trial(self, number: int, config: Mapping[str, Plain], metrics: Mapping[str, float], outcome: str) -> None:
        """Logs a trial of a search by its configuration, in addition to `log`.

        Args:
            outcome: status of the trial, and the reason if it failed.
        """
        raise NotImplementedError

    def end(self, ended: Ended, results: Mapping[str, Plain]) -> None:
        """Ends the run, with results such as the winner's throughput and knobs."""
        raise NotImplementedError


MLFLOW_DATABASE = "mlflow.db"
LONGEST_TAG = 500
"""Largest number of characters of a tag, which MLflow limits."""
_MLFLOW_ENDINGS: Mapping[Ended, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


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

        local = f"sqlite:///{(self.folder / MLFLOW_DATABASE).absolute()}"
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
        self._client.set_tag(self._run, f"redline.event.{step}.{self._events}", fold(description)[:LONGEST_TAG])

    def trial(self, number: int, config: Mapping[str, Plain], metrics: Mapping[str, float], outcome: str) -> None:
        tags = {"mlflow.parentRunId": self._run, "redline.outcome": outcome[:LONGEST_TAG]}
        run = self._created(f"trial {number}", tags, config)
        self._log(run, 0, metrics)
        self._client.set_terminated(run, "FINISHED" if outcome == "ok" else "FAILED")

    def end(self, ended: Ended, results: Mapping[str, Plain]) -> None:
        for name, value in results.items():
            if isinstance(value, int | float) and not name.startswith("best."):
                self._client.log_metric(self._run, name, value)
            else:
                self._client.log_param(self._run, name, value)
        self._client.set_terminated(self._run, _MLFLOW_ENDINGS[ended])


TENSORBOARD_FOLDER = "tensorboard"
FLUSH_S = 5
"""Longest delay before numbers are written, s."""


class TensorBoard(Tracker):
    """Curves over steps or trials: `tensorboard --logdir FOLDER/tensorboard`."""

    name = package = "tensorboard"

    def start(self, title: str, settings: Mapping[str, Plain], runs: Mapping[str, str]) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder / TENSORBOARD_FOLDER), flush_secs=FLUSH_S)
        if self.name not in runs:
            rows = [f"| {name} | {value} |" for name, value in settings.items()]
            self._writer.add_text(title, "\n".join(["| name | value |", "|---|---|", *rows]))
        return TENSORBOARD_FOLDER

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


WANDB_PROJECT = "redline"


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
            project=None if wandb.Settings().project not in (None, "", "uncategorized") else WANDB_PROJECT,
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


OF_TRIALS = (
    "throughput", "step_ms", "step_ms_spread", "peak_memory_mib", "tflops_per_device", "mfu", "loss", "seconds_total",
)  # fmt: skip
"""Numbers of a trial that are logged, by column name, beside its predictions."""


class Tracking:
    """Trackers of one run. One that fails is reported once and not used again: it must not end a search or training."""

    def __init__(self, trackers: Sequence[Tracker], listener: Any) -> None:
        self._listener = listener
        self._trackers = list(trackers)
        """Trackers that have not failed."""
        self._started = False

    def __getattr__(self, name: str) -> Any:
        """Forwards events that are not logged."""
        return getattr(self._listener, name)

    def _all(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Calls a method of every tracker, and returns the results of those that succeed."""
        results = {}
        for tracker in list(self._trackers):
            try:
                results[tracker.name] = getattr(tracker, method)(*arguments)
            except tracker.failures as error:
                self._trackers.remove(tracker)
                self._listener.on_message(
                    f"logging to {tracker.name} has stopped, because it failed: {fold(str(error))[:300]}"
                )
        return results

    def _start(self, title: str, settings: Mapping[str, Any], runs: Mapping[str, str]) -> dict[str, str]:
        """Starts a run of each tracker, or continues that of `runs`. Returns their ids."""
        self._started = True
        return self._all("start", title, without_missing(settings), runs)

    def _end(self, ended: Ended, results: Mapping[str, Plain]) -> None:
        if self._started:
            self._all("end", ended, results)
        self._trackers.clear()

    def close(self) -> None:
        """Ends the trackers without a result."""
        self._end("failed", {})


class SearchTracking(Tracking):
    """Logs each trial of a search, and its result. Forwards all events to `listener`."""

    def on_start(self, plan: SearchPlan) -> None:
        self._listener.on_start(plan)
        self._best = max((trial.throughput for trial in plan.earlier if trial.ok), default=0.0)
        self._start(plan.name, {"where": plan.where, "sampler": plan.sampler, "runner": plan.runner}, {})

    def on_trial_end(self, trial: Trial) -> None:
        self._listener.on_trial_end(trial)
        measured = trial.measured
        metrics = numbers_of_trial(trial)
        outcome = ": ".join(filter(None, [str(measured.status), fold(measured.reason)]))
        self._all("trial", trial.number, without_missing(trial.config), metrics, outcome)
        if trial.ok:
            self._best = max(self._best, trial.throughput)
        best = {"best_so_far": self._best} if self._best else {}
        self._all("log", trial.number, {f"trial/{name}": value for name, value in metrics.items()} | best)

    def on_end(self, result: Result) -> None:
        self._listener.on_end(result)
        results: dict[str, Any] = {
            "best_throughput": result.best.throughput if result.best else None,
            "default_throughput": result.default.throughput if result.default else None,
            "gain": result.gain,
            **{f"trials_{status}": count for status, count in summary.counts(result.all_trials).items()},
        }
        if result.best is not None:
            results |= {f"best.{name}": value for name, value in result.best.trial.config.items()}
        self._end("stopped" if result.interrupted else "finished", without_missing(results))


def without_missing(values: Mapping[str, Any]) -> dict[str, Plain]:
    """Returns the values that are there, as types that every tracker supports."""
    return {
        name: value if isinstance(value, Plain) else str(value) for name, value in values.items() if value is not None
    }


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers among the values."""
    return {
        name: float(value) for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def numbers_of_trial(trial: Trial) -> dict[str, float]:
    """Returns the finite numbers of a finished trial, by name."""
    predicted = ("predicted_throughput", "predicted_memory_mib")
    return finite(
        {name: getattr(trial if name in predicted else trial.measured, name) for name in (*OF_TRIALS, *predicted)}
    )


TRACKERS: Mapping[str, type[Tracker]] = {tracker.name: tracker for tracker in (MLflow, TensorBoard, Wandb)}
"""Trackers by the names that `--log-to` accepts."""


def check_trackers(names: str | Sequence[str] | None, folder: str | Path | None) -> tuple[str, ...]:
    """Returns the named trackers, each once.

    Raises:
        UsageError: a tracker is unknown, or the folder is missing.
    """
    chosen = tuple(dict.fromkeys([names] if isinstance(names, str) else names or ()))
    for name in chosen:
        if name not in TRACKERS:
            raise UsageError(unknown("tracker", name, TRACKERS))
    if chosen and folder is None:
        raise UsageError(f"logging to {chosen[0]} needs a folder for the run; give out=...")
    return chosen


@contextlib.contextmanager
def logging_to(
    names: str | Sequence[str] | None,
    folder: str | Path | None,
    listener: Any,
    tracking: Callable[..., Tracking] = SearchTracking,
) -> Iterator[Any]:
    """Yields a listener that forwards to `listener` and to the named trackers, which are closed at the end.

    Args:
        tracking: makes the listener, of a search or a training, from the trackers and `listener`.

    Raises:
        UsageError: a tracker is unknown, or the folder is missing.
        MissingDependency: a tracker's package is not installed.
    """
    chosen = check_trackers(names, folder)
    if not chosen:
        yield listener
        return
    trackers = [TRACKERS[name](Path(str(folder))) for name in chosen]
    with contextlib.closing(tracking(trackers, listener)) as forwarding:
        yield forwarding
