"""Objects that the routes share: the store, the feed, Prometheus metrics, limits of requests."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..records import SearchState
from ..store import Store
from .problems import Problem

if TYPE_CHECKING:
    from ..runs import Runs
    from ..searchers import Searchers
    from .feed import Feed


_MOST_BUCKETS = 10_000


class Rates:
    """Token buckets that limit the requests per second of each key, with bursts."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = per_second, burst, clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def take(self, key: str, message: str) -> None:
        """Counts one request.

        Raises:
            Problem: there are too many. Its `retry-after` states when to retry.
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
            full = [
                name
                for name, (tokens, since) in self._buckets.items()
                if tokens + (now - since) * self._rate >= self._burst
            ]
            for name in full or list(self._buckets)[: _MOST_BUCKETS // 2]:
                del self._buckets[name]
        self._buckets[key] = left, now


BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 30)


class Metrics:
    """Counters and gauges of one server, in their own registry."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        """The registry that `/metrics` renders."""
        self.requests = Counter(
            "redline_http_requests", "Requests answered.", ("method", "route", "status"), registry=registry
        )
        self.seconds = Histogram(
            "redline_http_seconds", "Time until an answer begins.", ("route",), buckets=BUCKETS, registry=registry
        )
        self.refused_tokens = Counter("redline_refused_tokens", "Tokens that were rejected.", registry=registry)
        self.submitted = Counter("redline_searches_submitted", "Searches accepted.", registry=registry)
        self._searches = Gauge("redline_searches", "Searches by state.", ("state",), registry=registry)
        self._devices = Gauge("redline_devices", "Devices of the cluster.", ("kind", "state"), registry=registry)
        self._listeners = Gauge("redline_event_streams", "Open event streams.", registry=registry)

    def render(self, parts: "Parts") -> bytes:
        """Returns the metrics in Prometheus's text format, with current values of the gauges."""
        contenders = parts.store.contenders()
        for state in (SearchState.RUNNING, SearchState.QUEUED):
            self._searches.labels(str(state)).set(sum(contender.state is state for contender in contenders))
        self._devices.clear()
        for kind, busy in parts.searchers.devices():
            self._devices.labels(kind.name, "busy").set(busy)
            self._devices.labels(kind.name, "free").set(max(0, kind.total - busy))
        self._listeners.set(parts.feed.listeners)
        return generate_latest(self.registry)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Objects that the routes use."""

    store: Store
    searchers: "Searchers"
    runs: "Runs"
    feed: "Feed"
    metrics: Metrics
    rates: Rates
    """Limits the requests of a user."""
    failures: Rates
    """Limits the wrong tokens of an address."""
    strangers: Rates
    """Limits costly requests without a token of an address."""
    most_queued: int
    """Limit of queued searches of a user who is not an admin."""
    allow_code: bool
    """True if users who may submit code can."""


def parts_of(request: Request) -> Parts:
    """Returns the parts of the application that a request belongs to."""
    return cast(Parts, request.app.state.parts)
