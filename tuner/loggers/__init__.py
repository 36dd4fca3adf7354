"""Trackers of experiments that searches and trainings can write to, one a file."""

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
    """What `--log-to` takes."""
    return _LOGGERS


def check_trackers(names: str | Sequence[str] | None, folder: str | Path | None) -> dict[str, Path]:
    """The trackers of these names, each once, and the folder that each writes to.

    Raises:
        UsageError: there is no tracker of a name, or no folder for what it writes.
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
    """A listener that tells `listener` and the trackers of these names, which are closed at the end.

    Raises:
        UsageError: there is no tracker of a name, or no folder for what it writes.
        MissingDependency: a tracker's package is not installed.
    """
    with _opened(names, folder, "LOGGER", listener.on_message) as trackers:
        yield Listeners([listener, *trackers]) if trackers else listener


@contextlib.contextmanager
def logging_training_to(
    names: str | Sequence[str] | None, folder: str | Path, listener: TrainListener
) -> Iterator[TrainListener]:
    """The same for a training.

    Raises:
        UsageError: there is no tracker of a name.
        MissingDependency: a tracker's package is not installed.
    """
    with _opened(names, folder, "TRAINING", listener.on_message) as trackers:
        yield TrainListeners([listener, *trackers]) if trackers else listener


@contextlib.contextmanager
def _opened(
    names: str | Sequence[str] | None, folder: str | Path | None, kind: str, say: Callable[[str], None]
) -> Iterator[list[Any]]:
    """The trackers of these names, each by the class of its file that is called `kind`."""
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
    """Tells several listeners of a search the same, in order."""

    def __init__(self, listeners: Sequence[SearchListener]) -> None:
        _tell_all(self, SearchListener, listeners)


class TrainListeners(TrainListener):
    """Tells several listeners of a training the same, in order."""

    def __init__(self, listeners: Sequence[TrainListener]) -> None:
        _tell_all(self, TrainListener, listeners)


def _tell_all(one: Any, kind: type, listeners: Sequence[Any]) -> None:
    """Makes every call of a listener of that kind one of all `listeners`."""
    for name in (each for each in vars(kind) if not each.startswith("_")):
        setattr(one, name, _all(listeners, name))


def _all(listeners: Sequence[Any], name: str) -> Callable[..., None]:
    def tell(*given: Any) -> None:
        for listener in listeners:
            getattr(listener, name)(*given)

    return tell
