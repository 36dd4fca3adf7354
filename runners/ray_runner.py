"""Trials on devices that Ray allocates, of this machine or a cluster."""

import importlib.util
import itertools
import os
import sys
import threading
from concurrent.futures import Future
from typing import Any

from ..base.errors import MissingDependency, RunnerError
from ..base.scratch import sweep
from ..models import Workload
from . import failure
from .dispatch import DryRunner
from .helper_process import HelperProcess
from .job import Job, Outcome
from .ray_driver import READY, Alive, Placed, RaySetup, Reply
from .work import TrialTerms, Work

STARTS = 3
"""Number of starts of a process that dies before it can answer."""
START_S = 300.0
"""Time to join or start Ray and to place trials, s."""
SILENCE_S = 20.0
"""How long Ray or a host may not answer, s."""
CLOSE_S = 20.0
"""Time for Ray to shut down, s."""


class RayRunner(DryRunner):
    """Sends jobs to the process that uses Ray (`ray_driver`), and restarts that process when it is lost.

    Args:
        what: the workload, or other work.
        terms: devices, limits and deadlines of every trial.
        concurrency: trials at once; by default the number of devices over the devices of a trial, and one on a CPU.
        address: a Ray cluster to join; by default that of this process, `RAY_ADDRESS`, or a Ray started for this run.

    Raises:
        MissingDependency: ray is not installed.
        UsageError: the cluster has fewer devices than a trial needs.
        RunnerError: Ray did not start, or placed nothing within a minute.
    """

    name = "ray"

    def __init__(
        self,
        what: Workload | Work,
        terms: TrialTerms,
        *,
        concurrency: int | None = None,
        address: str | None = None,
    ) -> None:
        super().__init__(what, terms)
        if importlib.util.find_spec("ray") is None:
            raise MissingDependency("the ray runner needs ray: `pip install ray`, or choose `--runner local`")
        self._setup = RaySetup(
            address=address or _joined() or os.environ.get("RAY_ADDRESS") or None,
            devices=terms.devices,
            cuda=terms.device.type == "cuda",
            concurrency=concurrency,
            several_hosts=self.work.several_hosts,
            imports=tuple(self.work.imports),
            sys_path=tuple(os.path.abspath(each) for each in sys.path),
            script=sys.argv[0] if sys.argv else "",
        )
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        sweep()
        placed = self._start()
        self.per_host, self.slots = placed.per_host, placed.slots

    def _start(self) -> Placed:
        """Starts the process, again if it dies before it can answer."""
        for start in range(1, STARTS + 1):
            self._driver = _Driver(self._setup)
            try:
                return self._driver.answers[0].result()
            except BaseException as error:
                self._driver.close(0 if self._driver.lost else CLOSE_S)
                if self._driver.refused or start == STARTS or not isinstance(error, RunnerError):
                    raise
        raise AssertionError("unreachable")

    def wait_ready(self) -> None:
        """Waits until trials can start at once."""
        self._request(READY).result()

    def dispatch(self, job: Job) -> Outcome:
        return self._request(job).result()

    def _request(self, request: Job | str) -> Future[Any]:
        """Sends a request and returns the future of its result: an `Outcome` for a job."""
        with self._lock:
            if self._driver.lost and not self.closed:
                self._driver.close(0)
                self._driver = _Driver(self._setup)
            driver = self._driver
        driver.answers[0].result()
        return driver.ask(next(self._numbers), request)

    def close(self) -> None:
        self.closed = True
        self._driver.close(CLOSE_S)
        sweep()  # killed processes could not remove their folders


class _Driver:
    """One process that uses Ray."""

    def __init__(self, setup: RaySetup) -> None:
        self._process = HelperProcess("redline.runners.ray_driver", "ray")
        self._process.send(setup)
        self._lock = threading.Lock()
        self._why = ""
        self.refused = False
        """True if it reported why it does not start, so that a restart would fail as well."""
        self._closing = False
        self.answers: dict[int, Future[Any]] = {0: Future()}
        """Results of unanswered requests. The one under 0 is that of the start."""
        self._reader = threading.Thread(target=self._read, daemon=True, name="ray")
        self._reader.start()

    @property
    def lost(self) -> bool:
        """True if it will not answer any more."""
        return bool(self._why)

    def ask(self, number: int, request: Job | str) -> Future[Any]:
        """Sends a request and returns the future of its result."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._why:
                answer.set_exception(RunnerError(self._why))
                return answer
            self.answers[number] = answer
            self._process.send((number, request))
        return answer

    def _read(self) -> None:
        """Assigns answers to their requests until the process ends."""
        connection, patience = self._process.connection, START_S
        why = ""
        try:
            while not why:
                if not connection.poll(patience):
                    why = f"Ray has not answered for {patience:g} s"
                    break
                message: Reply | Alive = connection.recv()
                if isinstance(message, Alive):
                    patience = SILENCE_S
                    continue
                answer = self.answers[0] if message.request == 0 else self.answers.pop(message.request)
                if message.error is None:
                    answer.set_result(message.value)
                else:
                    self.refused |= message.request == 0
                    answer.set_exception(message.error)
        except (EOFError, OSError):
            if not self._closing:
                how = failure.ended(self._process.ended())
                why = self._process.with_last_words(f"Ray was lost: {how}")
        if self._closing:
            why = "the Ray runner was closed during a trial"
        else:
            self._process.kill()
        with self._lock:
            self._why = why
            left = [each for each in self.answers.values() if not each.done()]
        for each in left:
            each.set_exception(RunnerError(why))

    def close(self, within_s: float) -> None:
        """Ends the process and everything it started. Unanswered requests fail with a `RunnerError`."""
        self._closing = True
        self._process.close(within_s)
        self._reader.join()


def _joined() -> str | None:
    """Returns the address of the Ray cluster that this process has joined or started; None if there is none."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return ray.get_runtime_context().gcs_address
