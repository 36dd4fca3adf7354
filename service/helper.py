"""A process beside the server for what takes long to import or to compute, so that the server itself answers at once."""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ..base import errors
from ..base.errors import RedlineError, RunnerError, UsageError
from ..runners.memory import HostMemoryMeter

MEMORY_MIB = 8192.0
"""Memory of the process, MiB: it traces models that somebody else describes."""
MOST_WAITING = 8
"""Calls that wait for their turn unless another number is given; more are refused, so that who asks for something else is
answered."""
_log = logging.getLogger(__name__)


class Helper:
    """Calls functions in a process of its own, one at a time; one that takes too long, or dies, is started anew.

    Args:
        seconds: what a call may take.
        most_waiting: calls that wait for their turn; more are refused.
    """

    def __init__(self, seconds: float, most_waiting: int = MOST_WAITING) -> None:
        self._seconds, self._most_waiting = seconds, most_waiting
        self._places = threading.BoundedSemaphore(1 + most_waiting)
        self._lock = threading.Lock()
        self._process: Any = None
        self._ours: Connection | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(*args)` returns there; both must be importable, and what they take and return plain data.

        Raises:
            RedlineError: as the function raised it.
            UsageError: it took longer than it may.
            RunnerError: the process ended with it, it failed otherwise, or too many calls wait.
        """
        if not self._places.acquire(blocking=False):
            raise RunnerError(f"{self._most_waiting} others wait for what computes this; ask again in a moment")
        try:
            return self._call(function, args)
        finally:
            self._places.release()

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with self._lock:
            pipe = self._begun()
            try:
                pipe.send((function, args))
                if not pipe.poll(self._seconds):
                    self._end()
                    raise UsageError(
                        f"this takes longer than the {self._seconds:g} s that it may; ask for something smaller"
                    )
                kind, found = pipe.recv()
            except (EOFError, OSError):
                self._end()
                raise RunnerError("the process that computes this ended with it; its memory may have run out") from None
        if kind == "done":
            return found
        if kind == "failed":
            _log.error("a helper failed: %s", found)
            raise RunnerError("what computes this failed; the server's log says at what")
        raise getattr(errors, kind, UsageError)(found)

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _begun(self) -> Connection:
        if self._process is None or self._ours is None or not self._process.is_alive():
            self._end()
            context = multiprocessing.get_context("spawn")
            self._ours, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True, name="redline-helper")
            self._process.start()
            theirs.close()
        return self._ours

    def _end(self) -> None:
        if self._ours is not None:
            self._ours.close()
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._ours = None


def _serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    HostMemoryMeter().limit(MEMORY_MIB)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("done", function(*args))
        except RedlineError as error:
            answer = (type(error).__name__, str(error))
        except Exception:
            import traceback

            answer = ("failed", traceback.format_exc())
        pipe.send(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a helper has a parent"
    parent.join()
    os._exit(1)
