"""Slots of the searches that run at once: who gets one, who gives one up, and why the others wait."""

import logging
import threading
import time
from collections.abc import Callable, Iterable

from .records import Contender, Share, Worker
from .scheduling import share_slots, why_no_slot
from .store import Store

MOST = 8
"""Searches that run at once; the others are queued. Each takes a process, and beyond what they share some 100 MiB."""
UNABLE_S = 10.0
"""A search that cannot run for so long gives up its slot, s: a worker that is started anew may be back by then."""
DECIDE_S = 1.0
"""How often slots are looked at where none is free and nothing was submitted, and how old a reason may be, s."""
_log = logging.getLogger("redline.searchers")


class SearcherSlots:
    """Shares the slots. May be used from several threads.

    Args:
        store: of the searches.
        most: how many run at once.
        monotonic: tells time that never goes back.
    """

    def __init__(self, store: Store, most: int = MOST, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        """How many searches run at once."""
        self._store = store
        self._monotonic = monotonic
        self._decided = float("-inf")
        self._unable: dict[str, float] = {}
        self._told: tuple[float, dict[str, str]] = (float("-inf"), {})
        self._lock = threading.Lock()

    def share(self) -> tuple[set[str], list[str], list[str]]:
        """One decision, carried out in the store.

        Returns:
            The searches that have a slot, those that get one now, in order, and those that gave theirs up.
        """
        contenders, now = self._store.contenders(), self._monotonic()
        running = {each.search for each in contenders if each.runs}
        free = len(running) < self.most and len(running) < len(contenders)
        if not free and now - self._decided < DECIDE_S:
            return running, [], []
        self._decided = now
        workers, shares = self._looked_at()
        begin, cannot = share_slots(contenders, self._store.running(), workers, shares, self.most)
        held = {each.search for each in contenders if each.held}
        self._unable = {each: self._unable.get(each, now) for each in cannot}
        gone = []
        for search, since in self._unable.items():
            if (search in held or now - since >= UNABLE_S) and self._store.put_back(search, cannot[search]):
                _log.info("the search %s gives up its slot: %s", search, cannot[search])
                gone.append(search)
        return running - {*gone}, begin, gone

    def why(self, searches: Iterable[str] = ()) -> dict[str, str]:
        """Why searches in the queue have no slot, by id; a second old at most, and newer where one of these is missing."""
        with self._lock:
            asked, found = self._told
            if self._monotonic() - asked > DECIDE_S or any(each not in found for each in searches):
                contenders: list[Contender] = self._store.contenders()
                if any(not each.runs for each in contenders):
                    workers, shares = self._looked_at()
                    found = why_no_slot(contenders, self._store.running(), workers, shares, self.most)
                else:
                    found = {}
                self._told = self._monotonic(), found
            return found

    def _looked_at(self) -> tuple[list[Worker], list[Share]]:
        return self._store.workers(), self._store.shares()
