"""The process that uses Ray: joins or starts it, places the hosts of trials, and passes jobs to them.

Run as `python -m redline.runners.ray_driver FD FOLDER` by `RayRunner` (see `HelperProcess`). Ray's library ends its
process when its head is gone for a minute, hangs if a node is suspended, and installs signal handlers. In a process of
its own, killing that process and its descendants leaves nothing behind, whatever happened to Ray.
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
from ..base.forked import die_with_parent
from ..base.scratch import remove
from ..results import Status
from . import failure
from .job import Job, Outcome
from .process import adopt_orphans, kill_descendants
from .protocol import Channel, keep_alive, receive_call, serve
from .ray_host import RayHost, RayWorker
from .worker_group import Layout, WorkerGroup, lay_out

Found = TypeVar("Found")
PLACEMENT_TIMEOUT_S = 60.0
PLACED_AGAIN_S = 30.0
"""Time for Ray to place a lost host again, s. Without a node left it never does."""
AGAIN_S = 1.0
"""Interval between attempts to place a lost host again, s."""
CLOSE_S = 15.0
"""Time for Ray to shut down, s."""
ANSWER_S = 15.0
"""Time for the hosts of a trial to answer, s."""
BEAT_S = 3.0
"""Interval between checks that Ray and the hosts answer, s."""
ANY_CLUSTER = "ab" * 28
"""An id that no cluster has, in hexadecimal digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Joining:
    """The Ray that the process joins or starts."""

    address: str | None
    """The cluster to join; None to start Ray on this machine."""
    sys_path: tuple[str, ...]
    """Import path of the parent process."""
    script: str
    """The script of the parent process. Ray lets its workers import from its folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RaySetup:
    """The trials to place."""

    devices: int
    """Devices of a trial."""
    cuda: bool
    """True if these are GPUs."""
    concurrency: int | None
    """Trials at once; None for as many as the devices allow, and one on a CPU."""
    several_hosts: bool
    """True if the devices of a trial may be on several hosts."""
    imports: tuple[str, ...]
    """Modules that host agents import once."""
    again: bool = False
    """True if trials were placed before: a cluster that has lost nodes since runs fewer at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedHosts:
    """The reply to `START`, after the hosts of trials are placed."""

    per_host: int
    """Devices of a trial on each host."""
    slots: int


JOIN, START, READY, RUN_JOB = "join", "start", "ready", "job"
"""Calls: the first one, with a `Joining`; the second, with a `RaySetup`, whose reply also has errors of joining; one whose reply
means that trials can start at once; one with a `Job`."""


def main() -> None:
    """Uses Ray in a child process. Ends the child and its descendants when the parent closes the connection."""
    parent = Channel(Connection(int(sys.argv[1])))
    os.set_inheritable(parent.fileno(), False)
    adopt_orphans()
    me, child = os.getpid(), os.fork()
    if child == 0:
        die_with_parent(me)
        _use_ray(parent)
    child_ended = os.pidfd_open(child)
    watched = select.poll()
    watched.register(parent, select.POLLRDHUP)
    watched.register(child_ended, select.POLLIN)
    parent_closed = watched.poll()[0][0] == parent.fileno()
    if parent_closed:
        select.select([child_ended], [], [], CLOSE_S)
    _, status = os.waitpid(child, os.WNOHANG)
    kill_descendants()
    if parent_closed:
        remove(Path(sys.argv[2]))
    if status:
        sys.exit(failure.ended(os.waitstatus_to_exitcode(status)))


def _use_ray(parent: Channel) -> NoReturn:
    """Replies to calls until the parent closes the connection."""
    code = 1
    try:
        join = receive_call(parent)
        joining: Joining
        (joining,) = join.arguments
        join.done()
        sys.path[:] = list(dict.fromkeys([*joining.sys_path, *sys.path]))
        sys.argv = [joining.script]
        failed = _join(joining.address)
        start = receive_call(parent)
        try:
            if failed is not None:
                raise failed
            cluster = Cluster(*start.arguments, started=joining.address is None)
        except RedlineError as error:
            start.fail(error)
        else:
            start.done(PlacedHosts(per_host=cluster.layout.per_host, slots=cluster.slots))
            try:
                _serve(cluster, parent)
            finally:
                cluster.close()
        code = 0
    except EOFError:  # the search ended before its trials were placed
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # does not wait for threads of Ray


def _join(address: str | None) -> RedlineError | None:
    """Joins a cluster, or starts Ray on this machine. Returns the error if that fails."""
    import ray

    # Suppresses Ray's usage report and log lines.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    try:
        if address is None:
            # Ray's monitor would kill the host agent, of which only the trial's ranks should be.
            os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
            options |= {"address": "local", "include_dashboard": False}
        else:
            check_listens(address)
            _authenticate(address)
            options["address"] = address
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(**options)
    except RedlineError as error:
        return error
    except (OSError, RuntimeError, ValueError) as error:
        action = f"joining the Ray cluster at {address!r}" if address else "starting Ray on this machine"
        return RunnerError(f"{action} failed: {error}. `--runner local` works without Ray.")
    return None


