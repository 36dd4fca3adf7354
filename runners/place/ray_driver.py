"""The process that uses Ray: joins or starts it, places the hosts of trials, and passes jobs to them.

Run as `python -m redline.runners.place.ray_driver FD FOLDER` by `RayRunner` (see `HelperProcess`). Ray's library ends its
process when its head is gone for a minute, hangs if a node is suspended, and installs signal handlers. In a process of
its own, killing that process and its descendants leaves nothing behind, whatever happened to Ray.
"""

import contextlib
import os
import select
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from ...base.device import Device
from ...base.errors import RedlineError, RunnerError
from ...base.option import option
from ...base.scratch import remove
from ..host.process import adopt_orphans, die_with_parent, kill_descendants
from ..host.protocol import Channel, Received, keep_alive, receive_call, serve
from ..trial import failure
from ..trial.job import Outcome
from .ray_cluster import Cluster, device_kinds

CLOSE_S = 15.0
"""Time for Ray to shut down, s."""
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
class PlacedHosts:
    """The reply to `START`, after the hosts of trials are placed."""

    per_host: int
    """Devices of a trial on each host."""
    slots: int
    """Trials at once."""
    note: str
    """A sentence about that number; empty for none."""
    waited_s: float
    """Time that the first trial waited for devices that others use, s."""


JOIN, KINDS, START, READY, RUN_JOB = "join", "kinds", "start", "ready", "job"
"""Calls: the first one, with a `Joining`; one that returns `device_kinds()`; one with a `RaySetup` that places trials; one with
further modules to import, whose reply means that trials can start at once; one with a `Job`. Errors of joining are replied to
`KINDS` and `START`. Notes of `START`, `READY` and `RUN_JOB` state what they wait for."""


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
        watched: list[Cluster] = []
        described: dict[str, Device] = {}
        if failed is None:
            threading.Thread(target=_watch, args=(parent, watched), daemon=True, name="watch").start()
        while not watched:
            call = receive_call(parent)
            try:
                if failed is not None:
                    raise failed
                if call.method == KINDS:
                    call.done(device_kinds(described))
                    continue
                cluster = Cluster(
                    *call.arguments, started=joining.address is None, say=partial(_note_unless_closed, parent, call)
                )
            except RedlineError as error:
                call.fail(error)
            else:
                watched.append(cluster)
                call.done(
                    PlacedHosts(
                        per_host=cluster.layout.per_host,
                        slots=cluster.slots,
                        note=cluster.note,
                        waited_s=cluster.waited_s,
                    )
                )
        import ray

        try:
            serve(parent, lambda call: _reply(cluster, call))
        finally:
            cluster.close()
            ray.shutdown()
        code = 0
    except EOFError:  # the search ended before its trials were placed
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # does not wait for threads of Ray


def _note_unless_closed(parent: Channel, call: Received, text: str) -> None:
    """Sends a note.

    Raises:
        EOFError: the parent has closed the connection.
    """
    if parent.poll():  # it calls nothing else before its trials are placed
        raise EOFError
    call.note(text)


def _reply(cluster: Cluster, call: Received) -> Outcome | None:
    if call.method == RUN_JOB:
        (job,) = call.arguments
        return cluster.dispatch(job, call.note)
    (imports,) = call.arguments
    cluster.wait_ready(call.note, imports)
    return None


def _watch(parent: Channel, watched: Sequence[Cluster]) -> None:
    """Sends signs of life while Ray's head and the hosts of trials answer, and ends this process if the head is gone."""
    import ray

    head = ray.get_runtime_context().gcs_address
    while True:
        if not _listens(head):
            time.sleep(BEAT_S)  # the head may be restarting at the same address
            if not _listens(head):
                _end(f"Ray's head is gone: nothing listens at {head}")
        ray.nodes()  # does not return if the head is gone
        try:
            for cluster in watched:
                cluster.check_hosts(lambda: keep_alive(parent))
        except RunnerError as error:
            _end(str(error))
        keep_alive(parent)
        time.sleep(BEAT_S)


def _end(reason: str) -> None:
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)


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
            _check_node(address)
            options["address"] = address
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(**options)
    except RedlineError as error:
        return error
    except (OSError, RuntimeError, ValueError) as error:
        action = f"joining the Ray cluster at {address!r}" if address else "starting Ray on this machine"
        return _not_joined(action, error)
    return None


def _not_joined(action: str, error: Exception) -> RunnerError:
    failure = RunnerError(f"{action} failed: {error}")
    # A note, since a server, whose only devices are Ray's, shows the error alone.
    failure.add_note(f"`{option('runner', 'local')}` works without Ray.")
    return failure


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


def _check_node(address: str) -> None:
    """Checks that this host is a node of a Ray cluster: Ray itself would look for one for a minute.

    Raises:
        RunnerError: no raylet runs on this host.
    """
    from ray._private.services import find_node_ids

    if not find_node_ids():
        raise RunnerError(
            f"this host is not a node of the Ray cluster at {address!r}. `ray start --address={address} --num-cpus 0 "
            "--num-gpus 0` makes it one without devices, from which searches can be run; `ray stop` ends that"
        )


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
        raise _not_joined(f"joining the Ray cluster at {address!r}", error) from error


if __name__ == "__main__":
    # Pickles must name this module by its import path, not as __main__.
    from redline.runners.place import ray_driver

    ray_driver.main()
