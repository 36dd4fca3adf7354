"""Experiment trackers that searches and trainings can log to, one per file."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
        yield Listeners([listener, *trackers]) if trackers else listener


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
        yield TrainListeners([listener, *trackers]) if trackers else listener


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


class Listeners(SearchListener):
    """Forwards events of a search to several listeners, in order."""

    def __init__(self, listeners: Sequence[SearchListener]) -> None:
        _forward_all(self, SearchListener, listeners)


class TrainListeners(TrainListener):
    """Forwards events of a training to several listeners, in order."""

    def __init__(self, listeners: Sequence[TrainListener]) -> None:
        _forward_all(self, TrainListener, listeners)


def _forward_all(one: Any, kind: type, listeners: Sequence[Any]) -> None:
    """Makes each method of the listener class `kind` forward to all `listeners`."""
    for name in (each for each in vars(kind) if not each.startswith("_")):
        setattr(one, name, _forward(listeners, name))


def _forward(listeners: Sequence[Any], name: str) -> Callable[..., None]:
    def forward(*given: Any) -> None:
        for listener in listeners:
            getattr(listener, name)(*given)

    return forward
