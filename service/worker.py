"""A worker: joins the pool with its host's devices, leases dry runs, runs them, and returns their outcomes.

A lease is valid as long as the worker renews it in time. If the worker dies or is disconnected for longer, another
worker runs the dry run and this one's outcome is rejected. Shorter outages of the server or the database are waited
for.
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.errors import (
    LeaseOver,
    MissingDependency,
    NotFound,
    RedlineError,
    RunnerError,
    StorageUnavailable,
    UsageError,
)
from ..base.reading import open_inside
from ..base.scratch import Scratch, remove
from ..results import Measurement, environment
from ..runners import Runner, TrialRequest
from ..runners.unix_user import UnixUser
from .code_runners import CodeRunners
from .logs import MOST_AT_ONCE
from .placing import described
from .pool import LARGEST_OUTCOME, ServerPool
from .records import Assignment
from .request import is_code
from .store.dry_runs import FORGIVEN, lost_outcome
from .warm import WarmRunners

RENEW_S = 2.0
"""Interval between renewals of leases, s."""
WAIT_S = 20.0
"""How long one request for a dry run waits at the server, s."""
RETRY_S = 0.5
"""Pause before a failed request is repeated, s."""
LOG_S = 1.0
"""How often new output of a dry run is sent, s."""
MOST_LOST = 3
"""Number of runners lost during a dry run after which its outcome is a crash."""
MOST_UNREADY = 3
"""Number of failed starts of a runner in a row after which the worker ends."""
AWAY = (ConnectionError, StorageUnavailable)
"""Errors that mean that the pool cannot be reached at the moment. `Refused` is an `OSError`, but is not one of them."""

_log = logging.getLogger("redline.worker")


@dataclass
class _Lease:
    """A dry run leased to this worker."""

    assignment: Assignment
    logs: Path
    over: threading.Event = field(default_factory=threading.Event)
    """Set when the outcome is not needed any more, or another worker has the lease."""
    thread: threading.Thread | None = None

    @property
    def log(self) -> str | None:
        """Name of its log."""
        return self.assignment.payload["requests"][0]["log"]


class Worker:
    """Runs dry runs of a pool until it is stopped.

    Args:
        pool: source of the dry runs.
        name: its name in lists.
        host: its host's name.
        devices: number of devices.
        runner: `local`, or `ray` for the devices of a Ray cluster.
        ray_address: of that cluster.
        code_user: Unix user that runs dry runs of code; None for this process's user.
        describe: returns the description of the devices and the memory limit of a rank.
        warm: makes the runners' cache.

    Raises:
        UsageError: the runner cannot run code as another user.
    """

    def __init__(
        self,
        pool: ServerPool,
        *,
        name: str,
        host: str,
        devices: int,
        runner: str = "local",
        ray_address: str | None = None,
        code_user: UnixUser | None = None,
        describe: Callable[[int], tuple[dict[str, Any], int]] = described,
        warm: Callable[..., WarmRunners] = WarmRunners,
    ) -> None:
        self.pool, self.name, self.host, self.devices = pool, name, host, devices
        self._runner, self._address = runner, ray_address
        if code_user is not None and runner != "local":
            raise UsageError(
                f"--code-user needs the runner 'local': with the runner '{runner}' code runs as the user who started Ray"
            )
        self._code_user = code_user
        self._code: CodeRunners | None = None
        self._describe, self._make_warm = describe, warm
        self._leases: dict[int, _Lease] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._id: str | None = None
        self._trouble: RedlineError | None = None
        self._unready = 0
        self._again = threading.Lock()

    def run(self) -> None:
        """Works until `stop` is called. Then gives back its leases and removes the devices from the pool.

        Raises:
            RedlineError: the pool rejects this worker, or no runner can be started.
        """
        joining = (self.name, self.host, *self._describe(self.devices), environment.versions())
        with Scratch("worker") as folder:
            self._folder = folder
            self._warm = self._make_warm(self._runner, self.devices, folder / "asked", address=self._address)
            self._warm.check()
            if self._code_user is not None:
                self._begin_code(self._code_user)
            threading.Thread(target=self._renew, daemon=True, name="renewing").start()
            # A daemon thread, so that an open request does not delay the end.
            threading.Thread(target=self._work, args=joining, daemon=True, name="leasing").start()
            try:
                self._stopping.wait()
            finally:
                self._end()
        if self._trouble is not None:
            raise self._trouble

    def _begin_code(self, user: UnixUser) -> None:
        assert self._warm.shared is not None, "the devices of this host are shared"
        self._folder.chmod(0o711)  # the other user needs to enter it, not to list it
        (self._folder / "asked").mkdir(mode=0o700)
        self._code = CodeRunners(user, self.devices, self._warm.shared)

    def stop(self) -> None:
        """Makes `run` return soon. Safe in a signal handler."""
        self._stopping.set()

    def _work(self, name: str, host: str, device: dict[str, Any], memory_mib: int, software: dict[str, Any]) -> None:
        """Joins and leases until stopped. Joins again if the pool does not know this worker any more."""
        try:
            while not self._stopping.is_set():
                self._id = self._retrying(self.pool.join, name, host, device, self.devices, memory_mib, software)
                if self._id is not None:
                    self._lease(self._id)
        except RedlineError as error:
            if not self._stopping.is_set():
                self._trouble = error
        finally:
            self._stopping.set()

    def _lease(self, worker: str) -> None:
        while not self._stopping.is_set():
            if self._unready:  # the failure may be temporary
                self._stopping.wait(RETRY_S * 2**self._unready)
            try:
                found = self.pool.lease(worker, WAIT_S)
            except NotFound:
                return
            except AWAY as error:
                _log.warning("the pool cannot be reached: %s", error)
                self._stopping.wait(RETRY_S)
                continue
            if found is None:
                continue
            if self._stopping.is_set():
                self._retrying(self.pool.give_back, found.dry_run, found.lease)
                return
            lease = _Lease(found, self._folder / f"{found.dry_run}-{found.lease}" / "logs")
            lease.thread = threading.Thread(
                target=self._do, args=(lease,), daemon=True, name=f"dry run {found.dry_run}"
            )
            with self._lock:
                self._leases[found.dry_run] = lease
            lease.thread.start()

    def _do(self, lease: _Lease) -> None:
        """Runs a dry run and returns its outcome to the pool. Gives it back if this worker cannot run it or is stopping."""
        assignment = lease.assignment
        try:
            outcome = self._outcome_or_reason(lease)
            if self._stopping.is_set() or (outcome is None and assignment.lease <= FORGIVEN):
                self._retrying(self.pool.give_back, assignment.dry_run, assignment.lease, over=lease.over)
            elif outcome is not None:
                self._answer(lease, small(outcome))
        except RedlineError as error:
            _log.error("the pool does not take the outcome of dry run %d: %s", assignment.dry_run, error)
        finally:
            # A lease without an answer expires now and counts as lost, so that a dry run that no worker can run ends at
            # some point.
            with self._lock:
                self._leases.pop(assignment.dry_run, None)
            remove(lease.logs.parent)

    def _outcome_or_reason(self, lease: _Lease) -> dict[str, Any] | None:
        """Returns what `_outcome` does, or an outcome with the reason why the dry run cannot run here."""
        number = lease.assignment.dry_run
        try:
            lease.logs.parent.mkdir(mode=0o700)
            lease.logs.mkdir()
        except OSError as error:
            self._not_ready(error)
            return None
        try:
            return self._outcome(lease)
        except (UsageError, MissingDependency) as error:
            return {"refused": str(error)}
        except Exception as error:  # of the user's code, or a defect: the search learns of it and continues
            _log.exception("dry run %d failed", number)
            return lost_outcome(f"its worker failed: {type(error).__name__}: {error}"[:2000])

    def _answer(self, lease: _Lease, outcome: dict[str, Any]) -> None:
        """Submits an outcome. An outcome that the pool rejects as invalid is replaced by a crash."""
        of = (lease.assignment.dry_run, lease.assignment.lease)
        try:
            self._retrying(self.pool.answer, *of, outcome, over=lease.over)
        except UsageError as error:
            _log.warning("the outcome of dry run %d is rejected: %s", of[0], error)
            self._retrying(
                self.pool.answer, *of, lost_outcome(f"its outcome is rejected: {error}"[:2000]), over=lease.over
            )

    def _outcome(self, lease: _Lease) -> dict[str, Any] | None:
        """Runs a dry run, repeated if the runner is lost, and returns its outcome; None if it was stopped or no
        runner could be started.

        Raises:
            UsageError: the request is invalid or cannot be run here.
            MissingDependency: it needs a package that is not installed here.
        """
        for number in range(MOST_LOST):
            with contextlib.ExitStack() as stack:
                if number:
                    # Dry runs lost together are repeated one at a time, to find the one at fault.
                    stack.enter_context(self._again)
                try:
                    code = self._code if is_code(lease.assignment.request) else None
                    run = code or stack.enter_context(self._warm.runner(lease.assignment))
                except RunnerError as error:
                    self._not_ready(error)
                    return None
                self._unready = 0
                if lease.over.is_set() or self._stopping.is_set():
                    return None
                try:
                    with self._shipped(lease):
                        if isinstance(run, CodeRunners):
                            return run.run_dry_run(lease.assignment, lease.logs, lease.over)
                        return run_dry_run(run, lease.assignment, lease.logs)
                except RunnerError as error:
                    if lease.over.is_set() or self._stopping.is_set():
                        return None
                    _log.warning("dry run %d was lost: %s", lease.assignment.dry_run, error)
                    trouble = str(error)
        return lost_outcome(f"its runner was lost {MOST_LOST} times: {trouble}")

    def _not_ready(self, error: RunnerError | OSError) -> None:
        """Counts a failed start of a runner. After several in a row the worker ends, so that it does not take dry
        runs from others.
        """
        self._unready += 1
        _log.warning("no runner can be started at the moment: %s", error)
        if self._unready >= MOST_UNREADY and not self._stopping.is_set():
            self._trouble = RunnerError(f"this worker ends, since no runner can be started: {error}")
            self._stopping.set()

    def _renew(self) -> None:
        """Renews the leases of all running dry runs. Stops those whose lease is over."""
        while True:
            start = time.monotonic()
            with self._lock:
                leases = list(self._leases.values())
            if self._stopping.is_set() and not leases:
                return
            for lease in leases:
                try:
                    self.pool.renew(lease.assignment.dry_run, lease.assignment.lease)
                except (LeaseOver, NotFound):
                    self._end_lease(lease)
                except AWAY as error:
                    _log.warning("the pool cannot be reached: %s", error)
                except RedlineError as error:
                    _log.error("the lease of dry run %d is not renewed: %s", lease.assignment.dry_run, error)
            time.sleep(max(0.1, RENEW_S - (time.monotonic() - start)))

    def _end_lease(self, lease: _Lease) -> None:
        if lease.over.is_set():
            return
        lease.over.set()
        if self._code is not None:
            self._code.stop(lease.assignment)
        if lease.log is not None:
            self._warm.stop(lease.assignment, lease.logs / lease.log)

    @contextlib.contextmanager
    def _shipped(self, lease: _Lease) -> Iterator[None]:
        """Sends the output of a dry run from its beginning while the `with` lasts."""
        if lease.log is None:
            yield
            return
        path, ended = lease.logs / lease.log, threading.Event()
        path.unlink(missing_ok=True)
        shipping = threading.Thread(target=self._ship, args=(lease, path, ended), daemon=True, name="log")
        shipping.start()
        try:
            yield
        finally:
            ended.set()
            shipping.join()

    def _ship(self, lease: _Lease, path: Path, ended: threading.Event) -> None:
        """Sends a file as it grows, until `ended` is set."""
        assert lease.log is not None
        sent, started = 0, False
        while True:
            last = ended.wait(LOG_S)
            try:
                data = _part(lease, sent)
                while data or (last and not started):
                    self.pool.log(lease.assignment, lease.log, sent, data)
                    sent, started = sent + len(data), True
                    data = _part(lease, sent)
            except (LeaseOver, NotFound, UsageError):
                return
            except (OSError, StorageUnavailable):
                if not last:
                    continue
            if last:
                return

    def _retrying(self, call: Any, *arguments: Any, over: threading.Event | None = None) -> Any:
        """Calls the pool until it answers; None if the worker is stopped or the lease is over."""
        while True:
            try:
                return call(*arguments)
            except (LeaseOver, NotFound):
                return None
            except AWAY as error:
                _log.warning("the pool cannot be reached: %s", error)
                if self._stopping.is_set() or (over is not None and over.is_set()):
                    return None
                time.sleep(RETRY_S)

    def _end(self) -> None:
        """Stops all dry runs, gives them back, and leaves the pool."""
        self._stopping.set()
        self._warm.close()
        if self._code is not None:
            self._code.close()
        with self._lock:
            threads = [each.thread for each in self._leases.values()]
        for thread in threads:
            if thread is not None:
                thread.join(timeout=10.0)
        if self._id is not None:
            self._retrying(self.pool.leave, self._id)


def small(outcome: dict[str, Any]) -> dict[str, Any]:
    """Returns an outcome within the server's size limit: without the data of single ranks if too large, else a crash."""
    if len(json.dumps(outcome)) <= LARGEST_OUTCOME:
        return outcome
    less = _without_ranks(outcome)
    if len(json.dumps(less)) <= LARGEST_OUTCOME:
        return dict(less)
    return lost_outcome(f"its outcome is larger than the limit of {LARGEST_OUTCOME >> 10} KiB")


