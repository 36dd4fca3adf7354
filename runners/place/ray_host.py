"""The hosts of a trial that Ray placed: an actor with a host agent on each of them, and their combined outcome."""

import contextlib
import os
import random
import re
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base.device import Device, detect
from ...base.errors import RunnerError
from ...base.gpus import VARIABLE
from ...base.scratch import Scratch
from ...results import Status
from ..host.client import HostAgent
from ..trial.job import Job, Outcome, Rendezvous

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
OUTPUT_S = 1.0
"""Interval at which the output of ranks on other nodes is fetched, s."""
OUTPUT_PATIENCE_S = 5.0
"""Time for a host to send its output, s. One that does not answer is detected by the watch on all hosts."""
LOOK_S = 1.0
"""Interval between checks that the raylet lives, s."""


def describe() -> Device:
    """Returns the devices of the node that this task runs on."""
    if os.environ.get(VARIABLE) == "":
        del os.environ[VARIABLE]  # Ray hides the devices from a task that takes none
    return detect()


class RayHost:
    """A host agent in a Ray worker that has the devices of one bundle of a placement group.

    It ends with the raylet that started the worker. Otherwise a worker that runs a trial would outlive it, with nobody
    left to answer.
    """

    def __init__(self, imports: tuple[str, ...]) -> None:
        raylet = os.getppid()
        self._agent = HostAgent(imports)
        self._logs: dict[str, _GrowingFile] = {}
        threading.Thread(target=_end_with_parent, args=(raylet,), name="raylet", daemon=True).start()

    def node_id(self) -> str:
        """Returns Ray's id of the node."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def wait_ready(self, imports: tuple[str, ...]) -> None:
        """Waits until the agent accepts jobs and has also imported these modules."""
        self._agent.also_import(imports)
        self._agent.wait_ready()

    def meeting_point(self) -> tuple[str, int]:
        """Returns this host's address and a port on it that was free just now."""
        address = _address()
        return address, free_port(address)

    def run(self, job: Job, key: str, sends_output: bool) -> tuple[Outcome, bytes]:
        """Returns the outcome and, on a node that does not share the driver's disk, the output that `output` has not
        returned.
        """
        import ray

        if job.rendezvous.port:
            job = replace(job, rendezvous=replace(job.rendezvous, interface=interface_of(_address())))
        devices = tuple(str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
        job = replace(job, device_ids=job.device_ids or devices)
        if not sends_output or job.log is None:
            return self._agent.run(job, key), b""
        with Scratch("log") as folder:
            log = self._logs[key] = _GrowingFile(folder / "log")
            try:
                outcome = self._agent.run(replace(job, log=str(log.path)), key)
                return outcome, log.read(whole_lines=False)
            finally:
                del self._logs[key]

    def output(self, key: str) -> bytes:
        """Returns the lines that the ranks of a job have printed since the last call."""
        log = self._logs.get(key)
        return b"" if log is None else log.read()

    def stop(self, key: str) -> None:
        """Stops the job of this key. `run` then returns the outcome so far."""
        self._agent.stop(key)

    def answer(self) -> None:
        """Does nothing; used to check that the host is alive."""

    def close(self) -> None:
        """Ends the agent and everything it started."""
        self._agent.close()


class _GrowingFile:
    """A file that another process appends to. Thread-safe.

    Args:
        path: the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self._lock = threading.Lock()

    def read(self, *, whole_lines: bool = True) -> bytes:
        """Returns what was appended since the last call, up to the end of the last line unless `whole_lines` is False."""
        with self._lock, contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._position)
            appended = file.read()
            if whole_lines:
                appended = appended[: appended.rfind(b"\n") + 1]
            self._position += len(appended)
            return appended
        return b""


def _address() -> str:
    """Returns the address at which other hosts reach this one."""
    import ray

    return ray.util.get_node_ip_address()


def _end_with_parent(parent: int) -> None:
    """Ends this process, and with it its host agent, when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


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
        if any(entry.address == address for entry in addresses):
            return name
    return ""


class HostGroup:
    """The hosts of one trial in the order of ranks. Trials run on them one after the other.

    Args:
        actors: a `RayHost` each.
        per_host: ranks on each host.
    """

    def __init__(self, actors: Sequence[Any], per_host: int) -> None:
        self._actors, self._per_host = list(actors), per_host
        self.imports: tuple[str, ...] = ()
        """Modules that the agents import besides those that they were created with."""
        self._ready = self._on_this_node = False

    def wait_placed(self) -> None:
        """Waits until all hosts are placed, whether or not their agents are ready."""
        self._call("answer")

    def wait_ready(self) -> None:
        """Waits until all agents accept jobs."""
        import ray

        self._call("wait_ready", self.imports)
        self._on_this_node = self._call("node_id") == [ray.get_runtime_context().get_node_id()]
        self._ready = True

    def answer(self, within_s: float) -> None:
        """Waits until all hosts have answered, which a suspended one does not. Returns at once before they are ready.

        Raises:
            TimeoutError: a host has not answered in time.
        """
        if self._ready:
            self._call("answer", within_s=within_s)

    def _call(self, method: str, *arguments: Any, within_s: float | None = None) -> list[Any]:
        """Calls a method of all hosts and returns the results, or raises the first error."""
        import ray

        calls = [getattr(actor, method).remote(*arguments) for actor in self._actors]
        results: list[Any] = ray.get(calls, timeout=within_s)
        return results

    def run(self, job: Job) -> Outcome:
        """Runs a job on all hosts and returns its outcome. The first failure on one stops the others.

        Raises:
            RunnerError: the rendezvous port was taken in all attempts.
        """
        if not self._ready:
            self.wait_ready()
        if len(self._actors) == 1:
            (outcome,) = self._outcomes([job])
            return outcome
        for _ in range(MEETINGS):
            outcome = merge(self._outcomes(self._shares(job)))
            if outcome.status is not Status.CRASH or not _PORT_TAKEN.search(outcome.reason):
                return outcome
        raise RunnerError(f"the ports of a trial's rendezvous were taken {MEETINGS} times: {outcome.reason}")

    def _shares(self, job: Job) -> list[Job]:
        """Returns the part of a job on each host."""
        import ray

        host, port = ray.get(self._actors[0].meeting_point.remote())
        ranks = 1 if job.one_a_host else self._per_host
        world_size = ranks * len(self._actors)
        return [
            replace(
                job,
                ranks=ranks,
                rendezvous=Rendezvous(host=host, port=port, world_size=world_size, first_rank=number * ranks),
            )
            for number in range(len(self._actors))
        ]

    def _outcomes(self, shares: Sequence[Job]) -> list[Outcome]:
        """Returns the outcomes in the order of hosts. After a failure, or after the first result of a job with one rank a
        host, the others get a moment, then they are stopped.

        Raises:
            TimeoutError: a host did not end the job after it was stopped.
        """
        import ray

        key = uuid.uuid4().hex
        sends_output = shares[0].log is not None and not self._on_this_node
        running = {
            actor.run.remote(share, key, sends_output): (number, actor)
            for number, (actor, share) in enumerate(zip(self._actors, shares, strict=True))
        }
        outcomes: dict[int, Outcome] = {}
        deadline, stopped = float("inf"), False
        copy = _OutputCopy(shares[0].log if sends_output else None)
        while running:
            left = deadline - time.monotonic()
            if left <= 0 and stopped:
                raise TimeoutError(f"{len(running)} hosts did not end a trial after it was stopped")
            if left <= 0:
                self._stop(key)
                stopped, deadline = True, time.monotonic() + STOP_S + shares[0].teardown_s
                continue
            wait_s = min(left, OUTPUT_S) if sends_output else None if left == float("inf") else left
            ended, _ = ray.wait(list(running), timeout=wait_s)
            for call in ended:
                number, _ = running.pop(call)
                try:
                    outcomes[number], output = ray.get(call)
                except BaseException:
                    self._stop(key)
                    raise
                copy.write(output)
                if (shares[0].one_a_host or outcomes[number].status is not Status.OK) and deadline == float("inf"):
                    deadline = time.monotonic() + ECHO_S
            if sends_output:
                copy.fetch([actor.output.remote(key) for _, actor in running.values()])
        return [outcomes[number] for number in range(len(shares))]

    def _stop(self, key: str) -> None:
        for actor in self._actors:
            actor.stop.remote(key)

    def close(self) -> None:
        """Ends the agents cleanly, then as `kill` does."""
        with contextlib.suppress(Exception):  # lost for any reason, or too slow: killed next
            self._call("close", within_s=CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """Ends the agents and their trials."""
        import ray

        for actor in self._actors:
            ray.kill(actor)


class _OutputCopy:
    """A log of the driver, to which the output of ranks on other nodes is appended as it arrives.

    A full disk loses the log, not the measurement.

    Args:
        path: the log; None for none.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_bytes(b"")

    def write(self, output: bytes) -> None:
        if self._path is not None and output:
            with contextlib.suppress(OSError), self._path.open("ab") as file:
                file.write(output)

    def fetch(self, calls: Sequence[Any]) -> None:
        """Appends the results of calls of `RayHost.output`. A host that is lost meanwhile fails its `run`."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            for output in ray.get(list(calls), timeout=OUTPUT_PATIENCE_S):
                self.write(output)


def merge(outcomes: Sequence[Outcome]) -> Outcome:
    """Combines the outcomes of the hosts of a trial. The reason is that of the cause, not of failures that follow
    from it.
    """
    ranks = tuple(sorted((rank for outcome in outcomes for rank in outcome.ranks), key=lambda rank: rank.rank))
    failed = [outcome for outcome in outcomes if outcome.status is not Status.OK]
    if not failed:
        return Outcome(status=Status.OK, ranks=ranks)
    cause = min(failed, key=lambda outcome: (outcome.secondary, outcome.status is not Status.OOM))
    reasons = [cause.reason]
    if cause.status is Status.TIMEOUT:  # each reason states the phase of its ranks
        reasons = [outcome.reason for outcome in failed if outcome.status is Status.TIMEOUT]
    return Outcome(
        status=cause.status,
        reason="; ".join(dict.fromkeys(reasons)),
        ranks=ranks,
        secondary=cause.secondary,
    )
