"""`redline serve`: runs all parts of the service in one process and its child processes.

It may be killed at any moment and started again: all state is in the database, and searches continue on their own.
"""

import contextlib
import logging
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..base.errors import MissingDependency, StorageUnavailable, StudyError, UsageError
from ..base.lock import FolderLock
from ..runners.host import HostAgent
from ..runners.unix_user import unix_user
from ..views.dashboard.serve import is_local, listen
from .child_processes import EmbeddedWorker
from .dispatcher import Dispatcher
from .estimates import Estimates
from .limits import SearcherLimits
from .records import Role
from .retention import Retention, deleted
from .runs import Runs
from .searcher_task import IMPORTS, driver_of
from .searchers import Searchers, SearcherSlots
from .serve_options import ServeOptions
from .store import Store
from .store.connection import INSTEAD, DatabaseLock

ADMIN, EMBEDDED = "admin", "embedded"
"""Users made by the first start: the administrator, and the owner of the server's own worker."""
STANDBY_S = 0.5
"""How often a standby server checks whether the other has ended, s."""


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
        UsageError: the address, the certificate, the storage or the user for code cannot be used.
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

        stack.enter_context(_locks(options, url, say, end))
        # Started early: it imports in parallel with this process, which has much to import as well.
        agent = HostAgent((*IMPORTS, *driver_of(url)))
        stack.callback(agent.close)
        _check_installed()
        from .api.connections import raise_file_limit

        raise_file_limit()
        _begin_logging(options.json_logs)
        store = stack.enter_context(Store.open(url))
        for line in _first_users(store):
            say(line)
        parts = stack.enter_context(_parts(options, store, url, agent))
        listening = listen(options.host, options.port)
        stack.callback(listening.close)
        server = _server(options, parts)
        servers.append(server)
        if lost.is_set():  # while the server was prepared
            _end(servers)
        address = _address(options, listening.getsockname()[1])
        say(f"redline serve on {address}, data in {options.folder}, {store.database.words}")
        started(address, server)
        if options.worker:
            stack.enter_context(_embedded(options, store, address))
        with _ended_by_signals():
            server.run(sockets=[listening])
    say("stopped; searches continue with the next start")


@contextlib.contextmanager
def _locks(options: ServeOptions, url: str, say: Callable[[str], None], lost: Callable[[], None]) -> Iterator[None]:
    """Locks the folder and the database for this server. With `standby`, waits until they are free.

    Raises:
        StudyError: another server has one of them.
        StorageUnavailable: the database cannot be used.
    """
    announced = False
    while True:
        with contextlib.ExitStack() as stack:
            try:
                stack.callback(FolderLock(options.folder, instead=INSTEAD).release)
                stack.enter_context(DatabaseLock(url, lost))
            except (StudyError, StorageUnavailable) as error:
                # A wrong URL fails at once; a database that is away later comes back.
                if not options.standby or (isinstance(error, StorageUnavailable) and not announced):
                    raise
                if not announced:
                    say(f"waiting on standby: {error}")
                announced = True
            else:
                yield
                return
        time.sleep(STANDBY_S)


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
            what = f"{options.certificate}" + (f" with {options.key}" if options.key is not None else "")
            raise UsageError(
                f"--certificate {what} cannot be used ({error}): give a certificate and its key, in PEM and without a password"
            ) from None
    if options.code_user is not None:
        if not options.worker or options.ray_address is not None:
            raise UsageError(
                "--code-user only applies to this host's devices: leave --no-worker and --ray-address out, or pass it to "
                "`redline worker`"
            )
        unix_user(options.code_user)


def _first_users(store: Store) -> Iterator[str]:
    """Makes the users of a first start and yields the lines to print about them."""
    names = {each.name for each in store.users()}
    if EMBEDDED not in names:
        store.add_user(EMBEDDED, Role.WORKER)
    if ADMIN in names or len(names - {EMBEDDED}):
        return
    token = store.new_token(store.add_user(ADMIN, Role.ADMIN, allow_code=True), "made by the first start")
    yield f"a first start: this is the token of the user '{ADMIN}', shown this once\nexport REDLINE_TOKEN={token}"


@contextlib.contextmanager
def _parts(options: ServeOptions, store: Store, url: str, agent: HostAgent) -> Iterator[Any]:
    """Starts the parts that the routes use; ends them in reverse order."""
    from .api.connections import Rates
    from .api.feed import Feed
    from .api.parts import Metrics, Parts

    with contextlib.ExitStack() as stack:
        dispatcher = Dispatcher(store)
        dispatcher.start()
        stack.callback(dispatcher.close)
        slots = SearcherSlots(store, options.searches)
        limits = SearcherLimits(memory_mib=options.memory_mib)
        workloads = options.workloads and options.code_user is None
        searchers = Searchers(
            store,
            url,
            options.folder,
            slots,
            allow_code=options.allow_code,
            workloads=workloads,
            limits=limits,
            started=agent,
        )
        searchers.start()
        stack.callback(searchers.close)
        estimates = Estimates()
        stack.callback(estimates.close)
        runs = Runs(options.folder)
        delete = partial(deleted, store, runs, url=url)
        forgetting = Retention(store, options.keep_events, options.keep_searches, delete)
        forgetting.start()
        stack.callback(forgetting.close)
        yield Parts(
            store=store,
            dispatcher=dispatcher,
            slots=slots,
            searchers=searchers,
            runs=runs,
            feed=Feed(store),
            estimates=estimates,
            metrics=Metrics(),
            rates=Rates(options.rate, 4 * options.rate),
            allow_code=options.allow_code,
            workloads=workloads,
            most_queued=options.queued,
            url=url,
        )


def _server(options: ServeOptions, parts: Any) -> Any:
    """Returns the HTTP server, which ends its event streams as soon as it is asked to end."""
    from .api.app import make_app
    from .api.connections import GuardedServer, guarded

    class Server(GuardedServer):
        def handle_exit(self, sig: int, frame: Any) -> None:
            parts.feed.stop()
            super().handle_exit(sig, frame)

    config = guarded(
        make_app(parts),
        proxy=options.proxy,
        timeout_graceful_shutdown=3,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key,
    )
    return Server(config)


def _address(options: ServeOptions, port: int) -> str:
    scheme = "https" if options.certificate is not None else "http"
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


@contextlib.contextmanager
def _embedded(options: ServeOptions, store: Store, address: str) -> Iterator[None]:
    """Runs this host's worker with a new token, after revoking earlier ones."""
    for old in store.tokens(store.user(EMBEDDED).id):
        if old.revoked is None:
            store.revoke(old.id)
    token = store.new_token(store.user(EMBEDDED), "of the server's own worker")
    worker = EmbeddedWorker(
        address,
        token,
        devices=options.devices,
        ray_address=options.ray_address,
        certificate=options.certificate,
        code_user=options.code_user,
    )
    worker.start()
    try:
        yield
    finally:
        worker.close()


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
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _begin_logging(as_json: bool) -> None:
    from .api.app import JsonLines, PlainLines

    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else PlainLines())
    logger = logging.getLogger("redline")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if as_json else logging.WARNING)


def exposed(options: ServeOptions) -> str:
    """Returns a warning for an address that other hosts reach without encryption; empty otherwise."""
    if is_local(options.host) or options.certificate is not None:
        return ""
    return f"{options.host} is reachable from other hosts without encryption: pass --certificate, or use a reverse proxy with TLS"
