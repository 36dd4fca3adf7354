"""Trials on the nodes of the Slurm allocation that this process runs in."""

import contextlib
import os
import queue
import re
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, TypeVar

from ..base.device import usable_cores
from ..base.errors import MissingDependency, RunnerError, UsageError
from ..base.scratch import Scratch
from ..frameworks.export_input import MEASURED_WITH
from ..models import Workload
from .dispatch import DryRunner
from .job import Job, Outcome
from .process import kill_tree
from .protocol import Caller
from .slurm_host import KEY, START
from .work import TrialTerms, Work
from .worker_group import HostWorker, Layout, WorkerGroup, lay_out

Found = TypeVar("Found")
_GPUS_ASKED = ("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS")
_OF_A_TASK = (
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    *("SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE"),
    *("SLURM_MEM_BIND", "SLURM_MEM_BIND_LIST", "SLURM_MEM_BIND_TYPE", "SLURM_MEM_BIND_VERBOSE"),
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_TRES_PER_TASK",
)
_CORES = re.compile(r"(?P<cores>\d+)(?:\(x(?P<nodes>\d+)\))?")
LOOK_S = 0.2
"""Interval between checks that `srun` lives while tasks are starting, s."""
CLOSE_S = 15.0
"""Time for tasks to end, s."""
ANSWER_S = 10
"""Time for a connecting process to prove that it has the key, s."""
START_S = 120.0
"""Time for the tasks of an allocation to answer, s."""


