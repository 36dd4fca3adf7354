"""Trials on devices that Ray allocates, of this machine or a cluster."""

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...base.errors import MissingDependency, RunnerError, UsageError
from ...base.option import option
from ...base.scratch import sweep
from ...models import Workload
from ..dispatch import DryRunner
from ..host.process import HelperProcess
from ..host.protocol import Call, Caller
from ..runner import TrialTerms, Work
from ..trial import failure
from ..trial.job import Job, Outcome
from .ray_cluster import DeviceKind, RaySetup, choose_kind
from .ray_driver import JOIN, KINDS, READY, RUN_JOB, START, Joining, PlacedHosts

STARTS = 3
"""Number of starts of a process that dies before it can answer."""
START_S = 300.0
"""Time to join or start Ray and to place trials, s."""
SILENCE_S = 30.0
"""How long Ray may not answer, s; longer than its hosts may (`ray_cluster.ANSWER_S`)."""
CLOSE_S = 20.0
"""Time for Ray to shut down, s."""


class RayRunner(DryRunner):
    """Sends jobs to the process that uses Ray (`ray_driver`), and restarts that process when it is lost.

    Ray starts in the background. `wait_ready` waits for it, and `slots` and `per_host` are known from then on.

    Args:
        what: the workload, or other work.
        terms: devices, limits and deadlines of every trial.
        concurrency: trials at once; by default as many as a Ray started for this run has GPUs for, at most
            `DEFAULT_AT_ONCE` of a cluster, and one on a CPU.
        address: a Ray cluster to join; by default that of this process, `RAY_ADDRESS`, or a Ray started for this run.
        driver: the process that uses Ray, if it was started beforehand, perhaps with trials placed; this runner closes it.
        kind: the devices of a cluster with several kinds of them; None for any.
        patience_s: longest wait for devices that others use, s; None for no limit.
        say: receives what trials wait for.
        warn: receives a sentence about the number of trials at once.

    Raises:
        MissingDependency: ray is not installed.
        UsageError: the address is one of Ray Client.
    """

    name = "ray"

    def __init__(
        self,
        what: Workload | Work,
        terms: TrialTerms,
        *,
        concurrency: int | None = None,
        address: str | None = None,
        driver: "RayDriver | None" = None,
        kind: DeviceKind | None = None,
        patience_s: float | None = None,
        say: Callable[[str], None] = lambda text: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(what, terms)
        self._address, self._say, self._warn = address, say, warn
        self._setup = RaySetup(
            devices=terms.devices,
            cuda=terms.device.type == "cuda",
            accelerator=None if kind is None else kind.accelerator,
            concurrency=concurrency,
            several_hosts=self.work.several_hosts,
            imports=tuple(self.work.imports),
            patience_s=patience_s,
        )
        self._lock = threading.Lock()
        sweep()
        self._driver = driver or RayDriver(address)
        if self._driver.start is None:
            self._driver.place(self._setup)
        self._placed = False

    def wait_ready(self) -> None:
        """Waits until trials can start at once.

        Raises:
            UsageError: the cluster has fewer devices than a trial needs.
            NoRoom: others used the devices for longer than the patience.
            RunnerError: Ray did not start, or placed nothing although devices are free.
        """
        if not self._placed:
            placed = self._wait_placed()
            self.per_host, self.slots, self.waited_s = placed.per_host, placed.slots, placed.waited_s
            self._placed = True
            if placed.note:
                self._warn(placed.note)
            self._setup = replace(self._setup, again=True)
        self._result(self._running().caller.begin(READY, self._setup.imports))

    def _wait_placed(self) -> PlacedHosts:
        """Waits for the first start, which is repeated if the process dies before it can answer."""
        for start in range(1, STARTS + 1):
            placement = self._driver.start
            assert placement is not None
            try:
                placed: PlacedHosts = self._result(placement)
                return placed
            except BaseException as error:
                self._driver.close(0 if self._driver.lost else CLOSE_S)
                if placement.replied or start == STARTS or not isinstance(error, RunnerError) or self.closed:
                    raise
            self._driver = self._driver_again()
        raise AssertionError("unreachable")

    def _driver_again(self) -> "RayDriver":
        """Returns a new process in place of a lost one."""
        driver = RayDriver(self._address)
        driver.place(self._setup)
        return driver

    def dispatch(self, job: Job) -> Outcome:
        outcome: Outcome = self._result(self._running().caller.begin(RUN_JOB, job))
        return outcome

    def _result(self, call: Call) -> Any:
        """Returns the result of a call. Says meanwhile what it waits for."""
        while (waits_for := call.note()) is not None:
            self._say(waits_for)
        return call.result()

    def _running(self) -> "RayDriver":
        """Returns the process once trials are placed. It is restarted if it was lost."""
        with self._lock:
            if self._driver.lost and not self.closed:
                self._driver.close(0)
                self._driver = self._driver_again()
            driver = self._driver
        assert driver.start is not None
        self._result(driver.start)
        return driver

    def close(self) -> None:
        self.closed = True
        self._driver.close(CLOSE_S)
        sweep()  # killed processes could not remove their folders


class RayDriver:
    """The process that uses Ray (`ray_driver`). It joins or starts Ray at once, in the background.

    Args:
        address: a Ray cluster to join; by default that of this process, `RAY_ADDRESS`, or a Ray started for this run.

    Raises:
        MissingDependency: ray is not installed.
        UsageError: the address is one of Ray Client.
    """

    def __init__(self, address: str | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingDependency(
                f"the ray runner needs ray: `pip install ray`, or choose `{option('runner', 'local')}`"
            )
        self._closing = False
        self._process = HelperProcess("redline.runners.place.ray_driver", "ray")
        self.caller = Caller(self._process.connection, self._lost, start_s=START_S, silence_s=SILENCE_S)
        joining = Joining(
            address=cluster_address(address),
            sys_path=tuple(os.path.abspath(entry) for entry in sys.path),
            script=sys.argv[0] if sys.argv else "",
        )
        self.caller.begin(JOIN, joining)
        self.start: Call | None = None
        """The placement of trials, whose result is a `PlacedHosts`; None before `place`. An error that the process replies would
        be that of a restart too."""

    def kinds(self) -> list[DeviceKind]:
        """Returns the kinds of devices of the cluster, those with most devices first.

        Raises:
            RunnerError: the cluster cannot be joined, or a node cannot describe its devices.
        """
        kinds: list[DeviceKind] = self.caller.call(KINDS)
        return kinds

    def place(self, setup: RaySetup) -> None:
        """Begins to place trials; called once, also before the work of the trials is known."""
        self.start = self.caller.begin(START, setup)

    @property
    def lost(self) -> bool:
        """True if it will not answer any more."""
        return self.caller.lost

    def _lost(self, error: Exception) -> str:
        """Ends the process and everything it started. Returns the error text."""
        if self._closing:
            return "the Ray runner was closed during a trial"
        if isinstance(error, EOFError):
            how = failure.ended(self._process.ended())
            reason = self._process.with_last_words(f"Ray was lost: {how}")
        else:
            reason = f"Ray {error}"
        self._process.kill()
        return reason

    def close(self, within_s: float = CLOSE_S) -> None:
        """Ends the process and everything it started. Open calls fail with a `RunnerError`."""
        self._closing = True
        self._process.close(within_s)
        self.caller.close()


def kind_of_cluster(address: str | None, preferred: str | None = None) -> DeviceKind | None:
    """Returns the kind of devices to use of a Ray cluster; None if there is no cluster to join (`cluster_address`).

    Args:
        address: of the cluster.
        preferred: name of devices that are used if the cluster has them; otherwise, or for None, those that it has most of.

    Raises:
        RunnerError: the cluster cannot be joined, or a node cannot describe its devices.
    """
    if cluster_address(address) is None:
        return None
    with contextlib.closing(RayDriver(address)) as driver:
        kinds = driver.kinds()
    return choose_kind(kinds, preferred if any(kind.device.name == preferred for kind in kinds) else None)


def cluster_address(address: str | None) -> str | None:
    """Returns the address of the Ray cluster to join: the given one, that of the cluster that this process has joined or
    started, or `RAY_ADDRESS`; None to start Ray.

    Raises:
        UsageError: the address is one of Ray Client.
    """
    cluster = address or _joined() or os.environ.get("RAY_ADDRESS") or None
    if cluster is not None and cluster.startswith("ray://"):
        raise UsageError(
            f"{cluster} is an address of Ray Client, whose connection ends a search when it is interrupted for half a minute. "
            "Give the head's address, such as HOST:6379, on a host that `ray start --address=HOST:6379 --num-cpus 0 "
            "--num-gpus 0` has made a node of the cluster"
        )
    return None if cluster == "local" else cluster


def _joined() -> str | None:
    """Returns the address of the Ray cluster that this process has joined or started; None if there is none."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return ray.get_runtime_context().gcs_address
