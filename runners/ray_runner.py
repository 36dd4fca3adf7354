"""Trials on devices that Ray hands out: this machine's, or a cluster's."""

import contextlib
import os
import queue
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import MissingDependency, RunnerError, UsageError
from ..models import Workload
from ..results import Status
from .dispatch import DryRunner, TrialTerms
from .job import Job, Outcome
from .ray_gang import Gang, HostActor, Layout, lay_out
from .work import Work

PLACEMENT_TIMEOUT_S = 60.0
MEETINGS = 3
"""How often the ranks of a trial try to meet, each time at another port."""
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")


class RayRunner(DryRunner):
    """A placement group for each trial at once, with a host agent on each of its hosts.

    A trial is on one host where one has enough devices, and else on as few as will do, with as many ranks on
    each; ranks are numbered host by host, so that tensor-parallel ranks are neighbours on a host.

    Args:
        what: the workload that is trained, or other work.
        terms: devices, limits and deadlines of every trial.
        concurrency: trials at once; by default devices present over devices a trial, and one on a CPU.
        address: a Ray cluster to join; by default `RAY_ADDRESS`, or a Ray started here for this run.

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
        self._ray = _import_ray()
        self._groups: list[Any] = []
        self._gangs: dict[int, Gang] = {}
        self._entered_ray = self._connect(address)
        try:
            self._layout = self._lay_out()
            self.per_host = self._layout.per_host
            self.slots = self._count_slots(concurrency)
            self._place()
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str | None) -> bool:
        """Joins or starts Ray; whether this process was not in it before."""
        if self._ray.is_initialized():
            return False
        address = address or os.environ.get("RAY_ADDRESS") or None
        if address is not None:
            _check_listens(address)
        # Ray's usage report and log lines are its own; a tuning run prints neither.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if address is None:
            options |= {"address": "local", "include_dashboard": False}
        else:
            options["address"] = address
        try:
            with warnings.catch_warnings(), _own_signals():
                warnings.simplefilter("ignore")
                self._ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            what = f"joining the Ray cluster at {address!r}" if address else "starting Ray on this machine"
            raise RunnerError(f"{what} failed: {error}. `--runner local` works without Ray.") from error
        return True

    def _lay_out(self) -> Layout:
        terms = self.terms
        kind = "GPU" if terms.device.type == "cuda" else "CPU"
        nodes = [each["Resources"] for each in self._ray.nodes() if each["Alive"]]
        layout = lay_out(terms.devices, kind == "GPU", [each.get(kind, 0) for each in nodes])
        if layout is None:
            shares = " + ".join(f"{each.get(kind, 0):g}" for each in nodes)
            raise UsageError(
                f"a trial needs {terms.devices} devices, as many on each of its hosts, but the Ray cluster has "
                f"{shares} {kind}s"
            )
        if layout.hosts > 1 and not self.work.several_hosts:
            raise UsageError(
                f"a callable is one process on one host, but no host of the Ray cluster has {terms.devices} "
                f"{kind}s ({shares}); ask for fewer devices"
            )
        return layout

    def _count_slots(self, concurrency: int | None) -> int:
        cuda = self.terms.device.type == "cuda"
        kind = "GPU" if cuda else "CPU"
        possible = self._layout.at_once
        if concurrency is None:
            return possible if cuda else 1
        if concurrency > possible:
            raise UsageError(
                f"{concurrency} trials at once need {concurrency * self.terms.devices} {kind}s, "
                f"but the Ray cluster has {int(self._ray.cluster_resources().get(kind, 0))}"
            )
        return concurrency

    def _place(self) -> None:
        from ray.util.placement_group import placement_group

        layout = self._layout
        bundles = [dict(layout.bundle) for _ in range(layout.hosts)]
        strategy = "STRICT_PACK" if layout.hosts == 1 else "STRICT_SPREAD"
        self._groups = [placement_group(bundles, strategy=strategy) for _ in range(self.slots)]
        end = time.monotonic() + PLACEMENT_TIMEOUT_S
        for group in self._groups:
            if not group.wait(timeout_seconds=max(1.0, end - time.monotonic())):
                raise RunnerError(
                    f"Ray placed only some of {self.slots} groups of {bundles} within {PLACEMENT_TIMEOUT_S:g} s; "
                    f"free resources: {self._ray.available_resources()}"
                )
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(self.slots):
            self._gangs[slot] = self._gang(slot)
            self._free.put(slot)

    def _gang(self, slot: int) -> Gang:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        layout = self._layout
        actors = []
        for host in range(layout.hosts):
            make = self._ray.remote(HostActor).options(
                num_cpus=layout.bundle["CPU"],
                num_gpus=layout.bundle.get("GPU", 0),
                # A trial is stopped while it runs.
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._groups[slot], placement_group_bundle_index=host
                ),
            )
            actors.append(make.remote(self.work.imports))
        return Gang(actors, layout.per_host)

    def wait_ready(self) -> None:
        """Returns when the first trial would start at once."""
        self._watched(0, self._gangs[0].wait_ready)

    def dispatch(self, job: Job) -> Outcome:
        slot = self._free.get()
        try:
            for _ in range(MEETINGS):
                outcome = self._watched(slot, lambda: self._gangs[slot].run(job))
                met = self._layout.hosts == 1 or not _PORT_TAKEN.search(outcome.reason)
                if outcome.status is not Status.CRASH or met:
                    return outcome
            raise RunnerError(f"the ports of a trial's rendezvous were taken {MEETINGS} times: {outcome.reason}")
        finally:
            self._free.put(slot)

    def _watched(self, slot: int, call: Callable[[], Any]) -> Any:
        exceptions = self._ray.exceptions
        try:
            return call()
        except exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from error
        except (exceptions.RayActorError, exceptions.RaySystemError, TimeoutError) as error:
            if self.closed:
                raise RunnerError("the Ray runner was closed during a trial") from error
            self._gangs[slot].kill()
            self._gangs[slot] = self._gang(slot)
            raise RunnerError(f"Ray lost the host of a trial: {failure_line(error)}") from error

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        from ray.util.placement_group import remove_placement_group

        if not self._ray.is_initialized():
            return
        for gang in self._gangs.values():
            gang.kill()
        for group in self._groups:
            remove_placement_group(group)
        if self._entered_ray:
            self._ray.shutdown()  # a Ray that was joined runs on


def failure_line(error: BaseException) -> str:
    """The first line of a Ray error, which can run over pages."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _check_listens(address: str) -> None:
    """Asks within seconds what Ray would ask for minutes: whether anything listens there.

    Raises:
        RunnerError: nothing does.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return  # such as "auto", which Ray resolves itself
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise RunnerError(
            f"joining the Ray cluster at {address!r} failed: {error}. `--runner local` works without Ray."
        ) from error


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps this process's answers to signals: Ray puts its own in their place, which end the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingDependency(
            "the ray runner needs ray: `pip install ray`, or choose `--runner local`"
        ) from error
    return ray
