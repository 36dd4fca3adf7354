"""The hosts of one trial: the number of devices on each, a host agent on each, and their combined outcome."""

import contextlib
import queue
import random
import re
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.errors import RunnerError
from ..base.scratch import Scratch
from ..results import Status
from .host import HostAgent
from .job import Job, Outcome, Rendezvous

ECHO_S = 0.5
"""Time after the first host's failure for others to report theirs, to tell the cause from its consequences, s."""
PORTS = range(20_000, 32_768)
"""Ports for the rendezvous of several hosts: above the ports of Ray's workers, below those of outgoing connections."""
CLOSE_S = 10.0
"""Time for agents to end, s."""
MEETINGS = 3
"""Number of attempts at a rendezvous, each on another port."""
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
STOP_S = 10.0
"""Time for a host to stop its ranks and answer, without that for their processes to end, s."""


class Host(ABC):
    """A host agent with the host's devices allocated to it."""

    def __init__(self, imports: tuple[str, ...]) -> None:
        self._agent = HostAgent(imports)

    @abstractmethod
    def address(self) -> str:
        """Returns the address at which other hosts reach this one."""

    def device_ids(self) -> tuple[str, ...]:
        """Returns the allocated CUDA devices; empty for all that are visible."""
        return ()

    def wait_ready(self) -> None:
        """Waits until the agent accepts jobs."""
        self._agent.wait_ready()

    def meeting_point(self) -> tuple[str, int]:
        """Returns this host's address and a port on it that was free just now."""
        address = self.address()
        return address, free_port(address)

    def run(self, job: Job, key: str, send_log: bool) -> tuple[Outcome, bytes]:
        """Returns the outcome and, on a host that does not share the driver's disk, the log."""
        if job.rendezvous.port:
            job = replace(job, rendezvous=replace(job.rendezvous, interface=interface_of(self.address())))
        job = replace(job, device_ids=job.device_ids or self.device_ids())
        if not send_log or job.log is None:
            return self._agent.run(job, key), b""
        with Scratch("log") as folder:
            path = folder / "log"
            outcome = self._agent.run(replace(job, log=str(path)), key)
            return outcome, path.read_bytes() if path.exists() else b""

    def stop(self, key: str) -> None:
        """Stops the job of this key. `run` then returns the outcome so far."""
        self._agent.stop(key)

    def answer(self) -> None:
        """Does nothing; used to check that the host is alive."""

    def close(self) -> None:
        """Ends the agent and everything it started."""
        self._agent.close()


class HostWorker(ABC):
    """A handle of a `Host` on any machine. Thread-safe."""

    here = False
    """True if it is on this machine."""

    @abstractmethod
    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the host and returns or raises its result. If the host was lost, raises the error of the
        system that placed it.
        """

    @abstractmethod
    def kill(self) -> None:
        """Ends the host and its trials."""


def free_port(address: str) -> int:
    """Returns a free port out of those that systems do not assign to outgoing connections. Ports assigned by the
    system are often taken shortly afterwards by processes with many connections, such as Ray.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Independent of the global seed, which other searches may share.
    for port in random.Random().sample(PORTS, len(PORTS)):
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise RunnerError(f"no port from {PORTS[0]} to {PORTS[-1]} is free on {address}")


def interface_of(address: str) -> str:
    """Returns the network interface that has this address; empty if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return ""


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a trial's ranks on hosts."""

    hosts: int
    """Hosts of a trial."""
    per_host: int
    """Ranks, and therefore devices, on each host."""
    bundle: dict[str, float]
    """Resources that Ray reserves on each host."""
    at_once: int
    """Number of trials that fit on the cluster."""


