"""Experiment trackers that searches and trainings are logged to: one file each, and the listener of a search that feeds them."""

import contextlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from ...base.errors import UsageError, unknown
from ..listener import SearchListener
from .listeners import SearchTracking
from .tracker import Tracker

TRACKERS = ("mlflow", "tensorboard", "wandb")
"""Names that `--log-to` accepts, each that of a module here with a class `TRACKER`."""


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


def open_trackers(names: str | Sequence[str] | None, folder: str | Path | None) -> list[Tracker]:
    """Creates the named trackers.

    Raises:
        UsageError: a tracker is unknown, or the folder is missing.
        MissingDependency: a tracker's package is not installed.
    """
    chosen = check_trackers(names, folder)
    return [import_module(f".{name}", __package__).TRACKER(Path(folder)) for name in chosen if folder is not None]


@contextlib.contextmanager
def logging_to(
    names: str | Sequence[str] | None, folder: str | Path | None, listener: SearchListener
) -> Iterator[SearchListener]:
    """Yields a listener of a search that forwards to `listener` and to the named trackers, which are closed at the end.

    Raises:
        UsageError: a tracker is unknown, or the folder is missing.
        MissingDependency: a tracker's package is not installed.
    """
    trackers = open_trackers(names, folder)
    if not trackers:
        yield listener
        return
    with contextlib.closing(SearchTracking(trackers, listener)) as tracking:
        yield tracking
