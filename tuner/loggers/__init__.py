"""Trackers of experiments that a search can write to, one a file."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import UsageError, unknown
from ..listener import SearchListener
from .logger import TrialLogger

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
    chosen = check_trackers(names, folder)
    if not chosen:
        yield listener
        return
    trackers: list[TrialLogger] = [
        import_module(f".{name}", __package__).LOGGER(where, listener.said) for name, where in chosen.items()
    ]
    try:
        yield Listeners([listener, *trackers])
    finally:
        for tracker in trackers:
            tracker.finish()


class Listeners(SearchListener):
    """Tells several listeners the same, in order."""

    def __init__(self, listeners: Sequence[SearchListener]) -> None:
        for name in (each for each in vars(SearchListener) if not each.startswith("_")):
            setattr(self, name, _all(listeners, name))


def _all(listeners: Sequence[SearchListener], name: str) -> Callable[..., None]:
    def tell(*given: Any) -> None:
        for listener in listeners:
            getattr(listener, name)(*given)

    return tell
