"""A service on a local port: the HTTP server is real, and tests play the cluster and the processes of searches."""

import contextlib
import threading
import time
from dataclasses import dataclass, field

import httpx
import uvicorn
from redline.service.api.app import make_app
from redline.service.api.feed import Feed
from redline.service.api.parts import Metrics, Parts
from redline.service.cluster import STARTING
from redline.service.records import SearchState
from redline.service.runs import Runs
from redline.service.scheduling import Kind
from redline.service.searchers import Searchers
from redline.service.serve_options import ServeOptions
from redline.service.store import Store

SEARCH = {"request": {"target": "gpt2-tiny", "trials": 3}}
SPACE = {"knobs": [{"name": "micro_batch", "type": "choice", "values": [1, 2, 4, 8]}]}


@dataclass
class NoCluster:
    """A cluster that is not reached yet, so that no process of a search is started."""

    kinds: tuple[Kind, ...] = ()
    failure: str | None = STARTING
    address: str = ""


@dataclass
class Served:
    """A running service with a user of each role."""

    address: str
    store: Store
    parts: Parts
    tokens: dict
    cluster: NoCluster = field(default_factory=NoCluster)

    def client(self, role="submitter", **options):
        """Returns an HTTP client with the token of a role, or without a token."""
        headers = ({"authorization": f"Bearer {self.tokens[role]}"} if role else {}) | options.pop("headers", {})
        return httpx.Client(base_url=self.address, headers=headers, trust_env=False, timeout=30, **options)

    def rl(self, role="submitter", **options):
        """Returns an `rl.Client` with the token of a role."""
        import redline as rl

        return rl.Client(self.address, token=self.tokens[role], **options)

    def ends(self, search, state="done", reason="", best=None):
        """Runs a search without a process, and ends it."""
        self.store.give_devices(search, "H100", 1)
        self.store.take_devices(search, SearchState(state), reason, best)


@contextlib.contextmanager
def served(
    folder, *, url=None, allow_code=True, queued=1000, port=0, tokens=None, patience_s=10.0, manages=True,
    proxy="127.0.0.1", **uvicorn_options,
):  # fmt: skip
    """Runs a service over a folder and closes it in order. `manages` is False without the thread that manages searches."""
    with contextlib.ExitStack() as stack:
        url = url or f"sqlite:///{folder / 'redline.db'}"
        store = stack.enter_context(Store.open(url, patience_s=patience_s))
        cluster = NoCluster()
        searchers = Searchers(store, cluster, ServeOptions(data=folder))
        if manages:
            searchers.start()
            stack.callback(searchers.close)
        parts = Parts(
            store=store, searchers=searchers, runs=Runs(folder), feed=Feed(store, every=0.02), metrics=Metrics(),
            allow_code=allow_code, most_queued=queued,
        )  # fmt: skip
        config = uvicorn.Config(
            make_app(parts), port=port, timeout_graceful_shutdown=1, log_config=None, access_log=False, ws="none",
            forwarded_allow_ips=proxy, **uvicorn_options,
        )  # fmt: skip
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        bound_port = server.servers[0].sockets[0].getsockname()[1]
        scheme = "https" if config.ssl_certfile else "http"
        yield Served(f"{scheme}://127.0.0.1:{bound_port}", store, parts, tokens or users(store), cluster)
        parts.feed.stop()
        server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive()


def users(store):
    """Returns a token for each role; `other` is another submitter, `coder` one who may submit code."""
    accounts = {role: store.add_user(role, role) for role in ("reader", "admin")}
    accounts["submitter"] = store.add_user("submitter", "submitter", priority=100)
    accounts["other"] = store.add_user("other", "submitter")
    accounts["coder"] = store.add_user("coder", "code")
    return {name: store.new_token(account, "a test's") for name, account in accounts.items()}
