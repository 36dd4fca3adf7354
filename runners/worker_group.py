"""The hosts of one trial: how many devices on each, a host agent on each, and one outcome of all."""

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
"""After the first host's failure: how long others may report theirs, to tell the cause from its echoes."""
PORTS = range(20_000, 32_768)
"""Where ranks of several hosts meet: above the ports of Ray's workers, below those of outgoing connections."""
CLOSE_S = 10.0
"""How long agents may take to end, s."""
MEETINGS = 3
"""How often the ranks of a trial try to meet, each time at another port."""
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
STOP_S = 10.0
"""After being told to stop: how long a host may take to clean up and answer."""


class Host(ABC):
    """A host agent, on a host that somebody has given devices of."""

    def __init__(self, imports: tuple[str, ...]) -> None:
        self._agent = HostAgent(imports)

    @abstractmethod
    def address(self) -> str:
        """By which other hosts reach this one."""

    def device_ids(self) -> tuple[str, ...]:
        """CUDA devices that it was given; empty for those that it sees."""
        return ()

    def wait_ready(self) -> None:
        """Returns when the agent takes jobs."""
        self._agent.wait_ready()

    def meeting_point(self) -> tuple[str, int]:
        """This host's address and a port on it that was free a moment ago."""
        address = self.address()
        return address, free_port(address)

    def run(self, job: Job, key: str, send_log: bool) -> tuple[Outcome, bytes]:
        """The outcome and, on a host that does not share the driver's disk, the log."""
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
        """Ends the job of this key; its `run` then returns what was known."""
        self._agent.stop(key)

    def answer(self) -> None:
        """Shows that the host lives."""

    def close(self) -> None:
        """Ends the agent with all it started."""
        self._agent.close()


class HostWorker(ABC):
    """A `Host` somewhere, to be asked from here. Thread-safe."""

    here = False
    """Whether it is on this machine."""

    @abstractmethod
    def ask(self, what: str, *arguments: Any) -> Any:
        """Calls a method of its host there, and returns or raises what that does; where it was lost, what those who
        placed it take for that."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it, and every trial with it."""


def free_port(address: str) -> int:
    """A port that nobody listens on, out of those that systems do not give to outgoing connections: with many of
    these, such as Ray's own, one that the system named would often be taken a moment later."""
    # Not in the order that a search's seed gives: others may search with the same.
    for port in random.Random().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise RunnerError(f"no port from {PORTS[0]} to {PORTS[-1]} is free on {address}")


def interface_of(address: str) -> str:
    """The network interface that has this address; empty where none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return ""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks of a trial are shared among hosts."""

    hosts: int
    """Hosts of a trial."""
    per_host: int
    """Ranks, and so devices, on each."""
    bundle: dict[str, float]
    """What Ray reserves on each."""
    at_once: int
    """Trials that the cluster has room for."""