def _without_ranks(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _without_ranks(each) for name, each in found.items() if name != "ranks"}
    return [_without_ranks(each) for each in found] if isinstance(found, list) else found


def run_dry_run(runner: Runner, assignment: Assignment, logs: Path) -> dict[str, Any]:
    """Runs a dry run and returns its outcome, as sent to the server.

    Raises:
        UsageError: the request is invalid.
        RunnerError: the runner failed.
    """
    payload = assignment.payload
    requests = [TrialRequest.from_dict(each, logs) for each in payload["requests"]]
    if assignment.kind == "run":
        return runner.run(requests[0]).to_dict()
    if not runner.takes_turns:
        return {"turns": None}
    alone = [Measurement.from_dict(each) for each in payload["alone"]]
    found = runner.take_turns(requests, alone, payload["patience_s"])
    return {"turns": found and [[each.to_dict() for each in turns] for turns in found]}


def _part(lease: _Lease, begin: int) -> bytes:
    """Returns a part of a log. Opens it without following links, as the Unix user that runs code may replace it by one."""
    try:
        with open_inside(lease.logs.parent, f"{lease.logs.name}/{lease.log}") as file:
            file.seek(begin)
            return file.read(MOST_AT_ONCE)
    except FileNotFoundError:  # no output yet
        return b""
