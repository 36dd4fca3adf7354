"""Dry runs of code as a Unix user of its own: the worker's side of `code_process.py`.

A process for each search whose request is code runs its dry runs as that user. What it says is believed as much as a dry run
is: it may be wrong about itself, and cannot reach anything else. What it writes is read without following links.
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
"""Processes that are kept while nothing runs in them."""
LARGEST_ANSWER = 16 << 20
"""Bytes of an outcome."""
END_S = 15.0
"""How long a process may take to end, and a dry run that is to end, s."""


def send(connection: Connection, what: dict[str, Any]) -> None:
    """Sends a mapping as JSON."""
    connection.send_bytes(json.dumps(what).encode())


class _Process:
    """A search's process."""

    def __init__(self, user: UnixUser, devices: int) -> None:
        self.users = 0
        self._companion = HelperProcess("redline.service.code_process", "code", user=user)
        self._lock = threading.Lock()
        self._answers: dict[int, Future[dict[str, Any]]] = {}
        self._number = 0
        self.lost = False
        self._tell({"devices": devices})
        threading.Thread(target=self._hear, daemon=True, name="code").start()

    def begin(self, assignment: Assignment, ids: tuple[str, ...], logs: Path) -> tuple[int, "Future[dict[str, Any]]"]:
        """Has it run something; its number, and the answer to come."""
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            self._number += 1
            number = self._number
            self._answers[number] = answer
            if self.lost:
                answer.set_exception(self._gone())
            else:
                said = {"assignment": asdict(assignment), "ids": ids, "logs": str(logs)}
                self._tell({"number": number, **said})
        return number, answer

    def stop(self, number: int) -> None:
        """Ends what it runs under a number; a process that does not do so in time is ended."""
        with self._lock:
            answer = self._answers.get(number)
            self._tell({"stop": number})
        if answer is not None:
            late = threading.Timer(END_S, lambda: answer.done() or self._companion.kill())
            late.daemon = True
            late.start()

    def close(self) -> None:
        """Ends it with all it started."""
        self._companion.close(END_S)

    def _tell(self, what: dict[str, Any]) -> None:
        try:
            send(self._companion.connection, what)
        except OSError:  # it is gone, which `_hear` finds
            return

    def _hear(self) -> None:
        try:
            while True:
                said = parse_json(self._companion.connection.recv_bytes(LARGEST_ANSWER))
                with self._lock:
                    answer = self._answers.pop(said["number"])
                if "outcome" in said:
                    answer.set_result(dict(said["outcome"]))
                else:
                    answer.set_exception(RunnerError(str(said["lost"])[:2000]))
        except (EOFError, OSError, Malformed, KeyError, TypeError, ValueError):  # it has ended, or talks nonsense
            self._companion.kill()
            with self._lock:
                self.lost = True
                left, self._answers = list(self._answers.values()), {}
            for each in left:
                each.set_exception(self._gone())

    def _gone(self) -> RunnerError:
        return RunnerError(self._companion.with_last_words("the process that runs code ended"))


class CodeRunners:
    """Dry runs of code, each in its search's process. Thread-safe.

    Args:
        user: whose processes they are.
        devices: of the worker.
        shared: those devices, which other dry runs of the worker use as well.
    """

    def __init__(self, user: UnixUser, devices: int, shared: SharedDevices) -> None:
        self.user = user
        """Whose processes they are."""
        self._devices, self._shared = devices, shared
        self._kept: dict[str, _Process] = {}
        self._stops: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def tried(self, assignment: Assignment, logs: Path, over: threading.Event) -> dict[str, Any]:
        """What comes of a dry run.

        Args:
            assignment: what is run.
            logs: folder of its log, which is made the user's with the one that it is in.
            over: set when nobody waits for it any more; `stop` is called after that.

        Raises:
            RunnerError: its process was lost.
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
        """Ends a dry run; `tried` then returns what was known of it."""
        with self._lock:
            stop = self._stops.get(assignment.dry_run)
        if stop is not None:
            stop()

    def close(self) -> None:
        """Ends every process."""
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
            self._kept[search] = process  # the last one used is the last one that goes
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
