"""What Prometheus is told."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..store import Store

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
