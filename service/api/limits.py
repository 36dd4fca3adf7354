"""How much anybody may send and how often."""

import threading
import time
from collections.abc import Callable

from .problems import Problem

_MOST_BUCKETS = 10_000


class Rates:
    """Token buckets: so many requests a second for each key, and a burst of them at once.

    Args:
        per_second: on average.
        burst: at once.
        clock: s.
    """

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = per_second, burst, clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def take(self, key: str, message: str) -> None:
        """One request.

        Raises:
            Problem: there are too many; it says when to come again.
        """
        with self._lock:
            now = self._clock()
            left, since = self._buckets.get(key, (self._burst, now))
            left = min(self._burst, left + (now - since) * self._rate)
            if left >= 1:
                self._put(key, left - 1, now)
                return
            self._put(key, left, now)
            wait = (1 - left) / self._rate
        raise Problem(
            429, "too_many", message, rule=f"{self._rate:g} a second, {self._burst:g} at once",
            headers={"retry-after": str(max(1, round(wait)))},
        )  # fmt: skip

    def _put(self, key: str, left: float, now: float) -> None:
        if len(self._buckets) >= _MOST_BUCKETS and key not in self._buckets:
            full = [name for name, (had, at) in self._buckets.items() if had + (now - at) * self._rate >= self._burst]
            for name in full or list(self._buckets)[: _MOST_BUCKETS // 2]:
                del self._buckets[name]
        self._buckets[key] = left, now