def lay_out(devices: int, cuda: bool, capacities: Sequence[float]) -> Layout | None:
    """Returns the layout of a trial on the fewest hosts, so that ranks that communicate most are on one; None if it
    does not fit.

    On CPUs a trial that needs more cores than the cluster has runs on one host, whose cores its ranks share.

    Args:
        devices: ranks of a trial.
        cuda: whether a rank needs a GPU or a core.
        capacities: GPUs or cores of each host.
    """
    kind = "GPU" if cuda else "CPU"
    for hosts in range(1, devices + 1):
        if devices % hosts:
            continue
        each = devices // hosts
        rooms = [int(capacity) // each for capacity in capacities]
        # A host with room for two shares is not counted twice: layouts with fewer hosts are tried first.
        at_once = sum(rooms) if hosts == 1 else sum(room > 0 for room in rooms) // hosts
        if at_once:
            bundle = {"CPU": 1.0, "GPU": float(each)} if cuda else {kind: float(each)}
            return Layout(hosts=hosts, per_host=each, bundle=bundle, at_once=at_once)
    if cuda:
        return None
    return Layout(hosts=1, per_host=devices, bundle={"CPU": 1.0}, at_once=1)


class WorkerGroup:
    """The agents of one trial in the order of ranks, one per host. Trials run on them one after the other."""

    def __init__(self, workers: Sequence[HostWorker], per_host: int) -> None:
        self.workers = list(workers)
        self._per_host = per_host
        self._ready = False

    def wait_ready(self) -> None:
        """Waits until all agents accept jobs."""
        self._all("wait_ready")
        self._ready = True

    def wait_placed(self) -> None:
        """Waits until all hosts are placed, whether or not their agents are ready."""
        self._all("answer")

    def answer(self, within_s: float) -> None:
        """Waits until all hosts have answered, which a suspended one does not. Returns at once before they are ready.

        Raises:
            TimeoutError: a host has not answered in time.
        """
        if self._ready:
            self._all("answer", within_s)

    def run(self, job: Job) -> Outcome:
        """Runs a job on all hosts and returns its outcome. The first failure on one stops the others.

        Raises:
            RunnerError: the rendezvous port was taken in all attempts.
        """
        if not self._ready:
            self.wait_ready()
        for _ in range(MEETINGS):
            outcome = self._run(job)
            connected = len(self.workers) == 1 or not _PORT_TAKEN.search(outcome.reason)
            if outcome.status is not Status.CRASH or connected:
                return outcome
        raise RunnerError(f"the ports of a trial's rendezvous were taken {MEETINGS} times: {outcome.reason}")

    def _run(self, job: Job) -> Outcome:
        key = uuid.uuid4().hex
        if len(self.workers) == 1:
            (worker,) = self.workers
            outcome, log = worker.ask("run", job, key, not worker.here)
            _write_log(job, [log])
            return outcome
        host, port = self.workers[0].ask("meeting_point")
        each = 1 if job.one_a_host else self._per_host
        shares = []
        for number in range(len(self.workers)):
            world = each * len(self.workers)
            rendezvous = Rendezvous(host=host, port=port, world_size=world, first_rank=number * each)
            shares.append(replace(job, ranks=each, rendezvous=rendezvous))
        results = self._gather(shares, key, first=job.one_a_host)
        _write_log(job, [log for _, log in results])
        return merge([outcome for outcome, _ in results])

    def _gather(self, shares: Sequence[Job], key: str, *, first: bool) -> list[tuple[Outcome, bytes]]:
        """Returns the results in order of hosts. After a failure, or after the first result if `first`, the others
        get a moment, then they are stopped.
        """
        answers = self._begin(lambda number, worker: worker.ask("run", shares[number], key, True))
        stop_s = STOP_S + shares[0].teardown_s
        results: dict[int, tuple[Outcome, bytes]] = {}
        deadline: float | None = None
        stopped = False
        while len(results) < len(shares):
            try:
                number, result, error = answers.get(
                    timeout=None if deadline is None else max(0.0, deadline - time.monotonic())
                )
            except queue.Empty:
                if stopped:
                    left = len(shares) - len(results)
                    raise TimeoutError(f"{left} hosts did not end a trial within {stop_s:g} s") from None
                self._begin(lambda number, worker: worker.ask("stop", key))
                stopped, deadline = True, time.monotonic() + stop_s
                continue
            if error is not None:
                self._begin(lambda number, worker: worker.ask("stop", key))
                raise error
            results[number] = result
            if (first or result[0].status is not Status.OK) and deadline is None:
                deadline = time.monotonic() + ECHO_S
        return [results[number] for number in range(len(shares))]

    def _begin(
        self, call: "Callable[[int, HostWorker], Any]"
    ) -> "queue.SimpleQueue[tuple[int, Any, BaseException | None]]":
        """Calls a function for each worker in a thread. Returns a queue of the results: the worker's number, the
        value, or the exception.
        """
        answers: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

        def ask(number: int, worker: HostWorker) -> None:
            try:
                answers.put((number, call(number, worker), None))
            except BaseException as error:
                answers.put((number, None, error))

        for each in enumerate(self.workers):
            threading.Thread(target=ask, args=each, daemon=True, name="group").start()
        return answers

    def _all(self, method: str, within_s: float | None = None) -> None:
        """Calls the same method of all hosts and waits for the answers.

        Raises:
            TimeoutError: a host has not answered in time.
        """
        end = None if within_s is None else time.monotonic() + within_s
        answers = self._begin(lambda number, worker: worker.ask(method))
        for _ in self.workers:
            try:
                *_, error = answers.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"a host did not answer '{method}' within {within_s:g} s") from None
            if error is not None:
                raise error

    def close(self) -> None:
        """Ends the agents cleanly, then as `kill` does."""
        with contextlib.suppress(Exception):  # lost for any reason, or too slow: killed next
            self._all("close", CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """Ends the agents and their trials."""
        for worker in self.workers:
            worker.kill()


def merge(outcomes: Sequence[Outcome]) -> Outcome:
    """Combines the outcomes of the hosts of a trial. The reason is that of the cause, not of failures that follow
    from it.
    """
    ranks = tuple(sorted((each for outcome in outcomes for each in outcome.ranks), key=lambda each: each.rank))
    failed = [each for each in outcomes if each.status is not Status.OK]
    if not failed:
        return Outcome(status=Status.OK, ranks=ranks)
    cause = min(failed, key=lambda each: (each.secondary, each.status is not Status.OOM))
    reasons = [cause.reason]
    if cause.status is Status.TIMEOUT:  # each reason states the phase of its ranks
        reasons = [each.reason for each in failed if each.status is Status.TIMEOUT]
    return Outcome(
        status=cause.status,
        reason="; ".join(dict.fromkeys(reasons)),
        ranks=ranks,
        secondary=cause.secondary,
    )


def _write_log(job: Job, logs: Sequence[bytes]) -> None:
    if job.log is None or not any(logs):
        return
    path = Path(job.log)
    with contextlib.suppress(OSError):  # a full disk loses the log, not the measurement
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n".join(each.rstrip(b"\n") for each in logs if each) + b"\n")
