"""The hosts of one trial in a Ray cluster: how many devices on each, and one host agent on each."""

import contextlib
import random
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import RunnerError
from ..results import Status
from ..scratch import Scratch
from .host import HostAgent
from .job import Job, Outcome, Rendezvous

ECHO_S = 0.5
"""After the first host's failure: how long others may report theirs, to tell the cause from its echoes."""
PORTS = range(20_000, 32_768)
"""Where ranks of several hosts meet: above the ports of Ray's workers, below those of outgoing connections."""
CLOSE_S = 10.0
"""How long agents may take to end, s."""
STOP_S = 10.0
"""After being told to stop: how long a host may take to clean up and answer."""


class HostActor:
    """A host agent inside a Ray worker that holds the devices of one bundle of a placement group."""

    def __init__(self, imports: tuple[str, ...]) -> None:
        self._agent = HostAgent(imports)

    def node_id(self) -> str:
        """Ray's name of the host."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def wait_ready(self) -> None:
        """Returns when the agent takes jobs."""
        self._agent.wait_ready()

    def meeting_point(self) -> tuple[str, int]:
        """This host's address and a port on it that was free a moment ago."""
        import ray

        address = ray.util.get_node_ip_address()
        return address, free_port(address)

    def run(self, job: Job, key: str, send_log: bool) -> tuple[Outcome, bytes]:
        """The outcome and, on a host that does not share the driver's disk, the log."""
        import ray

        ids = tuple(str(each) for each in ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
        if job.rendezvous.port:
            interface = interface_of(ray.util.get_node_ip_address())
            job = replace(job, rendezvous=replace(job.rendezvous, interface=interface))
        job = replace(job, device_ids=ids)
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


class Gang:
    """The agents of one trial, a host each; trials follow one another on them.

    Args:
        actors: handles of `HostActor`, in the order of ranks.
        per_host: ranks on each.
    """

    def __init__(self, actors: Sequence[Any], per_host: int) -> None:
        import ray

        self._ray = ray
        self.actors = list(actors)
        self._per_host = per_host
        self._ready = False

    def wait_ready(self) -> None:
        """Returns when all agents take jobs."""
        self._ray.get([actor.wait_ready.remote() for actor in self.actors])
        self._ready = True

    def answer(self) -> None:
        """Returns when all hosts have answered, which one that stands still does not; at once before they are ready."""
        if self._ready:
            self._ray.get([actor.answer.remote() for actor in self.actors])

    def run(self, job: Job) -> Outcome:
        """The outcome of a job on all hosts; the first failure on one ends the others."""
        if not self._ready:
            self.wait_ready()
        key = uuid.uuid4().hex
        if len(self.actors) == 1:
            (actor,) = self.actors
            here = self._ray.get_runtime_context().get_node_id()
            send_log = self._ray.get(actor.node_id.remote()) != here
            outcome, log = self._ray.get(actor.run.remote(job, key, send_log))
            _write_log(job, [log])
            return outcome
        host, port = self._ray.get(self.actors[0].meeting_point.remote())
        futures = []
        each = 1 if job.one_a_host else self._per_host
        for number, actor in enumerate(self.actors):
            world = each * len(self.actors)
            rendezvous = Rendezvous(host=host, port=port, world_size=world, first_rank=number * each)
            share = replace(job, ranks=each, rendezvous=rendezvous)
            futures.append(actor.run.remote(share, key, True))
        results = self._gather(futures, key, first=job.one_a_host)
        _write_log(job, [log for _, log in results])
        return merge([outcome for outcome, _ in results])

    def _gather(self, futures: list[Any], key: str, *, first: bool) -> list[tuple[Outcome, bytes]]:
        """The results in order of hosts. After a failure, or the `first` result if that is enough, the others have a
        moment, then they are stopped."""
        waiting, results = list(futures), {}
        deadline: float | None = None
        stopped = False
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, waiting = self._ray.wait(waiting, timeout=left)
            for future in ready:
                try:
                    results[future] = self._ray.get(future)
                except BaseException:
                    self._stop(key)
                    raise
                if (first or results[future][0].status is not Status.OK) and deadline is None:
                    deadline = time.monotonic() + ECHO_S
            if waiting and deadline is not None and time.monotonic() >= deadline:
                if stopped:
                    raise TimeoutError(f"{len(waiting)} hosts did not end a trial within {STOP_S:g} s")
                self._stop(key)
                stopped, deadline = True, time.monotonic() + STOP_S
        return [results[future] for future in futures]

    def _stop(self, key: str) -> None:
        for actor in self.actors:
            actor.stop.remote(key)

    def close(self) -> None:
        """Ends the agents in good order, so that they leave nothing, and then as `kill` does."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get([actor.close.remote() for actor in self.actors], timeout=CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """Ends the agents, and every trial with them."""
        for actor in self.actors:
            self._ray.kill(actor)


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
