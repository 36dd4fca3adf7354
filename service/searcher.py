"""One search of the service in its own process: `redline.tune` with the pool as runner, events written to the store.

The process may be killed at any moment and started again: its trials are in the ledger, and its dry runs are in the store. If
two processes have the same search, the later one owns it; the earlier one finds that out and ends.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import AttemptOver, NotFound, RedlineError, StorageUnavailable, StudyError
from ..results import Trial
from ..results.names import holds_run
from ..runners.failure import is_oom
from ..runners.memory import HostMemoryMeter
from ..tuner import Result, tune
from ..tuner.listener import SearchListener, SearchPlan
from ..tuner.request import Request
from ..tuner.task import resolve_task
from .earlier_results import EarlierResults
from .limits import SearcherLimits
from .logs import folder_of
from .placing import Placed, place
from .pool_runner import PoolRunner
from .records import Search, SearchState
from .request import arguments
from .store import Store

if TYPE_CHECKING:
    from ..estimator import Hardware
    from ..tuner import Result


class StoreListener(SearchListener):
    """Stores the events of a search: `plan`, `started`, `finished`, `remeasuring`, `waiting`, `said`, `ended`."""

    def __init__(self, store: Store, search: str, attempt: int) -> None:
        self._store, self._search, self._attempt = store, search, attempt
        self.done = 0
        """Number of finished trials."""
        self.finished_one: Callable[[Trial], None] = lambda trial: None
        """Called with each finished trial."""
        self.trying = threading.Event()
        """Set when the first trial starts, or if earlier attempts have had it."""

    def on_start(self, plan: SearchPlan) -> None:
        self.done = plan.done
        if plan.done:
            self.trying.set()
        self._record_event(
            "plan",
            name=plan.name,
            where=plan.where,
            valid=plan.valid,
            trials=plan.trials,
            seconds=plan.seconds,
            done=plan.done,
            sampler=plan.sampler,
        )

    def on_wait(self, what: str) -> None:
        self._record_event("waiting", what=what)

    def on_trial_start(self, trial: Trial) -> None:
        self.trying.set()
        self._record_event(
            "started",
            trial=trial.number,
            config=trial.config.to_dict(),
            sampler=trial.sampler,
            predicted_throughput=_finite(trial.predicted_throughput),
            predicted_memory_mib=_finite(trial.predicted_memory_mib),
        )

    def on_trial_end(self, trial: Trial) -> None:
        self.done += 1
        measured = trial.measured
        event = {
            "trial": trial.number,
            "config": trial.config.to_dict(),
            "status": str(measured.status),
            "reason": measured.reason,
            "throughput": _finite(measured.throughput),
            "unit": measured.unit,
            "peak_memory_mib": _finite(measured.peak_memory_mib),
        }
        self._store.tell_trial(self._search, self._attempt, self.done, event)
        self.finished_one(trial)

    def on_remeasure(self, leaders: list[Trial], done: int, total: int, seconds: float = 0.0) -> None:
        self._record_event("remeasuring", leaders=[each.number for each in leaders], done=done, total=total)

    def on_message(self, message: str) -> None:
        self._record_event("said", message=message)

    def on_end(self, result: "Result") -> None:
        best = result.best
        self._record_event("ended", why=result.ended, best=None if best is None else best.trial.number)

    def _record_event(self, kind: str, **data: Any) -> None:
        self._store.add_event(self._search, kind, data, self._attempt)


def _finite(value: float | None) -> float | None:
    """Returns the value, or None for infinity and NaN, which JSON lacks."""
    return value if value is None or abs(value) < float("inf") else None


CHECK_S = 2.0
"""Interval between checks whether the search must end, s."""
LOOK_S = 0.5
"""Interval between checks for suitable devices or a free lock, s."""
LOCKED_S = 10.0
"""How long the previous attempt may keep the search's folder locked, s."""
MOST_AT_ONCE = 4
"""Default limit of concurrent dry runs of a search. With more, the sampler proposes with less information."""
FENCED, LIMITED = 3, 4
"""Exit codes of a process whose search another attempt has taken, and of one that exceeded a limit."""


