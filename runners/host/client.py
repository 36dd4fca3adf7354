"""Starts a host agent and sends it jobs."""

import os
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Client

import psutil

from ...base.errors import RedlineError, RunnerError
from ...base.scratch import sweep
from ...results import Status
from ..trial import failure
from ..trial.job import TEARDOWN_S, Begun, Compiling, Job, Outcome
from ..trial.memory import WAIT_S
from .agent import IMPORT, RUN_JOB, SOCKET, START, AgentSetup
from .process import Deadline, HelperProcess, kill_tree
from .protocol import Call, Caller, RemoteError

PLAIN_IMPORTS = (
    "torch",
    "transformers",
    "torch._dynamo",
    "redline.schedule",
    "redline.models.families",
    "redline.training.training",
    "redline.runners.trial.dry_run",
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
        self._running: dict[str, Call] = {}
        self._stopped: set[str] = set()
        self._left_out: set[str] = set()
        sweep()
        self._start()

    def _start(self) -> None:
        self._process = HelperProcess("redline.runners.host.agent", "agent", environment=self._environment)
        self._address = str(self._process.folder / SOCKET)
        self._caller = Caller(self._process.connection, lambda error: "the host agent was lost")
        sys_path = tuple(os.path.abspath(entry) for entry in sys.path)
        self._imports_begun = [self._caller.begin(START, AgentSetup(sys_path=sys_path, imports=self._imports))]

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
            requested = self._left_out.union(self._imports)
            new = tuple(dict.fromkeys(module for module in imports if module not in requested))
            if new:
                self._imports += new
                self._imports_begun.append(self._caller.begin(IMPORT, new))

    def wait_ready(self) -> None:
        """Waits until the agent accepts jobs. An agent that dies before that is restarted, up to `STARTS` starts.

        Raises:
            RunnerError: it could not start. The message contains the end of its output.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._imports_begun and not self._closed and not self._process.running:
                self._restart()
            starts = 1
            while self._imports_begun and not self._closed:
                if self._imported(self._imports_begun[0]):
                    del self._imports_begun[0]
                elif not self._closed:
                    ending = failure.ended(self._process.ended())
                    if starts == STARTS:
                        message = f"the host agent died {STARTS} times before it was ready ({ending})"
                        raise RunnerError(self._process.with_last_words(message))
                    starts += 1
                    self._restart()
            if self._closed:
                self._end()  # this agent may have been started while another was being closed
                raise RunnerError("the host agent is closed")

    def _imported(self, call: Call) -> bool:
        """Waits until the agent has imported modules. Returns False if it died before.

        An agent with a module that initialises CUDA is replaced by one without it; each trial then imports it itself.

        Raises:
            RunnerError: an import failed.
        """
        active = time.monotonic()
        # Polls instead of waiting for the connection to close: a process left by an import may keep it open.
        while True:
            running = self._process.running
            try:
                initialises_cuda: str | None = call.result(POLL_S)
                if initialises_cuda is None:
                    return True
                position = self._imports.index(initialises_cuda)
                self._left_out.update(self._imports[position:])  # what follows may import it as well
                self._imports = self._imports[:position]
                warnings.warn(
                    f"importing {initialises_cuda} initialises CUDA, so each trial imports it itself, which takes longer. "
                    "Move the code that needs the device (a tensor on 'cuda', torch.cuda.get_device_name, ...) from the "
                    "module into a function",
                    RuntimeWarning,
                    stacklevel=2,
                )
                self._restart()
                (call,), active = self._imports_begun, time.monotonic()
                continue
            except TimeoutError:
                if not running:
                    return False
            except RedlineError as error:
                if not call.replied:
                    return False
                message = str(error)
                if not isinstance(error, RemoteError):
                    message = f"{type(error).__name__}: {message}\n{error.__cause__}"
                self._failure = RunnerError(f"the host agent did not start: {message}")  # a restart would fail as well
                raise self._failure from None
            now = time.monotonic()
            active = active if _is_stopped(self.pid) else now
            if now - active > BEGIN_S:
                self._process.kill()

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
        call = self._begin(job)
        with self._lock:
            self._running[key] = call
            if key in self._stopped:
                call.cancel()
        try:
            return _outcome(call, job)
        except TimeoutError:
            raise self._end_idle_agent() from None
        finally:
            with self._lock:
                self._running.pop(key, None)
                self._stopped.discard(key)
            call.caller.close()

    def _begin(self, job: Job) -> Call:
        """Sends a job to a fork of the agent over a connection of its own."""
        try:
            connection = Client(self._address, "AF_UNIX")
        except OSError as error:
            raise RunnerError(self._lost(error)) from error
        with socket.socket(fileno=os.dup(connection.fileno())) as sender:
            # A send then fails with BlockingIOError if the agent does not read (`man 7 socket`).
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(BEGIN_S), 0))
        return Caller(connection, self._lost).begin(RUN_JOB, job)

    def _lost(self, error: Exception) -> str:
        """Returns the error text of a connection that failed."""
        if isinstance(error, BlockingIOError):
            return str(self._end_idle_agent())
        state = "closed" if self._closed else f"lost ({type(error).__name__})"
        return self._process.with_last_words(f"the host agent was {state} during a trial")

    def _end_idle_agent(self) -> RunnerError:
        """Ends an agent that does not begin a job and returns the error."""
        self._process.kill()
        message = f"the host agent took no job within {BEGIN_S:g} s and was ended"
        return RunnerError(self._process.with_last_words(message))

    def stop(self, key: str) -> None:
        """Stops the job of this key, or prevents it if it has not arrived yet. `run` returns the outcome so far."""
        with self._lock:
            if key in self._running:
                self._running[key].cancel()
            else:
                self._stopped.add(key)

    def close(self) -> None:
        """Ends the agent and all its trials, and waits for that."""
        if self._closed:
            return
        self._closed = True
        self._end()

    def _end(self) -> None:
        if self._imports_begun:  # it does not read the connection while it imports
            self._process.process.terminate()
        self._process.close(CLOSE_S)


def _outcome(call: Call, job: Job) -> Outcome:
    """Returns the outcome of a job, waiting no longer than the job may take.

    Raises:
        TimeoutError: the agent did not begin it.
    """
    started: Begun | None = call.note(BEGIN_S)
    if started is None:  # lost
        call.result()
    assert started is not None
    deadline = Deadline(time.monotonic(), job.timeout_s, job.compile_timeout_s)
    while True:
        # The supervisor's deadline begins when the memory of earlier trials is free.
        patience_s = ANSWER_S + job.teardown_s - TEARDOWN_S + (WAIT_S if job.on_gpus else 0.0)
        remaining_s = None if job.timeout_s is None else max(0.0, deadline.at + patience_s - time.monotonic())
        try:
            note: Compiling | None = call.note(remaining_s)
        except TimeoutError:
            kill_tree(started.supervisor)
            unanswered = f"its supervisor did not answer for another {patience_s:g} s and was killed"
            return Outcome(status=Status.TIMEOUT, reason=f"{deadline.reason}; {unanswered}")
        if note is None:
            outcome: Outcome = call.result()
            return outcome
        deadline.compiling(note.yes, time.monotonic())


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
