"""The client's side of a host agent."""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path

from ..errors import RunnerError
from .agent import AgentSetup
from .job import STOP, Job, Outcome


COMMON_IMPORTS = (
    "torch",
    "transformers",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "redline.schedule",
    "redline.models.families",
    "redline.models.training",
    "redline.runners.dry_run",
)
"""What most trials would import by themselves, which takes seconds; in the agent it is done once."""


class HostAgent:
    """Starts a host agent on this machine and sends it jobs. Thread-safe.

    Args:
        imports: modules the agent imports once, for all trials.

    The agent process starts at once and imports in the background; the first `run` waits for it.
    """

    def __init__(self, imports: Sequence[str] = ()) -> None:
        self._imports = tuple(dict.fromkeys([*COMMON_IMPORTS, *imports]))
        self._lock = threading.Lock()
        self._closed = False
        self._running: dict[str, Connection] = {}
        self._stopped: set[str] = set()
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="redline-agent-")
        self._ready = False
        setup = AgentSetup(
            address=os.path.join(self._folder, "socket"),
            sys_path=tuple(os.path.abspath(each) for each in sys.path),
            imports=self._imports,
        )
        self._address = setup.address
        with open(os.path.join(self._folder, "stderr"), "wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "redline.runners.agent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                # OpenMP threads that spin while they wait make a step ten times slower as soon as anything
                # else runs on the machine; asleep they cost nothing that can be measured on a quiet one.
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            )
        try:
            pickle.dump(setup, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RunnerError(self._why("the host agent ended at once")) from None

    @property
    def pid(self) -> int:
        """Process id of the agent."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Returns when the agent takes jobs.

        Raises:
            RunnerError: it could not start; the message holds its last words.
        """
        with self._lock:
            if self._closed:
                raise RunnerError("the host agent is closed")
            if self._process.poll() is not None and self._ready:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._start()
            if self._ready:
                return
            try:
                message = pickle.load(self._process.stdout)
            except (EOFError, pickle.UnpicklingError):
                raise RunnerError(self._why("the host agent did not start")) from None
            if "error" in message:
                raise RunnerError(f"the host agent did not start: {message['error']}\n{message['traceback']}")
            self._ready = True

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
        self._process.stdin.close()  # what the agent takes as its end
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _why(self, what: str) -> str:
        path = Path(self._folder, "stderr")
        words = path.read_text(errors="replace").strip() if path.exists() else ""
        return f"{what}\n{words[-2000:]}" if words else what
