"""The process that speaks to Ray: joins or starts it, places the hosts of trials, and passes jobs on to them.

Run as `python -m redline.runners.ray_driver FD FOLDER` by `RayRunner` (see `HelperProcess`). Ray's library ends the process
that it is in when its head is gone for a minute, hangs where a node stands still, and installs signal handlers, so it
has a process of its own: killing that one and all it started leaves nothing, whatever has happened to Ray.
"""

import contextlib
import os
import queue
import select
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..base.errors import RedlineError, RunnerError, UsageError
from ..base.scratch import remove
from . import failure
from .job import Job, Outcome
from .process import adopt_orphans, die_with_parent, kill_descendants
from .ray_host import RayHost, RayMember
from .worker_group import Layout, WorkerGroup, lay_out

Found = TypeVar("Found")
PLACEMENT_TIMEOUT_S = 60.0
PLACED_AGAIN_S = 30.0
"""How long it may take until a host that was lost is placed again, s. Where no node is left it never is."""
CLOSE_S = 15.0
"""How long Ray may take to end in good order, s."""
BEAT_S = 3.0
"""How often it is asked whether Ray and the hosts answer, s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RaySetup:
    """What the process is started with."""

    address: str | None
    """The cluster to join; None to start Ray on this machine."""
    devices: int
    """Devices of a trial."""
    cuda: bool
    """Whether these are GPUs."""
    concurrency: int | None
    """Trials at once; None for as many as there is room for, and one on a CPU."""
    several_hosts: bool
    """Whether the devices of a trial may be on several hosts."""
    imports: tuple[str, ...]
    """Modules that host agents import once."""
    sys_path: tuple[str, ...]
    """The import path of the process that started it."""
    script: str
    """What that process runs; Ray lets its workers import from there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """What it answers once there is room for the trials."""

    per_host: int
    """Devices that a host gives a trial."""
    slots: int
    """Trials at once."""


@dataclass(frozen=True, slots=True)
class Alive:
    """Told every `BEAT_S`: Ray and all hosts that were ready have answered."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a request: a value, or what was raised."""

    request: int
    value: Any = None
    error: RedlineError | None = None


READY = "ready"
"""A request, beside jobs, that is answered when the first trial would start at once."""


def main() -> None:
    """Runs what speaks to Ray in a child, and ends it with all it started when whoever started this hangs up."""
    starter = Connection(int(sys.argv[1]))
    os.set_inheritable(starter.fileno(), False)
    adopt_orphans()
    me, child = os.getpid(), os.fork()
    if child == 0:
        die_with_parent(me)
        _speak(starter)
    ended = os.pidfd_open(child)
    watched = select.poll()
    watched.register(starter, select.POLLRDHUP)
    watched.register(ended, select.POLLIN)
    hung_up = watched.poll()[0][0] == starter.fileno()
    if hung_up:
        select.select([ended], [], [], CLOSE_S)
    _, status = os.waitpid(child, os.WNOHANG)
    kill_descendants()
    if hung_up:
        remove(Path(sys.argv[2]))
    if status:
        sys.exit(failure.ended(os.waitstatus_to_exitcode(status)))


def _speak(starter: Connection) -> NoReturn:
    """Serves until the other side hangs up."""
    code = 1
    try:
        setup: RaySetup = starter.recv()
        sys.path[:] = list(dict.fromkeys([*setup.sys_path, *sys.path]))
        sys.argv = [setup.script]
        try:
            cluster = Cluster(setup)
        except RedlineError as error:
            starter.send(Reply(0, error=error))
        else:
            try:
                _serve(cluster, starter)
            finally:
                cluster.close()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # rather than wait for threads that Ray may hold


