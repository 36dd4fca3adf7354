"""What the routes share: the store, the feed, Prometheus metrics."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..store import Store
from .connections import Rates

if TYPE_CHECKING:
    from ..child_processes import Helper
    from ..dispatcher import Dispatcher
    from ..estimates import Estimates
    from ..runs import Runs
    from ..searchers import SearcherSlots
    from .feed import Feed


BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 30)


class Metrics:
    """Counters and gauges of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        """What `/metrics` shows."""
        made = self.registry
        self.requests = Counter(
            "redline_http_requests", "Requests answered.", ("method", "route", "status"), registry=made
        )
        """Requests."""
        self.seconds = Histogram(
            "redline_http_seconds", "Time until an answer begins.", ("route",), buckets=BUCKETS, registry=made
        )
        """How long answers took."""
        self.refused_tokens = Counter("redline_refused_tokens", "Tokens that were not taken.", registry=made)
        """Tokens that were not taken."""
        self.submitted = Counter("redline_searches_submitted", "Searches accepted.", registry=made)
        """Searches."""
        self.outcomes = Counter("redline_dry_runs_answered", "Outcomes taken from workers.", registry=made)
        """Dry runs that ended."""
        self.fenced = Counter("redline_answers_refused", "Late answers refused, as the lease was over.", registry=made)
        """Late answers."""
        self._searches = Gauge("redline_searches", "Searches by state.", ("state",), registry=made)
        self._dry_runs = Gauge("redline_dry_runs", "Dry runs by state.", ("state",), registry=made)
        self._devices = Gauge("redline_devices", "Devices of the pool.", ("state",), registry=made)
        self._workers = Gauge("redline_workers", "Workers that are there.", registry=made)
        self._listeners = Gauge("redline_event_streams", "Open event streams.", registry=made)

    def render(self, store: Store, listeners: int) -> bytes:
        """The text that Prometheus reads; gauges as they are now."""
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
    """What the routes work with."""

    store: Store
    """The truth."""
    dispatcher: "Dispatcher"
    """Says what runs where."""
    slots: "SearcherSlots"
    """Says which searches run."""
    runs: "Runs"
    """What searches leave."""
    feed: "Feed"
    """Events, live."""
    estimates: "Estimates"
    """Predicts."""
    studies: "Helper"
    """Calls what `studies.py` has."""
    url: str
    """Of the database."""
    metrics: "Metrics"
    """What is counted."""
    rates: Rates
    """How often a user may ask."""
    failures: Rates = field(default_factory=lambda: Rates(0.5, 20))
    """How often an address may try a wrong token."""
    strangers: Rates = field(default_factory=lambda: Rates(20, 200))
    """How often an address may ask without a token for what costs something."""
    most_queued: int = 1000
    """Searches that a user who is no admin may have queued."""
    allow_code: bool = True
    """Whether anybody at all may submit code; whoever may is said of each user."""
    workloads: bool = True
    """Whether that code may be a workload's file, which searchers run as the server's user."""


def parts_of(request: Request) -> Parts:
    """The parts of the application that a request is to."""
    return cast(Parts, request.app.state.parts)
