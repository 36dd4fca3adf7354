"""A tracker of experiments: opened, written to and closed, and left alone once it has failed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...results.columns import fold


class Tracker:
    """What a search and a training share in writing to a tracker. A subclass has `open`, and more such steps.

    A tracker that fails is reported once and left alone from then on: it must not end what it follows.

    Args:
        folder: of the run or the training.
        say: told what the user should know.

    Raises:
        MissingDependency: the tracker's package is not installed.
    """

    name = ""
    """What `--log-to` calls it."""
    failures: tuple[type[BaseException], ...] = (OSError,)
    """How the tracker fails."""

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        self.folder = folder
        self._say = say or (lambda message: None)
        self._state = "new"

    def close(self) -> None:
        """Nothing follows."""

    def finish(self) -> None:
        """Closes the tracker if it was opened; may be called twice."""
        self._guarded("close")
        self._state = "closed"

    def _guarded(self, step: str, *given: Any) -> None:
        if self._state in ("failed", "closed") or (self._state == "new" and step != "open"):
            return
        try:
            getattr(self, step)(*given)
            self._state = "open"
        except self.failures as error:
            self._state = "failed"
            self._say(f"nothing more is logged to {self.name}, which failed: {fold(str(error))[:300]}")
