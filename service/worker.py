"""A worker: joins the pool with its host's devices, leases dry runs, runs them, and brings what came of them.

A dry run that it leases is its own as long as it says in time that it still runs it. If it is killed, or cut off for
longer than that, another worker runs it, and what this one answers then is not taken. A server that is away for less is
waited for, and so is a database that is locked.
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

from ..base.errors import LeaseOver, NotFound, RedlineError, RunnerError, StorageUnavailable, UsageError
from ..base.reading import open_inside
from ..base.scratch import Scratch, remove
from ..results import Measurement, environment
from ..runners import Runner, TrialRequest
from ..runners.unix_user import UnixUser
from .code_runners import CodeRunners
from .logs import MOST_AT_ONCE
from .placing import described
from .pool import LARGEST_OUTCOME, Pool
from .records import Assignment
from .request import is_code
from .store.dry_runs import FORGIVEN, lost
from .warm import WarmRunners

RENEW_S = 2.0
"""How often it is renewed, s."""
WAIT_S = 20.0
"""How long it is waited for something to run before it is asked again, s."""
RETRY_S = 0.5
"""Pause after something that did not get through, s."""
LOG_S = 1.0
"""How often what a dry run prints is sent, s."""
MOST_LOST = 3
"""How often what runs a dry run may be lost here before that is its outcome."""
MOST_UNREADY = 3
"""How often in a row nothing can be started to run a dry run before this worker ends."""
AWAY = (OSError, StorageUnavailable)
"""What says that the pool cannot be reached at the moment."""

_log = logging.getLogger("redline.worker")


@dataclass
class _Lease:
    """A dry run that this worker has."""

    assignment: Assignment
    logs: Path
    """The folder of its log."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set when nobody waits for it any more, or another has it."""
    thread: threading.Thread | None = None

    @property
    def log(self) -> str | None:
        """What its log is called."""
        return self.assignment.payload["requests"][0]["log"]


