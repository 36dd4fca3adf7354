"""Experiment trackers that searches and trainings are logged to: one file each, and the listeners that feed them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ...base.errors import UsageError, unknown
from .listeners import SearchTracking, Tracking

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
    trackers = [import_module(f".{name}", __package__).TRACKER(Path(str(folder))) for name in chosen]
    with contextlib.closing(tracking(trackers, listener)) as forwarding:
        yield forwarding
