"""Experiment trackers that searches and trainings can log to, one per file."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ...base.errors import UsageError, unknown
from ..listener import SearchListener
from ..train.listener import TrainListener
from .tracker import Tracker

_LOGGERS = ("mlflow", "tensorboard", "wandb")


def logger_names() -> tuple[str, ...]:
    """Names that `--log-to` accepts."""
    return _LOGGERS


def check_trackers(names: str | Sequence[str] | None, folder: str | Path | None) -> dict[str, Path]:
    """Returns the folder of each named tracker.

    Raises:
        UsageError: a tracker is unknown, or the folder is missing.
    """
    chosen = list(dict.fromkeys([names] if isinstance(names, str) else names or ()))
    for name in chosen:
        if name not in _LOGGERS:
            raise UsageError(unknown("tracker", name, _LOGGERS))
    if chosen and folder is None:
        raise UsageError(f"logging to {chosen[0]} needs a folder for the run; give out=...")
    return {} if folder is None else dict.fromkeys(chosen, Path(folder))


@contextlib.contextmanager
def logging_to(
    names: str | Sequence[str] | None, folder: str | Path | None, listener: SearchListener
) -> Iterator[SearchListener]:
    """Yields a listener that forwards to `listener` and to the named trackers, and closes the trackers at the end.

    Raises:
        UsageError: a tracker is unknown, or the folder is missing.
        MissingDependency: a tracker's package is not installed.
    """
    with _opened(names, folder, "LOGGER", listener.on_message) as trackers:
        yield forwarding(SearchListener, [listener, *trackers]) if trackers else listener


@contextlib.contextmanager
def logging_training_to(
    names: str | Sequence[str] | None, folder: str | Path, listener: TrainListener
) -> Iterator[TrainListener]:
    """Yields a listener of a training that forwards to `listener` and to the named trackers, and closes the trackers
    at the end.

    Raises:
        UsageError: a tracker is unknown.
        MissingDependency: a tracker's package is not installed.
    """
    with _opened(names, folder, "TRAINING", listener.on_message) as trackers:
        yield forwarding(TrainListener, [listener, *trackers]) if trackers else listener


@contextlib.contextmanager
def _opened(
    names: str | Sequence[str] | None, folder: str | Path | None, kind: str, say: Callable[[str], None]
) -> Iterator[list[Any]]:
    """Yields the named trackers. `kind` is the name of the tracker class in each module."""
    chosen = check_trackers(names, folder)
    trackers: list[Tracker] = [
        getattr(import_module(f".{name}", __package__), kind)(where, say) for name, where in chosen.items()
    ]
    try:
        yield trackers
    finally:
        for tracker in trackers:
            tracker.finish()


def forwarding(kind: type, listeners: Sequence[Any]) -> Any:
    """Returns a listener of the class `kind` that forwards each event to all `listeners`, in order."""

    def forward(name: str, *given: Any) -> None:
        for listener in listeners:
            getattr(listener, name)(*given)

    out = kind()
    for name in (each for each in vars(kind) if not each.startswith("_")):
        setattr(out, name, partial(forward, name))
    return out
