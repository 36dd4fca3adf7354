"""A runner that has its dry runs run by workers of the pool, through the store.

The key of a dry run follows from the search alone. A resumed search therefore requests the same dry runs and gets the
stored outcomes: no dry run with a known outcome is run twice.
"""

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..base.errors import AttemptOver, LeaseOver, RunnerError, UsageError
from ..results import Measurement
from ..runners import Runner, TrialRequest
from ..space import Config
from .placing import Placed
from .store import Store

FIRST_LOOK_S, LAST_LOOK_S = 0.05, 0.5
"""Interval between checks for an outcome, s: at first, and later."""
CANCELLED_S = 10.0
"""Time that a search with withdrawn dry runs has to notice its end, s."""
_OF_A_TRIAL = re.compile(r"\d+\.log")


class PoolRunner(Runner):
    """Requests dry runs and waits for their outcomes.

    Args:
        store: where dry runs are requested.
        search: id of the search.
        attempt: its attempt.
        placed: the devices it runs on.
        devices: devices of a dry run.
        slots: dry runs at once.
        in_turns: whether several candidates can be in memory at once, for interleaved timing.
        finished: returns the number of finished trials of the search.
        known: returns an earlier measurement of a configuration to reuse; None if there is none.
    """

    name = "pool"

    def __init__(
        self,
        store: Store,
        *,
        search: str,
        attempt: int,
        placed: Placed,
        devices: int,
        slots: int = 1,
        in_turns: bool = True,
        finished: Callable[[], int] = lambda: 0,
        known: Callable[[Config], Measurement | None] = lambda config: None,
    ) -> None:
        self.device = placed.device
        self.slots = slots
        self._store = store
        self._search, self._attempt, self._devices = search, attempt, devices
        self._memory_limit_mib = placed.memory_limit_mib
        self._in_turns = in_turns
        self._finished = finished
        self._known = known
        self._asked: Counter[str] = Counter()
        self._closing = threading.Event()

    def run(self, request: TrialRequest) -> Measurement:
        name = request.log.name if request.log is not None else f"{request.number}.log"
        if _OF_A_TRIAL.fullmatch(name):
            if (before := self._known(request.config)) is not None:
                return before
            key = f"trial-{request.number}"
        else:
            key = self._again(name.removesuffix(".log"))
        return Measurement.from_dict(self._outcome(key, "run", [request]))

    @property
    def takes_turns(self) -> bool:
        """True on CPUs. A worker whose runner cannot do it returns no turns."""
        return self._in_turns and self.device is not None and self.device.type == "cpu"

    def take_turns(
        self, requests: Sequence[TrialRequest], alone: Sequence[Measurement], patience_s: float = 0.0
    ) -> list[list[Measurement]] | None:
        numbers = ".".join(str(each.number) for each in requests)
        more = {"alone": [each.to_dict() for each in alone], "patience_s": patience_s}
        found = self._outcome(self._again(f"turns-{numbers}"), "turns", requests, more).get("turns")
        return found and [[Measurement.from_dict(each) for each in turns] for turns in found]

    def close(self) -> None:
        """Stops waiting. Requested dry runs remain in the store: a resumed search requests them again."""
        self.closed = True
        self._closing.set()

    def _close_at_end(self) -> None:
        """Waits for the search to end after it was cancelled or taken over by another attempt, then closes."""
        self._closing.wait(CANCELLED_S)
        self.close()

    def _again(self, base: str) -> str:
        """Returns the key of a repeated run. It contains the number of finished trials, so that a resumed search,
        which starts from the same number, gets the same keys.
        """
        stage = f"{base}@{self._finished()}"
        self._asked[stage] += 1
        return f"{stage}-{self._asked[stage]}"

    def _outcome(
        self, key: str, kind: str, requests: Sequence[TrialRequest], more: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Requests a dry run and returns its outcome, without a time limit.

        Raises:
            RunnerError: this runner was closed meanwhile, or the attempt is over.
            UsageError: the worker refused the request.
        """
        payload = {
            "requests": [each.to_dict() for each in requests],
            "memory_limit_mib": self._memory_limit_mib,
            **(more or {}),
        }
        try:
            dry_run = self._store.ask_dry_run(self._search, self._attempt, key, kind, payload, self._devices)
        except AttemptOver as error:
            self._close_at_end()
            raise RunnerError(str(error)) from error
        outcome, pause_s = dry_run.outcome, FIRST_LOOK_S
        while outcome is None:
            if self._closing.wait(pause_s):
                raise RunnerError("the search ended while it waited for a dry run")
            pause_s = min(LAST_LOOK_S, 1.2 * pause_s)
            try:
                outcome = self._store.outcome(dry_run.id)
            except LeaseOver:
                self._close_at_end()
        if "refused" in outcome:
            raise UsageError(outcome["refused"])
        return outcome
