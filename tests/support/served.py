"""A service on a local port, without searchers or workers: the HTTP server is real, and tests play the other parts."""

import contextlib
import logging
import threading
import time
from dataclasses import dataclass

import httpx
from redline.service.api.app import make_app
from redline.service.api.connections import GuardedServer, Rates, guarded
from redline.service.api.feed import Feed
from redline.service.api.parts import Metrics, Parts
from redline.service.dispatcher import Dispatcher
from redline.service.estimates import Estimates
from redline.service.runs import Runs
from redline.service.searchers import SearcherSlots
from redline.service.store import Store

SEARCH = {"request": {"target": "gpt2-tiny", "trials": 3}}
SPACE = {"knobs": [{"name": "micro_batch", "type": "choice", "values": [1, 2, 4, 8]}]}


@dataclass
class Served:
    """A running service with a user of each role."""

    address: str
    store: Store
    parts: Parts
    tokens: dict

    def client(self, role="submitter", **more):
        """Returns an HTTP client with the token of a role, or without a token."""
        headers = ({"authorization": f"Bearer {self.tokens[role]}"} if role else {}) | more.pop("headers", {})
        return httpx.Client(base_url=self.address, headers=headers, trust_env=False, timeout=30, **more)

    def rl(self, role="submitter", **more):
        """Returns an `rl.Client` with the token of a role."""
        import redline as rl

        return rl.Client(self.address, token=self.tokens[role], **more)


@contextlib.contextmanager
def served(
    folder,
    *,
    url=None,
    rate=1e6,
    allow_code=True,
    workloads=True,
    queued=1000,
    port=0,
    tokens=None,
    patience_s=10.0,
    searchers=lambda store, url, slots: None,
    **uvicorn_,
):
    """Runs a service over a folder and closes it in order. `searchers` makes its `Searchers`."""
    with contextlib.ExitStack() as stack:
        url = url or f"sqlite:///{folder / 'redline.db'}"
        store = stack.enter_context(Store.open(url, patience_s=patience_s))
        dispatcher = Dispatcher(store)
        dispatcher.start()
        stack.callback(dispatcher.close)
        estimates = Estimates()
        stack.callback(estimates.close)
        slots = SearcherSlots(store)
        parts = Parts(
            store=store, dispatcher=dispatcher, slots=slots, runs=Runs(folder), feed=Feed(store, every=0.02),
            estimates=estimates, metrics=Metrics(), rates=Rates(rate, 4 * rate), allow_code=allow_code,
            workloads=workloads, most_queued=queued, url=url, searchers=searchers(store, url, slots),
        )  # fmt: skip
        config = guarded(make_app(parts), port=port, timeout_graceful_shutdown=1, **uvicorn_)
        server = GuardedServer(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        found = server.servers[0].sockets[0].getsockname()[1]
        logging.getLogger("redline.http").setLevel(logging.WARNING)
        scheme = "https" if config.ssl_certfile else "http"
        yield Served(f"{scheme}://127.0.0.1:{found}", store, parts, tokens or users(store))
        parts.feed.stop()
        server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive()


def users(store):
    """Returns a token for each role; `other` is another submitter, `coder` one who may submit code."""
    made = {role: store.add_user(role, role) for role in ("reader", "admin", "worker")}
    made["submitter"] = store.add_user("submitter", "submitter", priority=100)
    made["other"] = store.add_user("other", "submitter")
    made["coder"] = store.add_user("coder", "submitter", allow_code=True)
    return {name: store.new_token(user, "a test's") for name, user in made.items()}