class Searcher:
    """One attempt at a search.

    Args:
        store: contains the search.
        url: of the same database, for the ledger.
        data: the server's data folder.
        search: id of the search.
        code: whether a workload file may be run here.
        limits: limits of this process. Its parent has applied the memory limit.
    """

    def __init__(
        self,
        store: Store,
        url: str,
        data: Path,
        search: str,
        *,
        code: bool = True,
        limits: SearcherLimits | None = None,
    ) -> None:
        self._store, self._url = store, url
        self._id, self._folder = search, folder_of(data, search)
        self._attempt = store.take_search(search)
        self._search: Search = store.search(search)
        self._code, self._limits = code, limits or SearcherLimits()
        self._trying = threading.Event()
        self._placed_at: float | None = None
        self._cancelled = False
        self._over = threading.Event()

    def run(self) -> None:
        """Runs the search to its end and stores the result."""
        threading.Thread(target=self._watch, daemon=True, name="watch").start()
        try:
            result = self._tuned()
        except (StudyError, StorageUnavailable) as error:
            # A failure of the database or disk may be temporary: the search is restarted.
            raise SystemExit(f"the search cannot continue at the moment: {error}") from error
        except RedlineError as error:
            self._finish(SearchState.FAILED, str(error))
            return
        except Exception as error:
            # Extensions that cannot allocate also return an error without an exception.
            if not (is_oom(error) or isinstance(error, SystemError)):
                raise
            HostMemoryMeter().lift()
            traceback.print_exc()
            self._finish(SearchState.FAILED, self._limits.too_large)
            return
        finally:
            self._over.set()
        if self._cancelled:
            self._finish(SearchState.CANCELLED, "", result)
        elif result.interrupted:
            raise SystemExit("interrupted")
        else:
            self._finish(SearchState.DONE, result.why if result.best is None else result.ended, result)

    def _finish(self, state: SearchState, reason: str, result: Result | None = None) -> None:
        best = result.to_dict()["best"] if result is not None else None
        self._store.finish(self._id, self._attempt, state, reason, best)

    def _tuned(self) -> Result:
        search = self._search
        self._folder.mkdir(parents=True, exist_ok=True)
        asked = arguments(search.request, self._folder / "asked", code=self._code)
        target = asked.pop("target")
        listener = StoreListener(self._store, search.id, self._attempt)
        self._trying = listener.trying
        more: dict[str, Any] = {"out": self._folder, "storage": self._url, "listener": listener}
        placed = None if search.simulated else self._placed()
        self._placed_at = time.monotonic()
        earlier = EarlierResults(self._store, search, self._folder, placed)
        listener.finished_one = earlier.note
        if placed is not None:
            more |= self._on_the_pool(Request(target, **asked), placed, earlier, listener)
        if asked.get("sampler", "bayes") == "bayes":
            more["warm_start"] = earlier.similar(Request(target, **{**asked, **more}))
        start = time.monotonic()
        while True:
            try:
                return tune(target, **{**asked, **more, "resume": holds_run(self._folder)})
            except StudyError as error:
                if "is in use by" not in str(error) or time.monotonic() - start > LOCKED_S:
                    raise
            time.sleep(LOOK_S)

    def _on_the_pool(
        self, asked: Request, placed: Placed, earlier: EarlierResults, listener: StoreListener
    ) -> dict[str, Any]:
        """Returns the arguments of `tune` for a search on the pool, besides those of the request."""
        devices = self._search.devices
        at_once = asked.concurrency
        if at_once is None:
            # Concurrent dry runs slow each other down on a CPU.
            at_once = 1 if placed.device.type == "cpu" else max(1, min(MOST_AT_ONCE, placed.workers_devices // devices))
        runner = PoolRunner(
            self._store,
            search=self._id,
            attempt=self._attempt,
            placed=placed,
            devices=devices,
            slots=at_once,
            in_turns="command" not in self._search.request,
            finished=lambda: listener.done,
            known=earlier.measurement,
        )
        return {
            "runner": runner,
            "devices": devices,
            "concurrency": None,
            "memory_limit": asked.memory_limit or placed.memory_limit_mib,
            "hardware": asked.hardware or self._machine(asked, placed),
        }

    def _machine(self, asked: Request, placed: Placed) -> "Hardware | None":
        """Returns the hardware for the estimate; None if nothing is estimated, as for a command without a model."""
        if "command" in self._search.request and resolve_task(asked, device=placed.device).workload is None:
            return None
        return placed.machine()

    def _placed(self) -> Placed:
        """Returns the devices that this search runs on, chosen once and kept by later attempts."""
        for event in self._store.events(search=self._id):
            if event.kind == "placed":
                return Placed.from_dict(event.data)
        while (found := place(self._search, self._store.workers())) is None:
            time.sleep(LOOK_S)
        self._store.place_search(self._id, self._attempt, found.device.name, found.to_dict())
        return found

    def _broken(self) -> str:
        """Returns an error text for the limit that this process has exceeded; empty if none."""
        since = 0.0
        if self._placed_at is not None and not self._trying.is_set():
            since = time.monotonic() - self._placed_at
        return self._limits.broken(time.process_time(), since)

    def _watch(self) -> None:
        """Ends the search if it is cancelled, over a limit, or taken by another attempt."""
        while not self._over.wait(CHECK_S if not self._cancelled else 10 * CHECK_S):
            try:
                if broken := self._broken():
                    self._finish(SearchState.FAILED, broken)
                    print(broken, file=sys.stderr, flush=True)
                    os._exit(LIMITED)
                found = self._store.attempted_search(self._id, self._attempt)
            except (AttemptOver, NotFound) as error:  # taken by another attempt, or deleted
                print(error, file=sys.stderr, flush=True)
                os._exit(FENCED)
            except StorageUnavailable:
                continue
            if found.state is SearchState.CANCELLED and not self._cancelled:
                self._cancelled = True
                os.kill(os.getpid(), signal.SIGINT)
