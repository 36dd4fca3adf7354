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
"""Memory limit of a helper, MiB. It traces models that users describe."""
MOST_WAITING = 8
"""Default number of calls that may wait. More are refused, so that threads remain free for other requests."""
_log = logging.getLogger(__name__)


class Helper:
    """Calls functions in a separate process, one at a time. The process is restarted if it dies or a call takes too
    long.

    Args:
        seconds: time limit of a call.
        most_waiting: number of calls that may wait; more are refused.
    """

    def __init__(self, seconds: float, most_waiting: int = MOST_WAITING) -> None:
        self._seconds, self._most_waiting = seconds, most_waiting
        self._slots = threading.BoundedSemaphore(1 + most_waiting)
        self._lock = threading.Lock()
        self._process: Any = None
        self._pipe: Connection | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns `function(*args)`, computed in the process. The function must be importable, its arguments and
        result plain data.

        Raises:
            RedlineError: raised by the function.
            UsageError: the call took too long.
            RunnerError: the process died during the call, the call failed in another way, or too many calls wait.
        """
        if not self._slots.acquire(blocking=False):
            raise RunnerError(f"{self._most_waiting} other requests wait for this computation; try again in a moment")
        try:
            return self._call(function, args)
        finally:
            self._slots.release()

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with self._lock:
            pipe = self._started()
            try:
                pipe.send((function, args))
                if not pipe.poll(self._seconds):
                    self._end()
                    raise UsageError(
                        f"this takes longer than the limit of {self._seconds:g} s; request something smaller"
                    )
                kind, found = pipe.recv()
            except (EOFError, OSError):
                self._end()
                raise RunnerError(
                    "the process that computes this died during it; it may have run out of memory"
                ) from None
        if kind == "done":
            return found
        if kind == "failed":
            _log.error("a helper failed: %s", found)
            raise RunnerError("the computation failed; the server's log has the traceback")
        raise getattr(errors, kind, UsageError)(found)

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _started(self) -> Connection:
        if self._process is None or self._pipe is None or not self._process.is_alive():
            self._end()
            context = multiprocessing.get_context("spawn")
            self._pipe, child_pipe = context.Pipe()
            self._process = context.Process(target=_serve, args=(child_pipe,), daemon=True, name="redline-helper")
            self._process.start()
            child_pipe.close()
        return self._pipe

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None


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
"""Pause before a restart of the worker, s: the first, and the longest after repeated deaths."""
LIVED_S = 30.0
"""A worker that ran this long before it died is restarted after the first pause, s."""
END_S = 12.0
"""Time that the worker has to give back its leases, s."""
FROM_STDIN = "-"
"""Value of the worker's --token: the token is the first line of standard input, and the worker ends when that closes."""


class EmbeddedWorker:
    """A worker process on this host, restarted when it dies.

    Args:
        server: the server's address.
        token: with which it joins.
        devices: number of devices; None for all.
        ray_address: Ray cluster whose devices it offers, instead of this host's.
        certificate: the server's certificate.
        code_user: Unix user that runs submitted code.
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
        self._thread.start()

    def close(self) -> None:
        """Ends the worker, which gives back its leases."""
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
            _log.warning("the server's own worker ended with %s; restarting it", self._process.returncode)
            self._closing.wait(pause)

    def _begin(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{self._token}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:  # it died at once, which `_run` detects
            return
