"""Starts a host agent and sends it jobs."""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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
"""Modules that dry runs need. Importing them takes seconds, so the agent does it once."""
COMMON_IMPORTS = (*PLAIN_IMPORTS, "torch._inductor.compile_fx")
"""The same if some dry runs compile."""

STARTS = 3
"""Number of starts of an agent that dies before it is ready."""
POLL_S = 0.5
"""Interval between checks that a starting agent is alive, s."""
BEGIN_S = 30.0
"""Time for an agent to begin a job, and longest time that a starting agent may be suspended, s."""
CLOSE_S = 15.0
"""Time for an agent to end, s."""
ANSWER_S = 20.0
"""Time after a trial's deadline for its supervisor to end ranks on a CPU and to answer, s."""


class HostAgent:
    """Starts a host agent on this machine and sends it jobs. Thread-safe.

    Args:
        imports: modules the agent imports once, for all trials; `also_import` adds to them.
        environment: default values of the environment variables of all trials.

    The agent process starts at once and imports in the background; the first `run` waits for it.
    """

    def __init__(self, imports: Sequence[str] = COMMON_IMPORTS, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment
        self._imports = tuple(dict.fromkeys(imports))
        self._lock = threading.Lock()
        self._closed = False
        self._failure: RunnerError | None = None
        self._running: dict[str, Connection] = {}
        self._stopped: set[str] = set()
        sweep()
        self._start()

    def _start(self) -> None:
        self._awaited = 1  # pending answers, one for each request to import
        self._process = HelperProcess("redline.runners.agent", "agent", environment=self._environment)
        self._address = str(self._process.folder / SOCKET)
        sys_path = tuple(os.path.abspath(each) for each in sys.path)
        self._process.send(AgentSetup(sys_path=sys_path, imports=self._imports))

    def _restart(self) -> None:
        """Replaces an agent that has ended."""
        self._process.close(0)
        self._start()

    @property
    def pid(self) -> int:
        """Process id of the agent."""
        return self._process.pid

    def also_import(self, imports: Sequence[str]) -> None:
        """Makes the agent import further modules in the background. `wait_ready` and `run` wait for that."""
        with self._lock:
            new = tuple(dict.fromkeys(each for each in imports if each not in self._imports))
            if new:
                self._imports += new
                self._awaited += 1
                self._process.send(MoreImports(imports=new))

    def wait_ready(self) -> None:
        """Waits until the agent accepts jobs. An agent that dies before that is restarted, up to `STARTS` starts.

        Raises:
            RunnerError: it could not start. The message contains the end of its output.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._awaited and not self._closed and not self._process.running:
                self._restart()
            starts = 1
            while self._awaited and not self._closed:
                answer = self._start_message()
                if answer is None and not self._closed:
                    how = failure.ended(self._process.ended())
                    if starts == STARTS:
                        text = f"the host agent died {STARTS} times before it was ready ({how})"
                        raise RunnerError(self._process.with_last_words(text))
                    starts += 1
                    self._restart()
                elif answer is not None and "error" in answer:
                    text = f"the host agent did not start: {answer['error']}\n{answer['traceback']}"
                    self._failure = RunnerError(text)  # a restart would fail in the same way
                    raise self._failure
                elif answer is not None:
                    self._awaited -= 1
            if self._closed:
                self._end()  # this agent may have been started while another was being closed
                raise RunnerError("the host agent is closed")

    def _start_message(self) -> dict[str, str | int] | None:
        """Returns the agent's next message about its start; None if it died before."""
        connection = self._process.connection
        active = time.monotonic()
        try:
            # Polls instead of waiting for the connection to close: a process left by an import may keep it open.
            while not connection.poll(POLL_S):
                if not self._process.running and not connection.poll():
                    return None
                now = time.monotonic()
                active = active if _is_stopped(self.pid) else now
                if now - active > BEGIN_S:
                    self._process.kill()
            return connection.recv()
        except (EOFError, ConnectionError):
            return None

    def run(self, job: Job, key: str = "") -> Outcome:
        """Runs a job and returns its outcome. A job with a key can be stopped.

        An agent or supervisor that does not answer in time is killed. The outcome is `timeout` if it was the
        supervisor.

        Raises:
            RunnerError: the agent or the trial's supervisor was lost.
        """
        self.wait_ready()
        if job.log is not None:  # the agent's working directory may differ from this process's
            job = replace(job, log=os.path.abspath(job.log))
        with self._reporting_loss(), self._connect(job) as connection:
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
        """Runs a task in a fork of the agent and returns the connection to it, which closes when the task ends.

        Raises:
            RunnerError: the agent was lost, or does not start.
        """
        self.wait_ready()
        with self._reporting_loss():
            return self._connect(task)

    def _connect(self, request: Job | AgentTask) -> Connection:
        connection = Client(self._address, "AF_UNIX")
        _bound_sending(connection, BEGIN_S)
        connection.send(request)
        return connection

    @contextmanager
    def _reporting_loss(self) -> Iterator[None]:
        """Converts failures to reach the agent to a `RunnerError`."""
        agent = self._process
        try:
            yield
        except (TimeoutError, BlockingIOError) as error:
            agent.kill()
            message = f"the host agent took no job within {BEGIN_S:g} s and was ended"
            raise RunnerError(agent.with_last_words(message)) from error
        except (EOFError, OSError) as error:
            message = "closed" if self._closed else f"lost ({type(error).__name__})"
            raise RunnerError(agent.with_last_words(f"the host agent was {message} during a trial")) from error

    def ended(self, within_s: float = 0.0) -> bool:
        """True if the agent has died, or dies within `within_s`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.process.wait(within_s)
            return True
        return False

    def stop(self, key: str) -> None:
        """Stops the job of this key, or prevents it if it has not arrived yet. `run` returns the outcome so far."""
        with self._lock:
            if key in self._running:
                self._running[key].send(STOP)
            else:
                self._stopped.add(key)

    def close(self) -> None:
        """Ends the agent and all its trials, and waits for that."""
        if self._closed:
            return
        self._closed = True
        self._end()

    def _end(self) -> None:
        if self._awaited:  # it does not read the connection while it imports
            self._process.process.terminate()
        self._process.close(CLOSE_S)


def _answer(connection: Connection, job: Job) -> Outcome:
    """Returns the outcome of a job, waiting no longer than the job may take.

    Raises:
        TimeoutError: the agent did not begin it.
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
            silent = f"its supervisor did not answer for another {patience:g} s and was killed"
            return Outcome(status=Status.TIMEOUT, reason=f"{deadline.reason}; {silent}")
        message: Compiling | Outcome = connection.recv()
        if isinstance(message, Outcome):
            return message
        deadline.compiling(message.yes, time.monotonic())


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _bound_sending(connection: Connection, seconds: float) -> None:
    """Sets a time limit for sends, which fail with BlockingIOError if the peer does not read (`man 7 socket`,
    SO_SNDTIMEO).
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), 0))
