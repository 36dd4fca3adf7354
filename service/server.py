"""`redline serve`: runs all parts of the service in one process; Ray and searches have processes of their own.

It may be killed at any moment and started again: all state is in the database and the folders of searches, whose processes go
on meanwhile.
"""

import contextlib
import logging
import resource
import signal
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..base.errors import MissingDependency, UsageError
from ..base.lock import FolderLock
from ..views.dashboard.serve import is_local, listen
from .cluster import Cluster
from .records import Role
from .runs import Runs
from .searchers import Searchers
from .serve_options import ServeOptions
from .store import Store
from .store.connection import INSTEAD, DatabaseLock

ADMIN = "admin"
"""The user made by the first start."""
CONNECTIONS = 2048
"""Connections at once, of clients and pages; uvicorn answers further ones with 503."""
IDLE_S = 30
"""How long a connection without a request is kept, s."""


def serve(
    options: ServeOptions,
    *,
    say: Callable[[str], None] = print,
    started: Callable[[str, Any], None] = lambda address, server: None,
) -> None:
    """Serves until it is interrupted or terminated.

    Args:
        options: the options of `redline serve`.
        say: called with the address, and with the token of a first start.
        started: called with the address and the uvicorn server before it runs. Its `should_exit` ends it.

    Raises:
        UsageError: the address, the certificate or the storage cannot be used.
        StudyError: another server has the folder or the database.
        StorageUnavailable: the database cannot be used.
        MissingDependency: a package is not installed.
    """
    _check(options)
    with contextlib.ExitStack() as stack:
        options.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        url = options.storage or f"sqlite:///{(options.folder / 'redline.db').absolute()}"
        servers: list[Any] = []
        lost = threading.Event()

        def end() -> None:
            lost.set()
            _end(servers)

        stack.callback(FolderLock(options.folder, instead=INSTEAD).release)
        stack.callback(DatabaseLock(url, end).close)
        _check_installed()
        _raise_file_limit()
        _begin_logging()
        store = stack.enter_context(Store.open(url))
        for line in _first_users(store):
            say(line)
        listening = listen(options.host, options.port)
        stack.callback(listening.close)
        server = _server(options, stack.enter_context(_parts(options, store)))
        servers.append(server)
        if lost.is_set():  # while the server was prepared
            _end(servers)
        address = _address(options, listening.getsockname()[1])
        say(f"redline serve on {address}, data in {options.folder}, {store.database.words}")
        started(address, server)
        with _ended_by_signals():
            server.run(sockets=[listening])
    say("stopped; searches continue with the next start")


def _end(servers: Sequence[Any]) -> None:
    for server in servers:
        server.should_exit = True


def _check_installed() -> None:
    try:
        from .api import app as app  # fails if a dependency is missing
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"the service needs {error.name}, which is not installed: pip install 'redline[service]'"
        ) from error


def _check(options: ServeOptions) -> None:
    if options.folder.exists() and not options.folder.is_dir():
        raise UsageError(f"--data {options.data} is a file; give a folder")
    for name, path in (("--certificate", options.certificate), ("--key", options.key)):
        if path is not None and not Path(path).is_file():
            raise UsageError(f"{name} {path}: there is no such file")
    if options.key is not None and options.certificate is None:
        raise UsageError("--key needs a --certificate")
    if options.certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.certificate, options.key, password=str)
        except (OSError, ValueError) as error:
            files = f"{options.certificate}" + (f" with {options.key}" if options.key is not None else "")
            raise UsageError(
                f"--certificate {files} cannot be used ({error}): give a certificate and its key, in PEM and without a password"
            ) from None


def _first_users(store: Store) -> Iterator[str]:
    """Makes the user of a first start and yields the lines to print about it."""
    if store.users():
        return
    token = store.new_token(store.add_user(ADMIN, Role.ADMIN), "made by the first start")
    yield f"a first start: this is the token of the user '{ADMIN}', shown this once\nexport REDLINE_TOKEN={token}"


@contextlib.contextmanager
def _parts(options: ServeOptions, store: Store) -> Iterator[Any]:
    """Starts the parts that the routes use; ends them in reverse order."""
    from .api.feed import Feed
    from .api.parts import Metrics, Parts

    with contextlib.ExitStack() as stack:
        cluster = Cluster(options.folder, options.ray_address, options.devices)
        cluster.start()
        stack.callback(cluster.close)
        searchers = Searchers(store, cluster, options)
        searchers.start()
        stack.callback(searchers.close)
        yield Parts(
            store=store,
            searchers=searchers,
            runs=Runs(options.folder),
            feed=Feed(store),
            metrics=Metrics(),
            allow_code=options.allow_code,
            most_queued=options.queued,
        )


def _server(options: ServeOptions, parts: Any) -> Any:
    """Returns the HTTP server, which ends its event streams as soon as it is asked to end."""
    from uvicorn import Config, Server

    from .api.app import make_app

    class ServerWithStreams(Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            parts.feed.stop()
            super().handle_exit(sig, frame)

    config = Config(
        make_app(parts), loop="asyncio", ws="none", log_config=None, access_log=False, server_header=False,
        timeout_keep_alive=IDLE_S, timeout_graceful_shutdown=3, limit_concurrency=CONNECTIONS,
        forwarded_allow_ips=options.proxy, ssl_certfile=options.certificate, ssl_keyfile=options.key,
    )  # fmt: skip
    return ServerWithStreams(config)


def _raise_file_limit() -> None:
    """Raises this process's limit of open files, since connections are files and the usual 1,024 are soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _address(options: ServeOptions, port: int) -> str:
    scheme = "https" if options.certificate is not None else "http"
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Handles SIGTERM like an interrupt, so that it leads to cleanup. uvicorn raises the signal once more after it
    has ended.
    """

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGTERM, interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _begin_logging() -> None:
    from .api.app import PlainLines

    handler = logging.StreamHandler()
    handler.setFormatter(PlainLines())
    logger = logging.getLogger("redline")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    logging.getLogger("redline.audit").setLevel(logging.INFO)  # what users do is always logged


def exposed(options: ServeOptions) -> str | None:
    """Returns a warning for an address that other hosts reach without encryption; None otherwise."""
    if is_local(options.host) or options.certificate is not None:
        return None
    return f"{options.host} is reachable from other hosts without encryption: pass --certificate, or use a reverse proxy with TLS"
