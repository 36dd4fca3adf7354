"""Interface of experiment trackers: the events of a search or a training that they receive."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Literal

from ...base.errors import MissingDependency

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
            raise MissingDependency(f"--log-to {self.name} needs it: pip install {self.package}") from error

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