def nodes() -> int:
    """Returns the number of nodes of the allocation that this process runs in; 0 if it runs in none."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES") or 0)


class SlurmRunner(DryRunner):
    """Runs trials through one task of `srun` with a host agent on each node.

    Args:
        what: the workload, or other work.
        terms: devices, limits and deadlines of every trial.
        concurrency: trials at once; by default as many as the devices allow, and one on CPUs.

    Raises:
        MissingDependency: `srun` is not on the PATH.
        UsageError: this is not an allocation, or it has fewer devices than a trial needs.
        RunnerError: Slurm did not start the tasks.
    """

    name = "slurm"

    def __init__(self, what: Workload | Work, terms: TrialTerms, *, concurrency: int | None = None) -> None:
        super().__init__(what, terms)
        if shutil.which("srun") is None:
            raise MissingDependency("the slurm runner needs Slurm's `srun`, which is not on the PATH")
        count = nodes()
        if not count:
            raise UsageError(
                "the slurm runner must run in an allocation: `sbatch --nodes 2 ... --wrap 'redline tune ...'`"
            )
        if terms.device.type == "cpu" and any(os.environ.get(each) for each in _GPUS_ASKED):
            raise UsageError(
                "the allocation has GPUs, but this process sees none: start redline on one of its nodes, for example with "
                "`sbatch --nodes 2 ... --wrap 'redline tune ...'`; salloc runs a command on the submitting host"
            )
        self._layout = _layout(terms, count, self.work.several_hosts)
        self.per_host = self._layout.per_host
        cuda = terms.device.type == "cuda"
        possible = self._layout.at_once
        if concurrency is not None and concurrency > possible:
            raise UsageError(
                f"{concurrency} trials at once need more devices than the {count} nodes of the allocation have"
            )
        self.slots = concurrency or (possible if cuda else 1)
        self._allocation = _Allocation(count, tuple(self.work.imports))
        try:
            workers = self._allocation.workers()
        except BaseException:
            self._allocation.close()
            raise
        groups = shares(workers, self._layout, terms.device.count if cuda else 0)
        self._groups: queue.SimpleQueue[WorkerGroup | None] = queue.SimpleQueue()
        """Free worker groups; None once all were lost."""
        self._left, self._counting = self.slots, threading.Lock()
        for slot in range(self.slots):
            self._groups.put(WorkerGroup(groups[slot % len(groups)], self.per_host))

    def wait_ready(self) -> None:
        """Waits until trials can start at once."""
        self._with_group(WorkerGroup.wait_ready)

    def dispatch(self, job: Job) -> Outcome:
        return self._with_group(lambda group: group.run(job))

    def _with_group(self, call: Callable[[WorkerGroup], Found]) -> Found:
        """Calls a function with a free group. A group that is lost gets no further trial.

        Raises:
            RunnerError: it was lost, or all are; or one of its hosts reported a failure, such as an agent that ended.
        """
        group = self._groups.get()
        if group is None:
            self._groups.put(None)
            raise RunnerError("Slurm has lost all nodes that trials can run on")
        try:
            found = call(group)
        except (RunnerError, TimeoutError, OSError) as error:
            if isinstance(error, RunnerError) and not any(worker.lost for worker in group.workers):
                self._groups.put(group)
                raise
            group.kill()
            with self._counting:
                self._left -= 1
                if not self._left:
                    self._groups.put(None)
            raise RunnerError(f"Slurm lost the node of a trial: {error}") from error
        except BaseException:
            self._groups.put(group)
            raise
        self._groups.put(group)
        return found

    def close(self) -> None:
        self.closed = True
        self._allocation.close()


def _layout(terms: TrialTerms, count: int, several_hosts: bool) -> Layout:
    """Returns the layout of a trial's devices on the nodes, assuming that all nodes have as many GPUs as this one.

    Raises:
        UsageError: there are too few.
    """
    cuda = terms.device.type == "cuda"
    capacities = [terms.device.count] * count if cuda else _cores(count)
    found = lay_out(terms.devices, cuda, capacities)
    if found is None:
        raise UsageError(
            f"a trial needs {terms.devices} devices, the same number on each of its hosts, but the nodes of the allocation have "
            f"{' + '.join(map(str, capacities))}"
        )
    if found.hosts > 1 and not several_hosts:
        raise UsageError(
            f"a callable is one process on one host, but no node of the allocation has {terms.devices} devices"
        )
    return found


def shares(workers: Sequence[HostWorker], layout: Layout, gpus: int) -> list[list[HostWorker]]:
    """Returns the workers of each concurrent trial.

    Args:
        workers: the nodes.
        layout: of a trial.
        gpus: GPUs of each node, which are divided among trials; 0 if devices are cores, which are not.
    """
    hosts, each = layout.hosts, layout.per_host
    slices = [range(at, at + each) for at in range(0, gpus - each + 1, each)] if hosts == 1 else [range(each)]
    nodes = [workers[at : at + hosts] for at in range(0, len(workers) - hosts + 1, hosts)]
    if not gpus:
        return [list(group) for group in nodes]
    return [[_Slice(worker, indices) for worker in group] for group in nodes for indices in slices]


def _cores(count: int) -> list[int]:
    """Returns the cores of each node, from a value such as `72(x2),36` for three nodes."""
    found: list[int] = []
    for each in (os.environ.get("SLURM_JOB_CPUS_PER_NODE") or "").split(","):
        if match := _CORES.fullmatch(each.strip()):
            found += [int(match["cores"])] * int(match["nodes"] or 1)
    return found if len(found) == count else [usable_cores()] * count


class _Allocation:
    """A job step of the allocation: a task on each node, and a connection to each."""

    def __init__(self, count: int, imports: tuple[str, ...]) -> None:
        self._imports, self._count = imports, count
        self._key = secrets.token_bytes(32)
        self._server = socket.create_server(("", 0), backlog=count)
        self._server.settimeout(LOOK_S)
        self._scratch = Scratch("slurm")
        cores = min(_cores(count))
        command = [
            *(
                "srun",
                "--nodes",
                str(count),
                "--ntasks",
                str(count),
                "--ntasks-per-node",
                "1",
                "--overlap",
                "--mem",
                "0",
            ),
            *("--cpus-per-task", str(cores)),
            *("--kill-on-bad-exit=0", "--input=none", "--export=ALL"),
            *(sys.executable, "-P", "-m", "redline.runners.slurm_host", str(self._server.getsockname()[1])),
        ]
        with open(self._scratch.path / "log", "wb") as log:
            self._step = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # These limit one of several tasks on a node, which redline may have been started as.
                env={
                    **MEASURED_WITH,
                    **{name: value for name, value in os.environ.items() if name not in _OF_A_TASK},
                    "SLURM_OOM_KILL_STEP": "0",  # the agents outlive a trial that is out of memory
                    KEY: self._key.hex(),
                },
                start_new_session=True,
            )
        self._workers: list[_SlurmWorker] = []

    def workers(self) -> list["_SlurmWorker"]:
        """Waits for the nodes and returns them in Slurm's order.

        Raises:
            RunnerError: not all of them have answered in time.
        """
        end = time.monotonic() + START_S
        found: dict[int, _SlurmWorker] = {}
        while len(found) < self._count:
            connection = self._accepted()
            if connection is None:
                if self._step.poll() is not None or time.monotonic() > end:
                    raise RunnerError(self._with_last_words(f"Slurm started {len(found)} of {self._count} tasks"))
                continue
            worker = _SlurmWorker(connection)
            try:
                number = worker.start(self._imports)
            except RunnerError:  # the task ended, which shows in `srun`
                continue
            found[number] = worker
        self._server.close()
        self._workers = [found[number] for number in sorted(found)]
        return self._workers

    def _accepted(self) -> Connection | None:
        """Returns the next task that connects; None if there is none yet, or if it lacks the key."""
        try:
            accepted, _ = self._server.accept()
        except TimeoutError:
            return None
        accepted.setblocking(True)
        _wait_at_most(accepted, ANSWER_S)
        # Keep-alive detects a node that loses power.
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            accepted.setsockopt(socket.IPPROTO_TCP, option, value)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)
        connection = Connection(os.dup(accepted.fileno()))
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
            return None
        finally:
            with accepted:
                _wait_at_most(accepted, 0.0)
        return connection

    def _with_last_words(self, message: str) -> str:
        output = (self._scratch.path / "log").read_text(errors="replace").strip()
        return f"{message}: {output[-2000:]}" if output else message

    def close(self) -> None:
        """Ends all tasks and everything they started."""
        for worker in self._workers:
            worker.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._workers:
                self._step.wait(CLOSE_S)
        if self._step.poll() is None:
            kill_tree(self._step.pid)
        self._step.wait()
        self._server.close()
        self._scratch.close()


def _wait_at_most(connected: socket.socket, seconds: float) -> None:
    """Limits the time of reading from a socket; 0 for no limit."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))


