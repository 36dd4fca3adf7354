"""Child processes of the server: a helper for slow imports and computations, and the server's own worker."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
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


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""How long it is waited before it is started again, s: at first, and after many deaths."""
LIVED_S = 30.0
"""One that lived so long before it died counts as one that works."""
END_S = 12.0
"""How long it may take to give back what it has."""
FROM_STDIN = "-"
"""In the place of a token: it is the first line of standard input, and the worker ends when that closes."""


class EmbeddedWorker:
    """A worker process of this host.

    Args:
        server: the server's address.
        token: with which it joins.
        devices: how many; None for all.
        ray_address: of a Ray cluster whose devices they are.
        certificate: that the server shows.
        code_user: Unix user as whom code runs.
    """

    def __init__(
        self,
        server: str,
        token: str,
        *,
        devices: int | None = None,
        ray_address: str | None = None,
        certificate: Path | None = None,
        code_user: str | None = None,
    ) -> None:
        command = [sys.executable, "-m", "redline.cli", "worker", "--server", server, "--token", FROM_STDIN]
        if devices is not None:
            command += ["--devices", str(devices)]
        if ray_address is not None:
            command += ["--runner", "ray", "--ray-address", ray_address]
        if certificate is not None:
            command += ["--pinned", str(certificate)]
        if code_user is not None:
            command += ["--code-user", code_user]
        self._command, self._token = command, token
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="embedded worker", daemon=True)

    def start(self) -> None:
        """Has it run from now on."""
        self._thread.start()

    def close(self) -> None:
        """Ends it; what it has goes back."""
        self._closing.set()
        self._thread.join()
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._closing.is_set():
            began = time.monotonic()
            self._begin()
            assert self._process is not None
            while self._process.poll() is None:
                if self._closing.wait(0.2):
                    return
            pause = FIRST_PAUSE_S if time.monotonic() - began > LIVED_S else min(LONGEST_PAUSE_S, 2 * pause)
            _log.warning("the server's own worker ended with %s; it is started again", self._process.returncode)
            self._closing.wait(pause)

    def _begin(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{self._token}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:  # it died at once, which is seen in a moment
            return
