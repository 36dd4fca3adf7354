"""Runs submitted code as a separate Unix user: the worker's side of `code_process.py`.

Each search whose request is code has one process, which runs its dry runs as that user. Its answers are trusted no
more than those of a dry run: they can misreport its own search, but reach nothing else. Its files are read without
following links.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..base.errors import RunnerError
from ..runners.helper_process import HelperProcess
from ..runners.local import SharedDevices
from ..runners.protocol import Call, Caller
from ..runners.unix_user import UnixUser
from .records import Assignment

MOST_KEPT = 1
"""Idle processes that are kept."""
LARGEST_ANSWER = 16 << 20
"""Maximum size of an outcome, bytes."""
END_S = 15.0
"""Time that a process, or a dry run being stopped, has to end, s."""


class _Process:
    """The process of one search."""

    def __init__(self, user: UnixUser, devices: int) -> None:
        self.users = 0
        self._helper = HelperProcess("redline.service.code_process", "code", user=user)
        self._caller = Caller(self._helper.connection, self._lost, plain=True, largest=LARGEST_ANSWER, watched="code")
        self._caller.begin("start", devices)

    @property
    def lost(self) -> bool:
        return self._caller.lost

    def begin(self, assignment: Assignment, ids: tuple[str, ...], logs: Path) -> Call:
        """Starts a run and returns the call."""
        return self._caller.begin("run", asdict(assignment), ids, str(logs))

    def outcome(self, call: Call) -> dict[str, Any]:
        """Waits for the outcome of a run.

        Raises:
            RunnerError: the process was lost, or its reply is invalid.
        """
        found = call.result()
        if not isinstance(found, dict):
            self._helper.kill()
            raise RunnerError("the process that runs code sent an invalid reply")
        return found

    def stop(self, call: Call) -> None:
        """Stops a run. A process that does not stop it in time is killed."""
        call.cancel()
        if not call.over:
            late = threading.Timer(END_S, lambda: call.over or self._helper.kill())
            late.daemon = True
            late.start()

    def close(self) -> None:
        """Ends the process and everything it started."""
        self._helper.close(END_S)
        self._caller.close()

    def _lost(self, error: Exception) -> str:
        """Ends a process that has closed its connection or sent an invalid message. Returns the error text."""
        self._helper.kill()
        return self._helper.with_last_words("the process that runs code ended")


class CodeRunners:
    """Runs dry runs of code, each in the process of its search. Thread-safe.

    Args:
        user: Unix user of the processes.
        devices: number of devices of the worker.
        shared: those devices, shared with the worker's other dry runs.
    """

    def __init__(self, user: UnixUser, devices: int, shared: SharedDevices) -> None:
        self.user = user
        """Unix user of the processes."""
        self._devices, self._shared = devices, shared
        self._kept: dict[str, _Process] = {}
        self._stops: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def run_dry_run(self, assignment: Assignment, logs: Path, over: threading.Event) -> dict[str, Any]:
        """Runs a dry run and returns its outcome.

        Args:
            assignment: the dry run.
            logs: folder of its log. Its owner, and that of its parent folder, becomes the Unix user.
            over: set when the outcome is no longer needed, before `stop` is called.

        Raises:
            RunnerError: the process was lost.
        """
        for folder in (logs.parent, logs):
            self.user.give(folder)
        ids = self._shared.take(assignment.devices)
        try:
            with self._process(assignment.search) as process:
                call = process.begin(assignment, ids, logs)
                with self._lock:
                    self._stops[assignment.dry_run] = lambda: process.stop(call)
                if over.is_set():
                    process.stop(call)
                return process.outcome(call)
        finally:
            self._shared.give_back(ids, assignment.devices)
            with self._lock:
                self._stops.pop(assignment.dry_run, None)

    def stop(self, assignment: Assignment) -> None:
        """Stops a dry run; `run_dry_run` then returns the outcome so far."""
        with self._lock:
            stop = self._stops.get(assignment.dry_run)
        if stop is not None:
            stop()

    def close(self) -> None:
        """Ends all processes."""
        with self._lock:
            self._closed = True
            kept, self._kept = list(self._kept.values()), {}
        for each in kept:
            each.close()

    @contextmanager
    def _process(self, search: str) -> Iterator[_Process]:
        with self._lock:
            if self._closed:
                raise RunnerError("the worker ends")
            process = self._kept.pop(search, None)
            if process is not None and process.lost:
                process.close()
                process = None
            process = process or _Process(self.user, self._devices)
            self._kept[search] = process  # moved to the end: the least recently used is ended first
            process.users += 1
        try:
            yield process
        finally:
            with self._lock:
                process.users -= 1
                idle = [name for name, each in self._kept.items() if not each.users]
                surplus = [self._kept.pop(name) for name in idle[: max(0, len(idle) - MOST_KEPT)]]
            for each in surplus:
                each.close()
