"""Retention: deletes searches on request or after some days, and events of searches that ended long ago."""

import logging
import shutil
import threading
from collections.abc import Callable

from ..base.errors import RedlineError, UsageError
from .runs import Runs
from .store import Store
from .store.part import DAY_S
from .store.searches import check_ended


def deleted(store: Store, runs: Runs, search: str) -> None:
    """Deletes a search that has ended, with its folder. The search itself is deleted last, so that a failed deletion can be
    repeated.

    Raises:
        NotFound: the search does not exist.
        UsageError: it has not ended, or its process is still ending.
        OSError: the folder cannot be deleted.
    """
    record = store.search(search)
    check_ended(search, record.state)
    if record.uses:
        raise UsageError(f"the process of {search} has not ended yet; delete the search in a moment")
    folder = runs.folder(search)
    if folder.is_dir():
        shutil.rmtree(folder)
    store.delete_search(search)


ROUND_S = 3600.0
"""Interval between deletions, s."""
_log = logging.getLogger("redline.server")


class Retention(threading.Thread):
    """Deletes old events and old searches, at the start and then every hour.

    Args:
        store: contains them.
        days: how long after their search's end events are kept.
        search_days: how long after its end a search is kept; None for ever.
        delete: deletes a search.
    """

    def __init__(
        self,
        store: Store,
        days: float,
        search_days: float | None = None,
        delete: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(daemon=True, name="retention")
        self._store, self._days = store, days
        self._search_days, self._delete_search = search_days, delete
        self._over = threading.Event()

    def run(self) -> None:
        while True:
            try:
                if count := self._store.forget_events(self._store.clock() - self._days * DAY_S):
                    _log.info("deleted %d events of searches that ended over %g days ago", count, self._days)
                if self._search_days is not None:
                    self._delete_searches(self._store.clock() - self._search_days * DAY_S)
            except (RedlineError, OSError) as error:
                _log.warning("old events and searches are not deleted, next try in an hour: %s", error)
            if self._over.wait(ROUND_S):
                return

    def _delete_searches(self, before: float) -> None:
        """Deletes the searches that ended before a time, except those whose deletion fails."""
        while sum(self._is_deleted(search) for search in self._store.ended_before(before)):
            continue

    def _is_deleted(self, search: str) -> bool:
        """Deletes a search. Returns False if that fails."""
        assert self._delete_search is not None, "search_days needs delete"
        try:
            self._delete_search(search)
        except (RedlineError, OSError) as error:
            _log.warning("the search %s is not deleted, next try in an hour: %s", search, error)
            return False
        self._store.audit("", "delete", search, {"kept_days": self._search_days})
        return True

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()
        self.join()