def _serve(cluster: "Cluster", starter: Connection) -> None:
    lock = threading.Lock()

    def tell(what: Reply | Alive) -> None:
        with lock, contextlib.suppress(OSError):  # it hung up, which ends this process
            starter.send(what)

    def answer(number: int, asked: Job | str) -> None:
        try:
            if isinstance(asked, Job):
                tell(Reply(number, cluster.dispatch(asked)))
            else:
                cluster.wait_ready()
                tell(Reply(number))
        except RunnerError as error:
            tell(Reply(number, error=error))
        except BaseException as error:  # a fault of this program, to be seen where it is asked
            tell(Reply(number, error=RunnerError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")))

    tell(Reply(0, Placed(per_host=cluster.layout.per_host, slots=cluster.slots)))

    def watch() -> None:
        try:
            cluster.watch(lambda: tell(Alive()))
        except RunnerError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            threading.Thread(target=answer, args=starter.recv(), daemon=True).start()


class Cluster:
    """A placement group for each trial at once, with a host agent on each of its hosts.

    A trial is on one host where one has enough devices, and else on as few as will do, with as many ranks on
    each; ranks are numbered host by host, so that tensor-parallel ranks are neighbours on a host.

    Raises:
        UsageError: the cluster has fewer devices than a trial needs.
        RunnerError: Ray did not start, or placed nothing within a minute.
    """

    def __init__(self, setup: RaySetup) -> None:
        import ray

        self._ray = ray
        self._setup = setup
        self._kind = "GPU" if setup.cuda else "CPU"
        self._groups: list[Any] = []
        self._worker_groups: dict[int, WorkerGroup] = {}
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lost: dict[int, float] = {}
        """Since when a slot has a host that was lost and is not there again, on the monotonic clock."""
        self._connect()
        try:
            self.layout = self._lay_out()
            self.slots = self._count_slots()
            self._place()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        address = self._setup.address
        # Ray's usage report and log lines are its own; a tuning run prints neither.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if address is None:
            options |= {"address": "local", "include_dashboard": False}
        else:
            check_listens(address)
            options["address"] = address
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._ray.init(**options)
        except (OSError, RuntimeError, ValueError) as error:
            what = f"joining the Ray cluster at {address!r}" if address else "starting Ray on this machine"
            raise RunnerError(f"{what} failed: {error}. `--runner local` works without Ray.") from error

    def _lay_out(self) -> Layout:
        devices = self._setup.devices
        nodes = [each["Resources"] for each in self._ray.nodes() if each["Alive"]]
        shares = " + ".join(f"{each.get(self._kind, 0):g}" for each in nodes)
        if not nodes:
            raise RunnerError("the Ray cluster has no node that is alive; start one again, or choose `--runner local`")
        layout = lay_out(devices, self._setup.cuda, [each.get(self._kind, 0) for each in nodes])
        if layout is None:
            raise UsageError(
                f"a trial needs {devices} devices, as many on each of its hosts, but the Ray cluster has "
                f"{shares} {self._kind}s"
            )
        if layout.hosts > 1 and not self._setup.several_hosts:
            raise UsageError(
                f"a callable is one process on one host, but no host of the Ray cluster has {devices} "
                f"{self._kind}s ({shares}); ask for fewer devices"
            )
        return layout

    def _count_slots(self) -> int:
        possible, concurrency = self.layout.at_once, self._setup.concurrency
        if concurrency is None:
            return possible if self._setup.cuda else 1
        if concurrency > possible:
            raise UsageError(
                f"{concurrency} trials at once need {concurrency * self._setup.devices} {self._kind}s, "
                f"but the Ray cluster has {int(self._ray.cluster_resources().get(self._kind, 0))}"
            )
        return concurrency

    def _place(self) -> None:
        from ray.util.placement_group import placement_group

        layout = self.layout
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
        for slot in range(self.slots):
            self._worker_groups[slot] = self._worker_group(slot)
            self._free.put(slot)

    def _worker_group(self, slot: int) -> WorkerGroup:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        layout = self.layout
        members = []
        for host in range(layout.hosts):
            make = self._ray.remote(RayHost).options(
                num_cpus=layout.bundle["CPU"],
                num_gpus=layout.bundle.get("GPU", 0),
                # A trial is stopped, and its host asked whether it lives, while it runs.
                max_concurrency=8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._groups[slot], placement_group_bundle_index=host
                ),
            )
            members.append(RayMember(make.remote(self._setup.imports)))
        return WorkerGroup(members, layout.per_host)

    def wait_ready(self) -> None:
        """Returns when the first trial would start at once."""
        self._watched(0, WorkerGroup.wait_ready)

    def dispatch(self, job: Job) -> Outcome:
        """The outcome of a job on free devices.

        Raises:
            RunnerError: a host of it was lost.
        """
        slot = self._free.get()
        try:
            return self._watched(slot, lambda workers: workers.run(job))
        finally:
            self._free.put(slot)

    def _watched(self, slot: int, call: Callable[[WorkerGroup], Found]) -> Found:
        exceptions = self._ray.exceptions
        try:
            return call(self._worker_groups[slot])
        except exceptions.RayTaskError as error:
            raise error.cause from error
        except (exceptions.RayActorError, exceptions.RaySystemError, TimeoutError) as error:
            self._lost.setdefault(slot, time.monotonic())
            self._worker_groups[slot].kill()
            workers = self._worker_groups[slot] = self._worker_group(slot)
            threading.Thread(target=self._await, args=(slot, workers), daemon=True, name="placing").start()
            raise RunnerError(f"Ray lost the host of a trial: {_first_line(error)}") from error

    def _await(self, slot: int, workers: WorkerGroup) -> None:
        """Notes that a slot's hosts are there again, once they are."""
        with contextlib.suppress(self._ray.exceptions.RayError):  # lost again: it is asked of the next
            workers.wait_placed()
            self._lost.pop(slot, None)

    def _check_placed(self) -> None:
        """Ends the waiting for a host that Ray does not place again: it says nothing of one that has no node to go to.

        Raises:
            RunnerError: one has been waited for too long.
        """
        now = time.monotonic()
        if any(now - since > PLACED_AGAIN_S for since in list(self._lost.values())):
            alive = sum(bool(each["Alive"]) for each in self._ray.nodes())
            raise RunnerError(
                f"Ray has lost the host of a trial, and has not placed it again within {PLACED_AGAIN_S:g} s; of its nodes "
                f"{alive} {'is' if alive == 1 else 'are'} alive"
            )

    def watch(self, beat: Callable[[], None]) -> None:
        """Calls `beat` every `BEAT_S` as long as Ray's head and every host that was ready answer.

        Raises:
            RunnerError: nothing listens any more where the head did, or a host that was lost is not placed again.
        """
        head = self._ray.get_runtime_context().gcs_address
        while True:
            if not _listens(head):
                time.sleep(BEAT_S)  # it may be one that is started again where it was
                if not _listens(head):
                    raise RunnerError(f"Ray's head is gone: nothing listens at {head} any more")
            self._ray.nodes()  # does not return where the head is gone
            # A host that is lost says so by itself, to those who wait for its trial.
            with contextlib.suppress(self._ray.exceptions.RayActorError):
                for workers in list(self._worker_groups.values()):
                    workers.answer()
            self._check_placed()
            beat()
            time.sleep(BEAT_S)

    def close(self) -> None:
        """Ends every trial, and the Ray that was started here; a Ray that was joined runs on."""
        from ray.util.placement_group import remove_placement_group

        for workers in self._worker_groups.values():
            workers.close()
        for group in self._groups:
            remove_placement_group(group)
        self._ray.shutdown()


def _first_line(error: BaseException) -> str:
    """The first line of a Ray error, which can run over pages."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _listens(address: str) -> bool:
    with contextlib.suppress(RunnerError):
        check_listens(address)
        return True
    return False


def check_listens(address: str) -> None:
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


if __name__ == "__main__":
    # Pickles must name this module by its import path, not as __main__.
    from redline.runners.ray_driver import main as serve

    serve()
