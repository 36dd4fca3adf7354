"""Objects that the routes share: the store, the feed, Prometheus metrics."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..records import SearchState
from ..store import Store

if TYPE_CHECKING:
    from ..runs import Runs
    from ..searchers import Searchers
    from .feed import Feed

AUDIT = logging.getLogger("redline.audit")
"""Log of what users do."""
BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 30)  # s: from a lookup to the client's limit


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
    most_queued: int
    """Limit of queued searches of a user who is not an admin."""
    allow_code: bool
    """True if users who may submit code can."""


def parts_of(request: Request) -> Parts:
    """Returns the parts of the application that a request belongs to."""
    return cast(Parts, request.app.state.parts)
