"""The client's side of a host agent."""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Client, Connection

import psutil

from ..base.errors import RunnerError
from ..base.scratch import sweep
from ..results import Status
from . import failure
from .agent import SOCKET, AgentSetup, MoreImports
from .helper_process import HelperProcess
from .job import STOP, TEARDOWN_S, AgentTask, Begun, Compiling, Job, Outcome
from .process import Deadline, kill_tree

PLAIN_IMPORTS = (
    "torch",
    "transformers",
    "torch._dynamo",
    "redline.schedule",
    "redline.models.families",
    "redline.training.training",
    "redline.runners.dry_run",
)
"""What dry runs would import by themselves, which takes seconds; in the agent it is done once."""
COMMON_IMPORTS = (*PLAIN_IMPORTS, "torch._inductor.compile_fx")
"""The same where some of them compile."""

STARTS = 3
"""How often an agent is started that dies before it is ready."""
POLL_S = 0.5
"""How often it is looked whether a starting agent still lives, s."""
BEGIN_S = 30.0
"""How long an agent has to begin with a job, and one that starts may stand stopped, s."""
CLOSE_S = 15.0
"""How long an agent may take to end, s."""
ANSWER_S = 20.0
"""After a trial's deadline: how long its supervisor has to end ranks on a CPU and to answer, s."""


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
        sweep()
        self._start()

    def _start(self) -> None:
        self._awaited = 1  # answers that it owes, one for each time it is told what to import
        self._process = HelperProcess("redline.runners.agent", "agent")
        self._address = str(self._process.folder / SOCKET)
        sys_path = tuple(os.path.abspath(each) for each in sys.path)
        self._process.send(AgentSetup(sys_path=sys_path, imports=self._imports))

    def _restart(self) -> None:
        """Starts another agent in the place of one that has ended."""
        self._process.close(0)
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
                self._process.send(MoreImports(imports=new))

    def wait_ready(self) -> None:
        """Returns when the agent takes jobs. One that dies before is started again, `STARTS` times in all.

        Raises:
            RunnerError: it could not start; the message holds its last words.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._awaited and not self._closed and not self._process.running:
                self._restart()
            starts = 1
            while self._awaited and not self._closed:
                said = self._first_words()
                if said is None and not self._closed:
                    how = failure.ended(self._process.ended())
                    if starts == STARTS:
                        what = f"the host agent died {STARTS} times before it was ready ({how})"
                        raise RunnerError(self._process.with_last_words(what))
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

    def _first_words(self) -> dict[str, str | int] | None:
        """What the agent says of its start; None if it died before."""
        connection = self._process.connection
        ran = time.monotonic()
        try:
            # A process that an import left behind may hold the other end, so its closing is not waited for.
            while not connection.poll(POLL_S):
                if not self._process.running and not connection.poll():
                    return None
                now = time.monotonic()
                ran = ran if _is_stopped(self.pid) else now
                if now - ran > BEGIN_S:
                    self._process.kill()
            return connection.recv()
        except (EOFError, ConnectionError):
            return None

    def run(self, job: Job, key: str = "") -> Outcome:
        """The outcome of a job; blocks until it ended. With a key it can be stopped.

        What should answer and does not is ended, and `timeout` is what came of a job whose supervisor that was.

        Raises:
            RunnerError: the agent or the trial's supervisor was lost.
        """
        self.wait_ready()
        if job.log is not None:  # the agent may be in another folder by now than this process
            job = replace(job, log=os.path.abspath(job.log))
        with self._heard(), self._asked(job) as connection:
            with self._lock:
                self._running[key] = connection
                if key in self._stopped:
                    connection.send(STOP)
            try:
                return _answer(connection, job)
            finally:
                with self._lock:
                    self._running.pop(key, None)
                    self._stopped.discard(key)

    def begin(self, task: AgentTask) -> Connection:
        """Has the agent do a task in a fork of itself; the connection with that, which closes when it ends.

        Raises:
            RunnerError: the agent was lost, or does not start.
        """
        self.wait_ready()
        with self._heard():
            return self._asked(task)

    def _asked(self, what: Job | AgentTask) -> Connection:
        connection = Client(self._address, "AF_UNIX")
        _bound_sending(connection, BEGIN_S)
        connection.send(what)
        return connection

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Tells of an agent that takes nothing, or is lost, as a `RunnerError`."""
        agent = self._process
        try:
            yield
        except (TimeoutError, BlockingIOError) as error:
            agent.kill()
            what = f"the host agent took no job within {BEGIN_S:g} s and was ended"
            raise RunnerError(agent.with_last_words(what)) from error
        except (EOFError, OSError) as error:
            what = "closed" if self._closed else f"lost ({type(error).__name__})"
            raise RunnerError(agent.with_last_words(f"the host agent was {what} during a trial")) from error

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether the agent has died, or does within so long."""
        with suppress(subprocess.TimeoutExpired):
            self._process.process.wait(within_s)
            return True
        return False

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
        if self._awaited:  # it hears nothing while it imports
            self._process.process.terminate()
        self._process.close(CLOSE_S)


def _answer(connection: Connection, job: Job) -> Outcome:
    """What is said of a job, waited for no longer than it can take.

    Raises:
        TimeoutError: the agent did not begin with it.
    """
    if not connection.poll(BEGIN_S):
        raise TimeoutError
    begun: Begun = connection.recv()
    deadline = Deadline(time.monotonic(), job.timeout_s, job.compile_timeout_s)
    while True:
        patience = ANSWER_S + job.teardown_s - TEARDOWN_S
        left = None if job.timeout_s is None else max(0.0, deadline.at + patience - time.monotonic())
        if not connection.poll(left):
            kill_tree(begun.supervisor)
            silent = f"its supervisor said nothing for {patience:g} s more and was ended"
            return Outcome(status=Status.TIMEOUT, reason=f"{deadline.reason}; {silent}")
        said: Compiling | Outcome = connection.recv()
        if isinstance(said, Outcome):
            return said
        deadline.compiling(said.yes, time.monotonic())


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _bound_sending(connection: Connection, seconds: float) -> None:
    """Has sends fail with BlockingIOError that nobody takes for so long (`man 7 socket`, SO_SNDTIMEO)."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), 0))
