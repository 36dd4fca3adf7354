"""Runs submitted code as a separate Unix user: the worker's side of `code_process.py`.

Each search whose request is code has one process, which runs its dry runs as that user. Its answers are trusted no
more than those of a dry run: they can misreport its own search, but reach nothing else. Its files are read without
following links.
"""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..base.errors import RunnerError
from ..base.reading import Malformed, parse_json
from ..runners.helper_process import HelperProcess
from ..runners.local import SharedDevices
from ..runners.unix_user import UnixUser
from .records import Assignment

MOST_KEPT = 1
"""Idle processes that are kept."""
LARGEST_ANSWER = 16 << 20
"""Maximum size of an outcome, bytes."""
END_S = 15.0
"""Time that a process, or a dry run being stopped, has to end, s."""


def send(connection: Connection, message: dict[str, Any]) -> None:
    """Sends a mapping as JSON."""
    connection.send_bytes(json.dumps(message).encode())


class _Process:
    """The process of one search."""

    def __init__(self, user: UnixUser, devices: int) -> None:
        self.users = 0
        self._helper = HelperProcess("redline.service.code_process", "code", user=user)
        self._lock = threading.Lock()
        self._answers: dict[int, Future[dict[str, Any]]] = {}
        self._number = 0
        self.lost = False
        self._send({"devices": devices})
        threading.Thread(target=self._receive, daemon=True, name="code").start()

    def begin(self, assignment: Assignment, ids: tuple[str, ...], logs: Path) -> tuple[int, "Future[dict[str, Any]]"]:
        """Starts a run and returns its number and the future of its outcome."""
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            self._number += 1
            number = self._number
            self._answers[number] = answer
            if self.lost:
                answer.set_exception(self._gone())
            else:
                task = {"assignment": asdict(assignment), "ids": ids, "logs": str(logs)}
                self._send({"number": number, **task})
        return number, answer

    def stop(self, number: int) -> None:
        """Stops the run of that number. A process that does not stop it in time is killed."""
        with self._lock:
            answer = self._answers.get(number)
            self._send({"stop": number})
        if answer is not None:
            late = threading.Timer(END_S, lambda: answer.done() or self._helper.kill())
            late.daemon = True
            late.start()

    def close(self) -> None:
        """Ends the process and everything it started."""
        self._helper.close(END_S)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            send(self._helper.connection, message)
        except OSError:  # the process has ended, which `_receive` detects
            return

    def _receive(self) -> None:
        try:
            while True:
                message = parse_json(self._helper.connection.recv_bytes(LARGEST_ANSWER))
                with self._lock:
                    answer = self._answers.pop(message["number"])
                if "outcome" in message:
                    answer.set_result(dict(message["outcome"]))
                else:
                    answer.set_exception(RunnerError(str(message["lost"])[:2000]))
        except (EOFError, OSError, Malformed, KeyError, TypeError, ValueError):  # it ended, or sent an invalid message
            self._helper.kill()
            with self._lock:
                self.lost = True
                left, self._answers = list(self._answers.values()), {}
            for each in left:
                each.set_exception(self._gone())

    def _gone(self) -> RunnerError:
        return RunnerError(self._helper.with_last_words("the process that runs code ended"))


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

    def tried(self, assignment: Assignment, logs: Path, over: threading.Event) -> dict[str, Any]:
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
                number, answer = process.begin(assignment, ids, logs)
                with self._lock:
                    self._stops[assignment.dry_run] = lambda: process.stop(number)
                if over.is_set():
                    process.stop(number)
                return answer.result()
        finally:
            self._shared.give_back(ids, assignment.devices)
            with self._lock:
                self._stops.pop(assignment.dry_run, None)

    def stop(self, assignment: Assignment) -> None:
        """Stops a dry run; `tried` then returns the outcome so far."""
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
                gone = [self._kept.pop(name) for name in idle[: max(0, len(idle) - MOST_KEPT)]]
            for each in gone:
                each.close()
