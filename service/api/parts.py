"""Objects that the routes share: the store, the feed, Prometheus metrics."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..store import Store
from .connections import Rates

if TYPE_CHECKING:
    from ..dispatcher import Dispatcher
    from ..estimates import Estimates
    from ..runs import Runs
    from ..searchers import Searchers, SearcherSlots
    from .feed import Feed


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
        self.outcomes = Counter("redline_dry_runs_answered", "Outcomes accepted from workers.", registry=registry)
        self.fenced = Counter(
            "redline_answers_refused", "Late answers refused because their lease was over.", registry=registry
        )
        self._searches = Gauge("redline_searches", "Searches by state.", ("state",), registry=registry)
        self._dry_runs = Gauge("redline_dry_runs", "Dry runs by state.", ("state",), registry=registry)
        self._devices = Gauge("redline_devices", "Devices of the pool.", ("state",), registry=registry)
        self._workers = Gauge("redline_workers", "Workers in the pool.", registry=registry)
        self._listeners = Gauge("redline_event_streams", "Open event streams.", registry=registry)

    def render(self, store: Store, listeners: int) -> bytes:
        """Returns the metrics in Prometheus's text format, with current values of the gauges."""
        waiting, running, workers = store.waiting(), store.running(), store.workers()
        busy = sum(each.devices for each in running)
        total = sum(each.devices for each in workers)
        contenders = store.contenders()
        self._searches.labels("running").set(sum(each.runs for each in contenders))
        self._searches.labels("queued").set(sum(not each.runs for each in contenders))
        self._dry_runs.labels("waiting").set(len(waiting))
        self._dry_runs.labels("running").set(len(running))
        self._devices.labels("busy").set(busy)
        self._devices.labels("free").set(max(0, total - busy))
        self._workers.set(len(workers))
        self._listeners.set(listeners)
        return generate_latest(self.registry)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Objects that the routes use."""

    store: Store
    dispatcher: "Dispatcher"
    slots: "SearcherSlots"
    runs: "Runs"
    feed: "Feed"
    estimates: "Estimates"
    url: str
    """URL of the database."""
    metrics: "Metrics"
    searchers: "Searchers | None" = None
    """None if this process runs no searches."""
    rates: Rates
    """Limits the requests of a user."""
    failures: Rates = field(default_factory=lambda: Rates(0.5, 20))
    """Limits the wrong tokens of an address."""
    strangers: Rates = field(default_factory=lambda: Rates(20, 200))
    """Limits costly requests without a token of an address."""
    most_queued: int = 1000
    """Limit of queued searches of a user who is not an admin."""
    allow_code: bool = True
    """True if users who may submit code can."""
    workloads: bool = True
    """True if that code may be a workload file, which searchers run as the server's user."""


def parts_of(request: Request) -> Parts:
    """Returns the parts of the application that a request belongs to."""
    return cast(Parts, request.app.state.parts)