def _authenticate(address: str) -> None:
    """Enables Ray's token authentication if the cluster at an address requires it. Ray itself does so for "auto" alone.

    The cluster is asked first: the workers of one without tokens cannot call a driver that requires them.

    Raises:
        RunnerError: the cluster requires a token, and none was found or it is another one.
    """
    from ray._private.authentication import authentication_token_setup as tokens
    from ray._private.services import canonicalize_bootstrap_address
    from ray.exceptions import AuthenticationError

    cluster = canonicalize_bootstrap_address(address)
    if cluster is None:
        return  # Ray is started, or reports that there is no cluster

    places = (
        "the environment variable RAY_AUTH_TOKEN, the file that RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token; on a host "
        "of the cluster `ray get-auth-token` prints it"
    )
    try:
        tokens.ensure_token_if_auth_enabled(create_token_if_missing=False)  # without one, Ray would abort this process
        if not _refuses(cluster):
            return
        enabled = tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    except AuthenticationError:
        enabled = False
    if not enabled and os.environ.get(tokens.AUTH_MODE_ENV_VAR, "token") != "token":
        mode = f"{tokens.AUTH_MODE_ENV_VAR}={os.environ[tokens.AUTH_MODE_ENV_VAR]}"
        raise RunnerError(f"the Ray cluster at {address!r} requires a token, but {mode} disables them")
    if not enabled:
        raise RunnerError(f"the Ray cluster at {address!r} requires a token, and none was found in {places}")
    if _refuses(cluster):
        raise RunnerError(f"the Ray cluster at {address!r} requires another token than that of {places}")


