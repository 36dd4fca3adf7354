"""Events of searches that are long over are forgotten; their trials, runs and logs stay, and so does the audit."""

import logging
import threading

from ..base.errors import StorageUnavailable
from .store import Store

ROUND_S = 3600.0
"""How often it is looked for events that are old enough, s."""
DAY_S = 86400.0
_log = logging.getLogger("redline.server")


class Forgetting(threading.Thread):
    """Deletes old events, at the start and then every hour.

    Args:
        store: whose.
        days: how long after their search's end events are kept.
    """

    def __init__(self, store: Store, days: float) -> None:
        super().__init__(daemon=True, name="forgetting")
        self._store, self._days = store, days
        self._over = threading.Event()

    def run(self) -> None:
        while True:
            try:
                if found := self._store.forget_events(self._store.clock() - self._days * DAY_S):
                    _log.info("%d events forgotten, of searches that ended over %g days ago", found, self._days)
            except StorageUnavailable as error:
                _log.warning("old events are kept for another hour: %s", error)
            if self._over.wait(ROUND_S):
                return

    def close(self) -> None:
        """Ends it."""
        self._over.set()
        self.join()
