"""What a rank compiles: how long it took, and that it is at it."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from ..base.device import usable_cores

COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Compilers of Inductor that work at the same time, as torch reads it."""


def share_compile_threads(ranks: int) -> None:
    """Divides this host's cores among the compilers of its ranks: each would start one for every core. What a user has set stays.

    Source: `decide_compile_threads` of torch/_inductor/config.py, which reads the variable when it is imported.
    """
    if COMPILE_THREADS in os.environ:
        return
    threads = max(1, usable_cores() // ranks)
    os.environ[COMPILE_THREADS] = str(threads)
    imported: Any = sys.modules.get("torch._inductor.config")
    if imported is not None:
        imported.compile_threads = min(imported.compile_threads, threads)


class Compilation:
    """Counts the seconds that torch.compile takes in this process, and tells when it begins and ends.

    Args:
        tell: called with whether this rank compiles, or waits for others that may.
        elsewhere: whether the trial has ranks on other hosts. What these compile is not known here, so until
            `settled` this rank counts as waiting for them.
    """

    def __init__(self, tell: Callable[[bool], None], *, elsewhere: bool = False) -> None:
        from ..schedule.primitives.modules import on_compilation

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
