"""The client's side of a host agent."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from ..errors import RunnerError
from . import failure
from .agent import AgentSetup, MoreImports
from .job import STOP, Job, Outcome

PLAIN_IMPORTS = (
    "torch",
    "transformers",
    "torch._dynamo",
    "redline.schedule",
    "redline.models.families",
    "redline.models.training",
    "redline.runners.dry_run",
)
"""What dry runs would import by themselves, which takes seconds; in the agent it is done once."""
COMMON_IMPORTS = (*PLAIN_IMPORTS, "torch._inductor.compile_fx")
"""The same where some of them compile."""

STARTS = 3
"""How often an agent is started that dies before it is ready."""
POLL_S = 0.5
"""How often it is looked whether a starting agent still lives, s."""


class HostAgent:
    """Starts a host agent on this machine and sends it jobs. Thread-safe.

    Args:
        imports: modules the agent imports once, for all trials; `also_import` adds to them.

    The agent process starts at once and imports in the background; the first `run` waits for it.
    """

    def __init__(self, imports: Sequence[str] = COMMON_IMPORTS) -> None:
        self._imports = tuple(dict.fromkeys(imports))
        self._lock = threading.Lock()
        self._closed = False
        self._failure: RunnerError | None = None
        self._running: dict[str, Connection] = {}
        self._stopped: set[str] = set()
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="redline-agent-")
        self._awaited = 1  # answers that it owes, one for each time it is told what to import
        setup = AgentSetup(
            address=os.path.join(self._folder, "socket"),
            sys_path=tuple(os.path.abspath(each) for each in sys.path),
            imports=self._imports,
        )
        self._address = setup.address
        # A connection of its own: whatever is imported may print to standard output, or read standard input.
        self._control, theirs = Pipe()
        with theirs, open(os.path.join(self._folder, "log"), "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "redline.runners.agent", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                # OpenMP threads that spin while they wait make a step ten times slower as soon as anything
                # else runs on the machine; asleep they cost nothing that can be measured on a quiet one.
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            )
        self._send(setup)

    def _send(self, what: AgentSetup | MoreImports) -> None:
        with contextlib.suppress(ConnectionError):  # it has ended, which `wait_ready` finds
            self._control.send(what)

    def _restart(self) -> None:
        """Starts another agent in the place of one that has ended."""
        self._control.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._start()

    @property
    def pid(self) -> int:
        """Process id of the agent."""
        return self._process.pid

    def also_import(self, imports: Sequence[str]) -> None:
        """Has the agent import what it has not yet, in the background; `wait_ready` and `run` wait for that."""
        with self._lock:
            new = tuple(dict.fromkeys(each for each in imports if each not in self._imports))
            if new:
                self._imports += new
                self._awaited += 1
                self._send(MoreImports(imports=new))

    def wait_ready(self) -> None:
        """Returns when the agent takes jobs. One that dies before is started again, `STARTS` times in all.

        Raises:
            RunnerError: it could not start; the message holds its last words.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._awaited and not self._closed and self._process.poll() is not None:
                self._restart()
            starts = 1
            while self._awaited and not self._closed:
                said = self._first_words()
                if said is None and not self._closed:
                    how = failure.ended(self._reaped())
                    if starts == STARTS:
                        what = f"the host agent died {STARTS} times before it was ready ({how})"
                        raise RunnerError(self._why(what))
                    starts += 1
                    self._restart()
                elif said is not None and "error" in said:
                    what = f"the host agent did not start: {said['error']}\n{said['traceback']}"
                    self._failure = RunnerError(what)  # it would fail in the same way again
                    raise self._failure
                elif said is not None:
                    self._awaited -= 1
            if self._closed:
                self._end()  # perhaps this agent was started while another was being closed
                raise RunnerError("the host agent is closed")

    def _first_words(self) -> dict[str, Any] | None:
        """What the agent says of its start; None if it died before."""
        try:
            # A process that an import left behind may hold the other end, so its closing is not waited for.
            while not self._control.poll(POLL_S):
                if self._process.poll() is not None and not self._control.poll():
                    return None
            return self._control.recv()
        except (EOFError, ConnectionError):
            return None

    def run(self, job: Job, key: str = "") -> Outcome:
        """The outcome of a job; blocks until it ended. With a key it can be stopped.

        Raises:
            RunnerError: the agent or the trial's supervisor was lost.
        """
        self.wait_ready()
        try:
            with Client(self._address, "AF_UNIX") as connection:
                connection.send(job)
                with self._lock:
                    self._running[key] = connection
                    if key in self._stopped:
                        connection.send(STOP)
                try:
                    return connection.recv()
                finally:
                    with self._lock:
                        self._running.pop(key, None)
                        self._stopped.discard(key)
        except (EOFError, OSError) as error:
            what = "closed" if self._closed else f"lost ({type(error).__name__})"
            raise RunnerError(self._why(f"the host agent was {what} during a trial")) from error

    def stop(self, key: str) -> None:
        """Ends the job of this key, also one that has not arrived yet; `run` returns what was known of it."""
        with self._lock:
            if key in self._running:
                self._running[key].send(STOP)
            else:
                self._stopped.add(key)

    def close(self) -> None:
        """Ends the agent and every trial it runs; returns when they are gone."""
        if self._closed:
            return
        self._closed = True
        self._end()

    def _end(self) -> None:
        # What the agent takes as its end, and a thread that waits for its first words as well.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._control.fileno())) as control:
            control.shutdown(socket.SHUT_RDWR)
        if self._awaited:  # it hears nothing while it imports
            self._process.terminate()
        self._reaped(timeout_s=15)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _reaped(self, timeout_s: float = 5) -> int:
        """How the agent ended, after it hung up or was hung up on; one that stays is killed."""
        try:
            return self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _why(self, what: str) -> str:
        path = Path(self._folder, "log")
        words = path.read_text(errors="replace").strip() if path.exists() else ""
        return f"{what}\n{words[-2000:]}" if words else what
