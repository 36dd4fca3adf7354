"""Assigns waiting dry runs to workers that request one, in a thread of the server.

The state is in the store. This process only keeps the open requests of workers, and a lease is made at the moment its
worker takes it, so that nothing is lost if the process dies.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache

from ..base.errors import LeaseOver, NotFound, Refused, StorageUnavailable
from .records import Assignment, Share, Worker
from .scheduling import decide, why_waiting
from .store import Store

LEASE_S = 6.0
"""Duration of a lease, s. Workers renew it three times in that time."""
LOOK_S = 0.05
"""Interval between checks for changes, s."""
DECIDE_S = 1.0
"""Interval between decisions while nothing changes, s."""
SHARES_S = 2.0
"""How long the users' shares are cached, s."""
HERE_S = 2.0
"""A worker that has not requested a dry run for this long is left out of decisions, s."""

_log = logging.getLogger(__name__)


class Dispatcher(threading.Thread):
    """Assigns dry runs to workers."""

    def __init__(
        self, store: Store, *, lease_s: float = LEASE_S, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(name="dispatcher", daemon=True)
        self.store = store
        self.lease_s = lease_s
        self.failure = ""
        """Why no decision is possible at the moment; empty if there is no error."""
        self._monotonic = monotonic
        self._began = monotonic()
        self._since = store.clock()
        self._asking: dict[str, deque[Future[Assignment | None]]] = {}
        self._asked: dict[str, float] = {}
        self._shares: tuple[float, list[Share]] = (float("-inf"), [])
        self._left: Callable[[], dict[str, str]] = dict
        self._mutex = threading.Lock()
        self._changed = threading.Event()
        self._closing = threading.Event()

    def ask(self, worker: str) -> "Future[Assignment | None]":
        """Registers a worker's request for a dry run and returns its future. The caller cancels the future to
        withdraw the request.
        """
        future: Future[Assignment | None] = Future()
        with self._mutex:
            self._asking.setdefault(worker, deque()).append(future)
            self._asked[worker] = self._monotonic()
        self.wake()
        return future

    @property
    def reasons(self) -> dict[str, str]:
        """Why searches wait, by id, as of the last decision."""
        return self._left()

    def wake(self) -> None:
        """Triggers a decision now."""
        self._changed.set()

    def run(self) -> None:
        """Decides after every change, and at least each second, until it is closed."""
        seen, decided, looked = -1, float("-inf"), self._monotonic()
        while not self._closing.is_set():
            woken = self._changed.wait(LOOK_S)
            self._changed.clear()
            try:
                latest = self.store.latest()
                if self.failure or self._monotonic() - looked > self.lease_s:
                    # The database was away, or this process did not run: nobody could renew a lease.
                    self._began, self._since = self._monotonic(), self.store.clock()
                if woken or latest != seen or self._monotonic() - decided >= DECIDE_S:
                    seen, decided = latest, self._monotonic()
                    self.step()
                self.failure = ""
            except StorageUnavailable as error:
                if not self.failure:
                    _log.error("nothing is dispatched: %s", error)
                self.failure = str(error)
            except Exception as error:  # the next decision may succeed, and without this thread nothing is dispatched
                _log.exception("nothing is dispatched")
                self.failure = f"{type(error).__name__}: {error}"
            if self.failure:
                self._closing.wait(DECIDE_S)
            looked = self._monotonic()
        with self._mutex:
            asking = [each for futures in self._asking.values() for each in futures]
            self._asking.clear()
        for each in asking:
            if each.set_running_or_notify_cancel():
                each.set_result(None)

    def close(self) -> None:
        """Ends the thread. Open requests get None."""
        self._closing.set()
        self.wake()
        if self.is_alive():
            self.join()

    def step(self) -> list[Assignment]:
        """Makes one decision, leases accordingly, and returns the leases."""
        # While no server ran, no lease could be renewed: after a start leases get time for one renewal.
        if self._monotonic() - self._began > self.lease_s:
            self.store.expire(renewed_after=self._since + self.lease_s, overdue_s=self.lease_s / 2)
            self.store.forget_unseen()
        waiting, running, shares = self.store.waiting(), self.store.running(), self._shares_now()
        workers = self._reachable_workers(self.store.workers())
        now = self.store.clock()
        placed = decide(waiting, running, workers, shares, now)
        given = [each for each in (self._give(*pair) for pair in placed) if each is not None]
        taken = {each.dry_run for each in given}
        left = [each for each in waiting if each.dry_run not in taken]
        self._left = cache(lambda: why_waiting(left, running, workers, shares, now))
        return given

    def _give(self, dry_run: int, worker: str) -> Assignment | None:
        """Leases a dry run to a worker; None if the worker has no open request, or the dry run is no longer available."""
        future = self._question(worker)
        if future is None:
            return None
        try:
            assignment = self.store.lease(dry_run, worker, self.lease_s)
        except (LeaseOver, NotFound, Refused) as error:  # it was cancelled, or the worker left, just now
            _log.info("not leased: %s", error)
            future.set_result(None)  # the worker requests again
            return None
        except BaseException:
            future.set_result(None)
            raise
        future.set_result(assignment)
        return assignment

    def _question(self, worker: str) -> "Future[Assignment | None] | None":
        """Takes a worker's oldest open request, which can no longer be cancelled afterwards; None if there is none."""
        with self._mutex:
            futures = self._asking.get(worker, deque())
            while futures:
                future = futures.popleft()
                if future.set_running_or_notify_cancel():
                    return future
        return None

    def _reachable_workers(self, workers: list[Worker]) -> list[Worker]:
        """Returns the workers that have an open request or had one recently."""
        now = self._monotonic()
        with self._mutex:
            for worker, futures in list(self._asking.items()):
                while futures and futures[0].cancelled():
                    futures.popleft()
                if futures:
                    self._asked[worker] = now
                else:
                    del self._asking[worker]
            recent = {worker for worker, asked in self._asked.items() if now - asked <= HERE_S}
            self._asked = {worker: self._asked[worker] for worker in recent}
        return [each for each in workers if each.id in recent]

    def _shares_now(self) -> list[Share]:
        asked, shares = self._shares
        now = self._monotonic()
        if now - asked > SHARES_S:
            shares = self.store.shares()
            self._shares = now, shares
        return shares
