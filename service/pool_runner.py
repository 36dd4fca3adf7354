"""The runner of a search of the service: each dry run is asked for in the store, and a worker of the pool runs it.

A dry run is asked for under a key that follows from the search alone, so that a search that is taken up again asks for
the same dry runs, and is answered what was found before: nothing whose outcome is known is run twice.
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
"""How often it is looked for an outcome, s: at first, and after a while."""
CANCELLED_S = 10.0
"""How long a search whose dry runs are withdrawn may take to hear that it is over, s."""
_OF_A_TRIAL = re.compile(r"\d+\.log")


class PoolRunner(Runner):
    """Asks for dry runs and waits for what comes of them.

    Args:
        store: where dry runs are asked for.
        search: whose they are.
        attempt: of that search.
        placed: on what it runs.
        devices: of a dry run.
        slots: dry runs at once.
        in_turns: whether candidates can be in memory together, and take turns.
        finished: how many of the search's trials are finished.
        known: what a configuration measured before, where that is to be taken; None where it was not.
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
        """Where a host's runner can: on CPUs; one that cannot says so by its outcome."""
        return self._in_turns and self.device is not None and self.device.type == "cpu"

    def take_turns(
        self, requests: Sequence[TrialRequest], alone: Sequence[Measurement], patience_s: float = 0.0
    ) -> list[list[Measurement]] | None:
        numbers = ".".join(str(each.number) for each in requests)
        more = {"alone": [each.to_dict() for each in alone], "patience_s": patience_s}
        found = self._outcome(self._again(f"turns-{numbers}"), "turns", requests, more).get("turns")
        return found and [[Measurement.from_dict(each) for each in turns] for turns in found]

    def close(self) -> None:
        """Waits for nothing any more. What was asked for stays so: a search that is taken up again asks for it again."""
        self.closed = True
        self._closing.set()

    def _over(self) -> None:
        """The search was cancelled, or another attempt has it: it is about to hear, and ends with what was found."""
        self._closing.wait(CANCELLED_S)
        self.close()

    def _again(self, what: str) -> str:
        """The key of something that is done again, after so many finished trials: whoever takes the search up finds the
        same trials finished, and counts from there."""
        stage = f"{what}@{self._finished()}"
        self._asked[stage] += 1
        return f"{stage}-{self._asked[stage]}"

    def _outcome(
        self, key: str, kind: str, requests: Sequence[TrialRequest], more: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What comes of a dry run that is asked for, however long it takes.

        Raises:
            RunnerError: this was closed meanwhile, or the attempt is over.
            UsageError: the worker refused what is asked.
        """
        payload = {
            "requests": [each.to_dict() for each in requests],
            "memory_limit_mib": self._memory_limit_mib,
            **(more or {}),
        }
        try:
            asked = self._store.ask_dry_run(self._search, self._attempt, key, kind, payload, self._devices)
        except AttemptOver as error:
            self._over()
            raise RunnerError(str(error)) from error
        outcome, pause_s = asked.outcome, FIRST_LOOK_S
        while outcome is None:
            if self._closing.wait(pause_s):
                raise RunnerError("the search ended while a dry run of it was waited for")
            pause_s = min(LAST_LOOK_S, 1.2 * pause_s)
            try:
                outcome = self._store.outcome(asked.id)
            except LeaseOver:
                self._over()
        if "refused" in outcome:
            raise UsageError(outcome["refused"])
        return outcome
