"""Trials on devices that Ray hands out: this machine's, or a cluster's."""

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
"""How often it is started before it can answer."""
START_S = 300.0
"""How long joining or starting Ray and placing trials may take, s."""
SILENCE_S = 20.0
"""How long Ray, or a host of it, may leave unanswered whether it lives, s."""
CLOSE_S = 20.0
"""How long Ray may take to end in good order, s."""


class RayRunner(DryRunner):
    """Sends jobs to the process that speaks to Ray (`ray_driver`), and starts another when that one is lost.

    Args:
        what: the workload that is trained, or other work.
        terms: devices, limits and deadlines of every trial.
        concurrency: trials at once; by default devices present over devices a trial, and one on a CPU.
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
        """Starts the process, again where it dies before it can answer."""
        for start in range(1, STARTS + 1):
            self._link = _Link(self._setup)
            try:
                return self._link.answers[0].result()
            except BaseException as error:
                self._link.close(0 if self._link.lost else CLOSE_S)
                if self._link.refused or start == STARTS or not isinstance(error, RunnerError):
                    raise
        raise AssertionError("unreachable")

    def wait_ready(self) -> None:
        """Returns when the first trial would start at once."""
        self._asked(READY).result()

    def dispatch(self, job: Job) -> Outcome:
        return self._asked(job).result()

    def _asked(self, what: Job | str) -> Future[Any]:
        """What will be answered: an `Outcome` to a job."""
        with self._lock:
            if self._link.lost and not self.closed:
                self._link.close(0)
                self._link = _Link(self._setup)
            link = self._link
        link.answers[0].result()
        return link.ask(next(self._numbers), what)

    def close(self) -> None:
        self.closed = True
        self._link.close(CLOSE_S)
        sweep()  # what was killed could not remove its own


class _Link:
    """One life of the process that speaks to Ray."""

    def __init__(self, setup: RaySetup) -> None:
        self._process = HelperProcess("redline.runners.ray_driver", "ray")
        self._process.send(setup)
        self._lock = threading.Lock()
        self._why = ""
        self.refused = False
        """Whether it said why it does not start, as it would again."""
        self._closing = False
        self.answers: dict[int, Future[Any]] = {0: Future()}
        """What was asked and is not answered yet; under 0 whether it started."""
        self._reader = threading.Thread(target=self._read, daemon=True, name="ray")
        self._reader.start()

    @property
    def lost(self) -> bool:
        """Whether it will answer nothing more."""
        return bool(self._why)

    def ask(self, number: int, what: Job | str) -> Future[Any]:
        """The answer to a request, to come."""
        made: Future[Any] = Future()
        with self._lock:
            if self._why:
                made.set_exception(RunnerError(self._why))
                return made
            self.answers[number] = made
            self._process.send((number, what))
        return made

    def _read(self) -> None:
        """Hands out answers until there are no more."""
        connection, patience = self._process.connection, START_S
        why = ""
        try:
            while not why:
                if not connection.poll(patience):
                    why = f"Ray has not answered for {patience:g} s"
                    break
                said: Reply | Alive = connection.recv()
                if isinstance(said, Alive):
                    patience = SILENCE_S
                    continue
                answer = self.answers[0] if said.request == 0 else self.answers.pop(said.request)
                if said.error is None:
                    answer.set_result(said.value)
                else:
                    self.refused |= said.request == 0
                    answer.set_exception(said.error)
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
        """Ends it with all that it started; what is not answered yet is a `RunnerError`."""
        self._closing = True
        self._process.close(within_s)
        self._reader.join()


def _joined() -> str | None:
    """The Ray cluster that this process has joined or started by itself, if any."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return ray.get_runtime_context().gcs_address