class Worker:
    """Runs dry runs of a pool until it is stopped.

    Args:
        pool: where they come from.
        name: what it calls itself.
        host: where it is.
        devices: how many devices it has.
        runner: `local`, or `ray` for those of a Ray cluster.
        ray_address: of that cluster.
        code_user: as whom dry runs of code run; None for as whom this runs.
        describe: says what the devices are, and what memory a rank may take.
        warm: makes what keeps its runners.

    Raises:
        UsageError: the runner cannot run code as another user.
    """

    def __init__(
        self,
        pool: Pool,
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
                f"with the runner '{runner}' code runs as whoever started Ray: --code-user is for the runner 'local'"
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
        """Works until `stop` is called; what runs then goes back, and the devices leave the pool.

        Raises:
            RedlineError: the pool does not take this worker, or there is nothing to run on.
        """
        joining = (self.name, self.host, *self._describe(self.devices), environment.versions())
        with Scratch("worker") as folder:
            self._folder = folder
            self._warm = self._make_warm(self._runner, self.devices, folder / "asked", address=self._address)
            self._warm.check()
            if self._code_user is not None:
                self._begin_code(self._code_user)
            threading.Thread(target=self._renew, daemon=True, name="renewing").start()
            # A question that waits for its answer must not keep this from ending.
            threading.Thread(target=self._work, args=joining, daemon=True, name="leasing").start()
            try:
                self._stopping.wait()
            finally:
                self._end()
        if self._trouble is not None:
            raise self._trouble

    def _begin_code(self, user: UnixUser) -> None:
        assert self._warm.shared is not None, "the devices of this host are shared"
        self._folder.chmod(0o711)  # what is in it is for those who may, by name
        (self._folder / "asked").mkdir(mode=0o700)
        self._code = CodeRunners(user, self.devices, self._warm.shared)

    def stop(self) -> None:
        """Has `run` return soon. May be called from a signal's handler."""
        self._stopping.set()

    def _work(self, name: str, host: str, device: dict[str, Any], memory_mib: int, software: dict[str, Any]) -> None:
        """Joins, and leases until it is stopped; joins again where the pool does not know it any more."""
        try:
            while not self._stopping.is_set():
                self._id = self._insisting(self.pool.join, name, host, device, self.devices, memory_mib, software)
                if self._id is not None:
                    self._lease(self._id)
        except RedlineError as error:
            self._trouble = error
        finally:
            self._stopping.set()

    def _lease(self, worker: str) -> None:
        while not self._stopping.is_set():
            if self._unready:  # a moment may mend it
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
                self._insisting(self.pool.give_back, found.dry_run, found.lease)
                return
            lease = _Lease(found, self._folder / f"{found.dry_run}-{found.lease}" / "logs")
            lease.thread = threading.Thread(
                target=self._do, args=(lease,), daemon=True, name=f"dry run {found.dry_run}"
            )
            with self._lock:
                self._leases[found.dry_run] = lease
            lease.thread.start()

    def _do(self, lease: _Lease) -> None:
        """Runs a dry run and answers; one that this worker cannot run, or that its end ends, is given back."""
        assignment = lease.assignment
        lease.logs.parent.mkdir(mode=0o700)
        lease.logs.mkdir()
        try:
            outcome = self._outcome(lease)
        except UsageError as error:
            outcome = {"refused": str(error)}
        if self._stopping.is_set() or (outcome is None and assignment.lease <= FORGIVEN):
            self._insisting(self.pool.give_back, assignment.dry_run, assignment.lease, over=lease.over)
        elif outcome is not None:
            self._answer(lease, small(outcome))
        # Else the lease runs out, and counts as one that was lost: what can be run nowhere must end somewhere.
        with self._lock:
            self._leases.pop(assignment.dry_run, None)
        remove(lease.logs.parent)

    def _answer(self, lease: _Lease, outcome: dict[str, Any]) -> None:
        """Brings an outcome; one that is not taken for one is answered as a crash."""
        of = (lease.assignment.dry_run, lease.assignment.lease)
        try:
            self._insisting(self.pool.answer, *of, outcome, over=lease.over)
        except UsageError as error:
            _log.warning("the outcome of dry run %d is not taken: %s", of[0], error)
            self._insisting(self.pool.answer, *of, lost(f"its outcome is not taken: {error}"[:2000]), over=lease.over)

    def _outcome(self, lease: _Lease) -> dict[str, Any] | None:
        """What comes of a dry run, which is run again where what ran it was lost; None where it was ended, or where there is
        nothing to run it on.

        Raises:
            UsageError: it is not described, or cannot be done here.
        """
        for number in range(MOST_LOST):
            with contextlib.ExitStack() as held:
                if number:
                    # What was lost together is run one after the other: it shows whose fault it is.
                    held.enter_context(self._again)
                try:
                    run = self._apart(lease) or held.enter_context(self._warm.runner(lease.assignment))
                except RunnerError as error:
                    self._not_ready(error)
                    return None
                self._unready = 0
                if lease.over.is_set() or self._stopping.is_set():
                    return None
                try:
                    with self._shipped(lease):
                        if isinstance(run, CodeRunners):
                            return run.tried(lease.assignment, lease.logs, lease.over)
                        return tried(run, lease.assignment, lease.logs)
                except RunnerError as error:
                    if lease.over.is_set() or self._stopping.is_set():
                        return None
                    _log.warning("dry run %d was lost: %s", lease.assignment.dry_run, error)
                    trouble = str(error)
        return lost(f"what ran it was lost {MOST_LOST} times: {trouble}")

    def _apart(self, lease: _Lease) -> CodeRunners | None:
        """What runs a dry run of code as another user; None where it runs as this process does."""
        return self._code if is_code(lease.assignment.request) else None

    def _not_ready(self, error: RunnerError) -> None:
        """Nothing can be started; where that stays so, this worker ends rather than take what others could run."""
        self._unready += 1
        _log.warning("nothing can be run at the moment: %s", error)
        if self._unready >= MOST_UNREADY and not self._stopping.is_set():
            self._trouble = RunnerError(f"this worker can run nothing, and ends: {error}")
            self._stopping.set()

    def _renew(self) -> None:
        """Says of all that runs that it still does; ends what nobody waits for any more."""
        while True:
            began = time.monotonic()
            with self._lock:
                leases = list(self._leases.values())
            if self._stopping.is_set() and not leases:
                return
            for lease in leases:
                try:
                    self.pool.renew(lease.assignment.dry_run, lease.assignment.lease)
                except (LeaseOver, NotFound):
                    self._over(lease)
                except AWAY as error:
                    _log.warning("the pool cannot be reached: %s", error)
            time.sleep(max(0.1, RENEW_S - (time.monotonic() - began)))

    def _over(self, lease: _Lease) -> None:
        if lease.over.is_set():
            return
        lease.over.set()
        if self._code is not None:
            self._code.stop(lease.assignment)
        if lease.log is not None:
            self._warm.stop(lease.assignment, lease.logs / lease.log)

    @contextlib.contextmanager
    def _shipped(self, lease: _Lease) -> Iterator[None]:
        """Sends what a dry run prints as long as the `with` lasts, from the beginning."""
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
        """Sends a file as it grows, until it has ended."""
        assert lease.log is not None
        sent, begun = 0, False
        while True:
            last = ended.wait(LOG_S)
            try:
                data = _part(lease, sent)
                while data or (last and not begun):
                    self.pool.log(lease.assignment, lease.log, sent, data)
                    sent, begun = sent + len(data), True
                    data = _part(lease, sent)
            except (LeaseOver, NotFound, UsageError):
                return
            except AWAY:
                if not last:
                    continue
            if last:
                return

    def _insisting(self, ask: Any, *what: Any, over: threading.Event | None = None) -> Any:
        """Asks the pool until it answers, unless the worker is stopped or what is asked about is over; None then."""
        while True:
            try:
                return ask(*what)
            except (LeaseOver, NotFound):
                return None
            except AWAY as error:
                _log.warning("the pool cannot be reached: %s", error)
                if self._stopping.is_set() or (over is not None and over.is_set()):
                    return None
                time.sleep(RETRY_S)

    def _end(self) -> None:
        """Ends what runs, gives it back, and leaves."""
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
            self._insisting(self.pool.leave, self._id)


def small(outcome: dict[str, Any]) -> dict[str, Any]:
    """An outcome as large as a server takes it: without what single ranks say, where it would be larger, else a crash."""
    if len(json.dumps(outcome)) <= LARGEST_OUTCOME:
        return outcome
    less = _without_ranks(outcome)
    if len(json.dumps(less)) <= LARGEST_OUTCOME:
        return dict(less)
    return lost(f"what it measured takes more than the {LARGEST_OUTCOME >> 10} KiB that a server takes of an outcome")


def _without_ranks(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _without_ranks(each) for name, each in found.items() if name != "ranks"}
    return [_without_ranks(each) for each in found] if isinstance(found, list) else found


def tried(runner: Runner, assignment: Assignment, logs: Path) -> dict[str, Any]:
    """What comes of a dry run, as it travels.

    Raises:
        UsageError: it is not described.
        RunnerError: the machinery failed.
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
    """A part of a log. Where code runs as a user of its own, that user may put links in its place."""
    try:
        with open_inside(lease.logs.parent, f"{lease.logs.name}/{lease.log}") as file:
            file.seek(begin)
            return file.read(MOST_AT_ONCE)
    except FileNotFoundError:  # it has printed nothing yet
        return b""


def main() -> None:
    """A worker that has the database itself at hand, and needs no server: for tests, and for one host."""
    import argparse
    import signal
    import socket

    from .dispatcher import LEASE_S
    from .pool import StorePool
    from .store import Store

    parser = argparse.ArgumentParser(prog="redline.service.worker", description=main.__doc__)
    parser.add_argument("--storage", required=True, help="URL of the service's database")
    parser.add_argument("--data", required=True, type=Path, help="folder of the service's files")
    parser.add_argument("--user", required=True, type=int, help="whose worker it is, by number")
    parser.add_argument("--devices", type=int, default=1, help="how many devices it has")
    given = parser.parse_args()
    pool = StorePool(Store.open(given.storage, create=False), user=given.user, data=given.data, lease_s=LEASE_S)
    host = socket.gethostname()
    worker = Worker(pool, name=host, host=host, devices=given.devices)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    worker.run()


if __name__ == "__main__":
    main()