class _Slice(HostWorker):
    """Some of a node's allocated GPUs, by their indices."""

    def __init__(self, worker: HostWorker, indices: Sequence[int]) -> None:
        self._worker, self.here = worker, worker.here
        self._ids = tuple(map(str, indices))

    @property
    def lost(self) -> bool:
        return self._worker.lost

    def ask(self, method: str, *arguments: Any) -> Any:
        if method == "run":
            job, *others = arguments
            arguments = (replace(job, device_ids=self._ids), *others)
        return self._worker.ask(method, *arguments)

    def kill(self) -> None:
        self._worker.kill()


class _SlurmWorker(HostWorker):
    """A task of the job step."""

    def __init__(self, connection: Connection) -> None:
        self._node = "that connected last"
        self._caller = Caller(connection, self._lost, watched="slurm")

    def start(self, imports: tuple[str, ...]) -> int:
        """Starts the host agent of the task's node and returns the node's number in the allocation."""
        sys_path = tuple(os.path.abspath(each) for each in sys.path)
        number, self._node = self._caller.call(START, sys_path, imports)
        self.here = self._node == os.environ.get("SLURMD_NODENAME")
        return int(number)

    @property
    def lost(self) -> bool:
        return self._caller.lost

    def ask(self, method: str, *arguments: Any) -> Any:
        return self._caller.call(method, *arguments)

    def _lost(self, error: Exception) -> str:
        # The task has ended, or the connection was closed here, or else a message was unreadable.
        reason = "" if isinstance(error, EOFError) else f": {type(error).__name__}: {error}"
        return f"Slurm lost the node {self._node}{reason}"

    def kill(self) -> None:
        self._caller.close()
