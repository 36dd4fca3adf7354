"""How far a rank has read a checkpoint, reported now and then where that takes long."""

import time
from collections.abc import Callable, Mapping
from typing import Any

EVERY_S = 5.0
"""How often it is reported, s. What is read sooner is not reported at all."""
Report = Callable[[Mapping[str, Any]], None]
"""Takes lines of a training's log."""


def ignore(line: Mapping[str, Any]) -> None:
    """Reports nothing."""


class Reading:
    """Counts the bytes that a rank has read.

    Args:
        what: is read, in words.
        of: bytes that this rank reads in all.
        report: takes a line of kind `progress` with `what`, `bytes` and `of`, at most every `EVERY_S`.
    """

    def __init__(self, what: str, of: int, report: Report) -> None:
        self._what, self._of, self._report = what, of, report
        self._bytes, self._reported_at = 0, time.monotonic()

    def __call__(self, size: int) -> None:
        """Counts bytes that were read just now."""
        self._bytes += size
        now = time.monotonic()
        if now - self._reported_at >= EVERY_S:
            self._reported_at = now
            self._report({"kind": "progress", "what": self._what, "bytes": self._bytes, "of": self._of})
