"""Trials on devices that Ray hands out: this machine's, or a cluster's."""

import contextlib
import os
import queue
import signal
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import MissingDependency, RunnerError, UsageError
from ..models import Workload
from .dispatch import DryRunner, TrialTerms
from .host import HostAgent
from .job import Job, Outcome

PLACEMENT_TIMEOUT_S = 60.0


class _HostActor:
    """A host agent inside a Ray worker that holds the devices of one placement group."""

    def __init__(self, imports: tuple[str, ...]) -> None:
        self._agent = HostAgent(imports)

    def node_id(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def wait_ready(self) -> None:
        self._agent.wait_ready()

    def run(self, job: Job, send_log: bool) -> tuple[Outcome, bytes]:
        """The outcome and, on a host that does not share the driver's disk, the log."""
        import ray

        ids = tuple(str(each) for each in ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
        job = replace(job, device_ids=ids)
        if not send_log or job.log is None:
            return self._agent.run(job), b""
        with tempfile.TemporaryDirectory(prefix="redline-log-") as folder:
            path = Path(folder, "log")
            outcome = self._agent.run(replace(job, log=str(path)))
            return outcome, path.read_bytes() if path.exists() else b""


class RayRunner(DryRunner):
    """One host agent in each placement group; as many groups as the cluster's devices allow.

    Args:
        workload: what is trained.
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
        workload: Workload,
        terms: TrialTerms,
        *,
        concurrency: int | None = None,
        address: str | None = None,
    ) -> None:
        super().__init__(workload, terms)
        self._ray = _import_ray()
        self._imports = tuple(workload.imports)
        self._groups: list[Any] = []
        self._actors: dict[int, Any] = {}
        self._started_ray = self._connect(address)
        try:
            self.slots = self._count_slots(concurrency)
            self._place()
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str | None) -> bool:
        """Joins or starts Ray; whether it was started here."""
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
        return address is None

    def _count_slots(self, concurrency: int | None) -> int:
        terms = self.terms
        cuda = terms.device.type == "cuda"
        kind = "GPU" if cuda else "CPU"
        present = int(self._ray.cluster_resources().get(kind, 0))
        if cuda and present < terms.devices:
            raise UsageError(
                f"a trial needs {terms.devices} devices, but the Ray cluster has {present} GPUs"
            )
        possible = max(1, present // terms.devices)
        if concurrency is None:
            return possible if cuda else 1
        if concurrency > possible:
            raise UsageError(
                f"{concurrency} trials at once need {concurrency * terms.devices} {kind}s, "
                f"but the Ray cluster has {present}"
            )
        return concurrency

    def _place(self) -> None:
        from ray.util.placement_group import placement_group

        terms = self.terms
        bundle = {"CPU": 1.0}
        if terms.device.type == "cuda":
            bundle = {"CPU": 1.0, "GPU": float(terms.devices)}
        self._bundle = bundle
        self._groups = [placement_group([bundle], strategy="STRICT_PACK") for _ in range(self.slots)]
        end = time.monotonic() + PLACEMENT_TIMEOUT_S
        for group in self._groups:
            if not group.wait(timeout_seconds=max(1.0, end - time.monotonic())):
                raise RunnerError(
                    f"Ray placed only some of {self.slots} groups of {bundle} within {PLACEMENT_TIMEOUT_S:g} s; "
                    f"free resources: {self._ray.available_resources()}"
                )
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(self.slots):
            self._actors[slot] = self._actor(slot)
            self._free.put(slot)

    def _actor(self, slot: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        make = self._ray.remote(_HostActor).options(
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._groups[slot]),
        )
        return make.remote(self._imports)

    def wait_ready(self) -> None:
        """Returns when the first trial would start at once."""
        self._get(0, self._actors[0].wait_ready.remote())

    def dispatch(self, job: Job) -> Outcome:
        slot = self._free.get()
        try:
            actor = self._actors[slot]
            here = self._ray.get_runtime_context().get_node_id()
            send_log = self._get(slot, actor.node_id.remote()) != here
            outcome, log = self._get(slot, actor.run.remote(job, send_log))
            if log:
                Path(job.log).parent.mkdir(parents=True, exist_ok=True)
                Path(job.log).write_bytes(log)
            return outcome
        finally:
            self._free.put(slot)

    def _get(self, slot: int, future: Any) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(future)
        except exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from error
        except (exceptions.RayActorError, exceptions.RaySystemError) as error:
            if self.closed:
                raise RunnerError("the Ray runner was closed during a trial") from error
            self._actors[slot] = self._actor(slot)
            raise RunnerError(f"Ray lost the host of a trial: {failure_line(error)}") from error

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        from ray.util.placement_group import remove_placement_group

        if not self._ray.is_initialized():
            return
        for actor in self._actors.values():
            self._ray.kill(actor)  # its agent ends with it, and every trial with the agent
        for group in self._groups:
            remove_placement_group(group)
        if self._started_ray:
            self._ray.shutdown()


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