def lay_out(devices: int, cuda: bool, capacities: Sequence[float]) -> Layout | None:
    """The fewest hosts for a trial, so that ranks that exchange the most are on one; None without room.

    On a CPU a trial that the cluster has too few cores for runs on one host, its ranks sharing what is there.

    Args:
        devices: ranks of a trial.
        cuda: whether a rank needs a GPU, or a core.
        capacities: GPUs, or cores, of each host.
    """
    kind = "GPU" if cuda else "CPU"
    for hosts in range(1, devices + 1):
        if devices % hosts:
            continue
        each = devices // hosts
        places = [int(capacity) // each for capacity in capacities]
        # Several hosts mean different ones: a host with room for two shares is tried with fewer hosts first.
        at_once = sum(places) if hosts == 1 else sum(place > 0 for place in places) // hosts
        if at_once:
            bundle = {"CPU": 1.0, "GPU": float(each)} if cuda else {kind: float(each)}
            return Layout(hosts=hosts, per_host=each, bundle=bundle, at_once=at_once)
    if cuda:
        return None
    return Layout(hosts=1, per_host=devices, bundle={"CPU": 1.0}, at_once=1)


class WorkerGroup:
    """The agents of one trial, a host each; trials follow one another on them.

    Args:
        members: in the order of ranks.
        per_host: ranks on each.
    """

    def __init__(self, members: Sequence[HostWorker], per_host: int) -> None:
        self.members = list(members)
        self._per_host = per_host
        self._ready = False

    def wait_ready(self) -> None:
        """Returns when all agents take jobs."""
        self._all("wait_ready")
        self._ready = True

    def wait_placed(self) -> None:
        """Returns when all hosts are there, whether their agents are ready or not."""
        self._all("answer")

    def answer(self) -> None:
        """Returns when all hosts have answered, which one that stands still does not; at once before they are ready."""
        if self._ready:
            self._all("answer")

    def run(self, job: Job) -> Outcome:
        """The outcome of a job on all hosts; the first failure on one ends the others.

        Raises:
            RunnerError: a port was taken wherever the ranks tried to meet.
        """
        if not self._ready:
            self.wait_ready()
        for _ in range(MEETINGS):
            outcome = self._run(job)
            met = len(self.members) == 1 or not _PORT_TAKEN.search(outcome.reason)
            if outcome.status is not Status.CRASH or met:
                return outcome
        raise RunnerError(f"the ports of a trial's rendezvous were taken {MEETINGS} times: {outcome.reason}")

    def _run(self, job: Job) -> Outcome:
        key = uuid.uuid4().hex
        if len(self.members) == 1:
            (member,) = self.members
            outcome, log = member.ask("run", job, key, not member.here)
            _write_log(job, [log])
            return outcome
        host, port = self.members[0].ask("meeting_point")
        each = 1 if job.one_a_host else self._per_host
        shares = []
        for number in range(len(self.members)):
            world = each * len(self.members)
            rendezvous = Rendezvous(host=host, port=port, world_size=world, first_rank=number * each)
            shares.append(replace(job, ranks=each, rendezvous=rendezvous))
        results = self._gather(shares, key, first=job.one_a_host)
        _write_log(job, [log for _, log in results])
        return merge([outcome for outcome, _ in results])

    def _gather(self, shares: Sequence[Job], key: str, *, first: bool) -> list[tuple[Outcome, bytes]]:
        """The results in order of hosts. After a failure, or the `first` result if that is enough, the others have a
        moment, then they are stopped."""
        answers = self._begin(lambda number, member: member.ask("run", shares[number], key, True))
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
                    raise TimeoutError(f"{left} hosts did not end a trial within {STOP_S:g} s") from None
                self._begin(lambda number, member: member.ask("stop", key))
                stopped, deadline = True, time.monotonic() + STOP_S
                continue
            if error is not None:
                self._begin(lambda number, member: member.ask("stop", key))
                raise error
            results[number] = result
            if (first or result[0].status is not Status.OK) and deadline is None:
                deadline = time.monotonic() + ECHO_S
        return [results[number] for number in range(len(shares))]

    def _begin(
        self, call: "Callable[[int, HostWorker], Any]"
    ) -> "queue.SimpleQueue[tuple[int, Any, BaseException | None]]":
        """Has a thread for each member call something; the answers as they come: whose, what, or what was raised."""
        answers: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

        def ask(number: int, member: HostWorker) -> None:
            try:
                answers.put((number, call(number, member), None))
            except BaseException as error:
                answers.put((number, None, error))

        for each in enumerate(self.members):
            threading.Thread(target=ask, args=each, daemon=True, name="group").start()
        return answers

    def _all(self, what: str, within_s: float | None = None) -> None:
        """Asks all for the same, and returns when they have answered."""
        end = None if within_s is None else time.monotonic() + within_s
        answers = self._begin(lambda number, member: member.ask(what))
        for _ in self.members:
            *_, error = answers.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
            if error is not None:
                raise error

    def close(self) -> None:
        """Ends the agents in good order, so that they leave nothing, and then as `kill` does."""
        with contextlib.suppress(Exception):  # lost in whatever way, or too slow: it is killed next
            self._all("close", CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """Ends the agents, and every trial with them."""
        for member in self.members:
            member.kill()


def merge(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of what the hosts of a trial report: the cause rather than its echoes."""
    ranks = tuple(sorted((each for outcome in outcomes for each in outcome.ranks), key=lambda each: each.rank))
    failed = [each for each in outcomes if each.status is not Status.OK]
    if not failed:
        return Outcome(status=Status.OK, ranks=ranks)
    cause = min(failed, key=lambda each: (each.secondary, each.status is not Status.OOM))
    reasons = [cause.reason]
    if cause.status is Status.TIMEOUT:  # which says what each rank was doing
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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(each.rstrip(b"\n") for each in logs if each) + b"\n")