def _refuses(address: str) -> bool:
    """Returns True if a cluster refuses this process's token, or that it has none."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # of Cython
    from ray.exceptions import AuthenticationError

    try:
        # Without a cluster's id the client would ask for it, and repeat that for ten seconds.
        GcsClient(address=address, cluster_id=ANY_CLUSTER).check_alive([], timeout=CLOSE_S)
    except AuthenticationError as error:
        return "InvalidAuthToken" in str(error)
    return False


def _serve(cluster: "Cluster", parent: Channel) -> None:
    def watch() -> None:
        try:
            cluster.watch(lambda: keep_alive(parent))
        except RunnerError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    serve(
        parent,
        lambda call: cluster.dispatch(*call.arguments) if call.method == RUN_JOB else cluster.wait_ready(),
    )


class Cluster:
    """A placement group for each concurrent trial, with a host agent on each of its hosts.

    A trial runs on one host if one has enough devices, otherwise on as few as possible, with the same number of ranks
    on each. Ranks are numbered host by host, so that tensor-parallel ranks are neighbours on a host.

    Args:
        setup: the trials to place.
        started: True if this process started Ray, on this machine.

    Raises:
        UsageError: the cluster has fewer devices than a trial needs.
        RunnerError: Ray placed nothing within a minute.
    """

    def __init__(self, setup: RaySetup, *, started: bool) -> None:
        import ray

        self._ray = ray
        self._setup, self._started = setup, started
        self._kind = "GPU" if setup.cuda else "CPU"
        self._groups: list[Any] = []
        self._worker_groups: dict[int, WorkerGroup] = {}
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lost: dict[int, float] = {}
        """Slots with a lost host that is not placed again, with the time of the loss on the monotonic clock."""
        try:
            self.layout = self._lay_out()
            self.slots = self._count_slots()
            self._place()
        except BaseException:
            self.close()
            raise

    def _lay_out(self) -> Layout:
        devices = self._setup.devices
        nodes = [each["Resources"] for each in self._ray.nodes() if each["Alive"]]
        shares = " + ".join(f"{each.get(self._kind, 0):g}" for each in nodes)
        if not nodes:
            raise RunnerError("the Ray cluster has no live node; start one, or pass `--runner local`")
        layout = lay_out(devices, self._setup.cuda, [each.get(self._kind, 0) for each in nodes])
        if layout is None:
            raise (RunnerError if self._setup.again else UsageError)(
                f"a trial needs {devices} devices, the same number on each of its hosts, but the live nodes of the Ray "
                f"cluster have {shares} {self._kind}s; of a cluster that grows on request, start the nodes first"
            )
        if layout.hosts > 1 and not self._setup.several_hosts:
            raise UsageError(
                f"a callable is one process on one host, but no host of the Ray cluster has {devices} "
                f"{self._kind}s ({shares}); request fewer devices"
            )
        return layout

    def _count_slots(self) -> int:
        possible, concurrency = self.layout.at_once, self._setup.concurrency
        if concurrency is None:
            return possible if self._setup.cuda else 1
        if concurrency > possible and not self._setup.again:
            raise UsageError(
                f"{concurrency} trials at once need {concurrency * self._setup.devices} {self._kind}s, "
                f"but the Ray cluster has {int(self._ray.cluster_resources().get(self._kind, 0))}"
            )
        return min(concurrency, possible)

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
        workers = []
        for host in range(layout.hosts):
            make = self._ray.remote(RayHost).options(
                num_cpus=layout.bundle["CPU"],
                num_gpus=layout.bundle.get("GPU", 0),
                # Stops and health checks must be answered while a trial runs.
                max_concurrency=8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._groups[slot], placement_group_bundle_index=host
                ),
            )
            workers.append(RayWorker(make.remote(self._setup.imports)))
        return WorkerGroup(workers, layout.per_host)

    def wait_ready(self) -> None:
        """Waits until trials can start at once."""
        while 0 in self._lost:
            time.sleep(0.05)
        self._call(0, WorkerGroup.wait_ready)

    def dispatch(self, job: Job) -> Outcome:
        """Runs a job on free devices and returns its outcome.

        Raises:
            RunnerError: a host of it was lost.
        """
        slot = self._free.get()
        while slot in self._lost:  # `watch` ends this process if no host of any slot is placed again
            self._free.put(slot)
            time.sleep(0.05)
            slot = self._free.get()
        try:
            return self._call(slot, lambda workers: workers.run(job))
        except RunnerError as error:
            lost = error.__cause__
            if isinstance(lost, self._ray.exceptions.OutOfMemoryError):
                return Outcome(
                    status=Status.OOM, reason=f"Ray killed it on a host that is short of memory: {_first_line(lost)}"
                )
            raise
        finally:
            self._free.put(slot)

    def _call(self, slot: int, call: Callable[[WorkerGroup], Found]) -> Found:
        exceptions = self._ray.exceptions
        try:
            return call(self._worker_groups[slot])
        except exceptions.RayTaskError as error:
            raise error.cause from error
        except (exceptions.RayError, TimeoutError) as error:
            self._lost[slot] = time.monotonic()
            threading.Thread(target=self._place_again, args=(slot,), daemon=True, name="placing").start()
            raise RunnerError(f"Ray lost the host of a trial: {_first_line(error)}") from error

    def _place_again(self, slot: int) -> None:
        """Places a slot's hosts again, until Ray does not lose them meanwhile."""
        while slot in self._lost:
            self._worker_groups[slot].kill()
            workers = self._worker_groups[slot] = self._worker_group(slot)
            try:
                workers.wait_placed()
                del self._lost[slot]
            except self._ray.exceptions.RayError:
                time.sleep(AGAIN_S)

    def _check_placed(self) -> None:
        """Fails if no trial can run and Ray takes too long to place a lost host again. Ray does not report that no node is
        left for it.

        Raises:
            RunnerError: every slot has lost a host, one of them for too long.
        """
        lost, now = list(self._lost.values()), time.monotonic()
        if len(lost) == self.slots and any(now - since > PLACED_AGAIN_S for since in lost):
            alive = sum(bool(each["Alive"]) for each in self._ray.nodes())
            raise RunnerError(
                f"Ray has lost the hosts of all trials and has not placed them again within {PLACED_AGAIN_S:g} s; live "
                f"nodes: {alive}"
            )

    def watch(self, beat: Callable[[], None]) -> None:
        """Calls `beat` every `BEAT_S` while Ray's head answers. A ready host that does not is killed, and placed again.

        Raises:
            RunnerError: the head is gone, the only node is, or a lost host is not placed again.
        """
        head = self._ray.get_runtime_context().gcs_address
        while True:
            if not _listens(head):
                time.sleep(BEAT_S)  # the head may be restarting at the same address
                if not _listens(head):
                    raise RunnerError(f"Ray's head is gone: nothing listens at {head}")
            nodes = self._ray.nodes()  # does not return if the head is gone
            if self._started and not any(each["Alive"] for each in nodes):
                raise RunnerError("Ray's node on this machine is gone")  # another Ray is started
            for workers in list(self._worker_groups.values()):
                with contextlib.suppress(
                    self._ray.exceptions.RayError
                ):  # the caller that waits for its trial gets it too
                    try:
                        workers.answer(ANSWER_S)
                    except TimeoutError:
                        workers.kill()  # which ends that call, so that the caller places it again
                beat()
            self._check_placed()
            beat()
            time.sleep(BEAT_S)

    def close(self) -> None:
        """Ends all trials, and Ray if it was started here."""
        from ray.util.placement_group import remove_placement_group

        for workers in self._worker_groups.values():
            workers.close()
        for group in self._groups:
            remove_placement_group(group)
        self._ray.shutdown()


def _first_line(error: BaseException) -> str:
    """Returns the first line of a Ray error, which can be very long."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _listens(address: str) -> bool:
    with contextlib.suppress(RunnerError):
        check_listens(address)
        return True
    return False


def check_listens(address: str) -> None:
    """Checks within seconds that a server listens at an address. Ray itself would retry for minutes.

    Raises:
        RunnerError: none does.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return  # such as "auto", which Ray itself resolves
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise RunnerError(
            f"joining the Ray cluster at {address!r} failed: {error}. `--runner local` works without Ray."
        ) from error


if __name__ == "__main__":
    # Pickles must name this module by its import path, not as __main__.
    from redline.runners import ray_driver

    ray_driver.main()
