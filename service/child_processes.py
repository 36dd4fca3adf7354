"""Child processes of the server: a helper for slow imports and computations, and the server's own worker."""

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..base.errors import RunnerError, UsageError
from ..base.scratch import remove
from ..runners.helper_process import HelperProcess
from ..runners.memory import HostMemoryMeter
from ..runners.protocol import Caller, Channel, RemoteError, receive_call

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
        self._closed = False
        self._process: HelperProcess | None = None
        self._caller: Caller | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns `function(*args)`, computed in the process. The function must be importable, its arguments and
        result plain data.

        Raises:
            RedlineError: raised by the function.
            UsageError: the call took too long.
            RunnerError: the process died during the call, the call failed in another way, too many calls wait, or
                this helper is closed.
        """
        if not self._slots.acquire(blocking=False):
            raise RunnerError(f"{self._most_waiting} other requests wait for this computation; try again in a moment")
        try:
            return self._call(function, args)
        finally:
            self._slots.release()

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with self._lock:
            caller = self._started()
            try:
                return caller.call("call", function, args, within_s=self._seconds)
            except TimeoutError:
                self._end()
                raise UsageError(
                    f"this takes longer than the limit of {self._seconds:g} s; request something smaller"
                ) from None
            except RemoteError as error:
                _log.error("a helper failed: %s", error)
                raise RunnerError("the computation failed; the server's log has the traceback") from None

    def close(self) -> None:
        """Ends the process, and with it the call in progress. Later calls fail."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # without the lock, which the call in progress has
        with self._lock:
            self._end()

    def _started(self) -> Caller:
        if self._closed:
            raise RunnerError("the server is stopping")
        if self._caller is None or self._caller.look():
            self._end()
            self._process = HelperProcess("redline.service.child_processes", "helper")
            self._caller = Caller(
                self._process.connection,
                lambda error: "the process that computes this died during it; it may have run out of memory",
            )
            if self._closed:  # meanwhile
                self._process.kill()
        return self._caller

    def _end(self) -> None:
        if self._process is not None and self._caller is not None:
            self._process.close(0)
            self._caller.close()
        self._process = self._caller = None


def main() -> None:
    """Calls functions until the parent process closes the connection."""
    connection, folder = Connection(int(sys.argv[1])), Path(sys.argv[2])
    os.set_inheritable(connection.fileno(), False)
    channel = Channel(connection)
    threading.Thread(target=_end_with_parent, args=(channel, folder), daemon=True).start()
    HostMemoryMeter().limit(MEMORY_MIB)
    with contextlib.suppress(EOFError):
        while True:
            receive_call(channel).reply(lambda call: call.arguments[0](*call.arguments[1]))
    threading.Event().wait()  # the thread ends the process


def _end_with_parent(channel: Channel, folder: Path) -> None:
    """Ends this process, in whatever computation, when the parent has closed the connection."""
    closed = select.poll()
    closed.register(channel, select.POLLRDHUP)
    closed.poll()
    remove(folder)
    os._exit(0)


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""Pause before a worker or searcher is restarted, s: the first, and the longest after repeated deaths."""
LIVED_S = 30.0
"""A death after this time does not count as a repeated one, s."""
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
        certificate: str | Path | None = None,
        code_user: str | None = None,
    ) -> None:
        command = [sys.executable, "-P", "-m", "redline.cli", "worker", "--server", server, "--token", FROM_STDIN]
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
            start = time.monotonic()
            self._begin()
            assert self._process is not None
            while self._process.poll() is None:
                if self._closing.wait(0.2):
                    return
            pause = FIRST_PAUSE_S if time.monotonic() - start > LIVED_S else min(LONGEST_PAUSE_S, 2 * pause)
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


if __name__ == "__main__":
    main()
