"""What a rank compiles: how long it took, and that it is at it."""

import time
from collections.abc import Callable


class Compilation:
    """Counts the seconds that torch.compile takes in this process, and tells when it begins and ends.

    Args:
        tell: called with whether this rank compiles, or waits for others that may.
        elsewhere: whether the trial has ranks on other hosts. What these compile is not known here, so until
            `settled` this rank counts as waiting for them.
    """

    def __init__(self, tell: Callable[[bool], None], *, elsewhere: bool = False) -> None:
        from ..schedule.primitives.compile import on_compilation

        self._tell = tell
        self._elsewhere = elsewhere
        self._waits = False
        self._told = False
        self._since: float | None = None
        self._seconds = 0.0
        on_compilation(self._began, self._ended)

    @property
    def seconds(self) -> float:
        """Seconds so far, of compilations that have ended."""
        return self._seconds

    def expected(self) -> None:
        """The first steps come, in which models compile."""
        self._waits = self._elsewhere
        self._say()

    def settled(self) -> None:
        """Every rank has made a step without compiling."""
        self._waits = False
        self._say()

    def _began(self) -> None:
        self._since = time.perf_counter()
        self._say()

    def _ended(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None
        self._say()

    def _say(self) -> None:
        now = self._waits or self._since is not None
        if now != self._told:
            self._told = now
            self._tell(now)
