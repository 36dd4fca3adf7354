"""Server of the dashboard: its address, port and token."""

import ipaddress
import re
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ...base.errors import MissingDependency, NotFound, StudyError, UsageError
from ..report import RunFiles
from .guard import Guard
from .library import Library

PORT = 8420
TRIES = 100
"""Ports that are tried, from the requested one upwards."""

SHORTEST_TOKEN = 12  # about 72 bits, if its characters are random


def serve(
    root: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    token: str | None = None,
    say: Callable[[str], None] = print,
    started: Callable[[Any], None] = lambda server: None,
) -> None:
    """Serves the dashboard of the runs under `root` until it is interrupted.

    Args:
        root: the folder.
        host: address to listen on. Any but the loopback addresses (127.0.0.1, ::1, localhost) needs a token.
        port: the first port to try; 0 for any.
        token: the token that visitors must send; with None one is generated where it is needed.
        say: receives the lines to print: the address, and a port in use.
        started: receives the uvicorn server before it runs; its `should_exit` ends it.

    Raises:
        StudyError: the folder does not exist, or contains no readable run.
        UsageError: the address or token cannot be used.
        MissingDependency: FastAPI or uvicorn is not installed.
    """
    library = Library(root)
    if not library.ids():
        raise StudyError(
            f"'{root}' and its subfolders contain no run: there is no run.yaml, study.log or trials.csv; give the folder "
            "that contains the --out folders of your runs"
        )
    _readable(library)
    try:
        import uvicorn

        from .app import make_app

        app = make_app(library)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"the dashboard needs {error.name}, which is not installed: pip install 'redline[dashboard]'"
        ) from error
    local = is_local(host)
    if token is not None and not re.fullmatch(rf"[A-Za-z0-9_.~-]{{{SHORTEST_TOKEN},}}", token):
        raise UsageError(
            f"--token must have at least {SHORTEST_TOKEN} characters from letters, digits and -_.~; "
            "without it one is generated"
        )
    if not local and token is None:
        token = secrets.token_urlsafe(24)
    listening = listen(host, port)
    chosen = listening.getsockname()[1]
    if port not in (0, chosen):
        say(f"port {port} is in use; serving on {chosen} instead")
    # On a line of its own the address can be clicked in terminals.
    count = len(library.ids())
    say(f"redline dashboard of {library.root}, {count} run{'s' * (count != 1)}:\n{address(host, chosen, token)}")
    hosts = ("localhost", "127.0.0.1", "[::1]", host.lower()) if local and token is None else None
    config = uvicorn.Config(
        Guard(app, token=token, hosts=hosts), log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=2, ws="none",
    )  # fmt: skip
    server = uvicorn.Server(config)
    started(server)
    # Reads the contents of the first page while the browser starts.
    threading.Thread(target=library.lines, daemon=True).start()
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:  # the usual end
        say("stopped")
    finally:
        listening.close()


def _readable(library: Library) -> None:
    """Raises the error of the first run if no run can be read; otherwise pages show the errors."""
    first_error: NotFound | StudyError | None = None
    for run in library.ids():
        try:
            RunFiles.read(library.folder(run))
        except (NotFound, StudyError) as error:
            first_error = first_error or error
        else:
            return
    raise first_error or AssertionError("there is a run")


def is_local(host: str) -> bool:
    """Returns True if only this machine can reach a server on that address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on the first free port from `port` upwards.

    Raises:
        UsageError: the address does not belong to this machine, or no port is free.
    """
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror or error}; give an address of this machine") from None
    failure: OSError | None = None
    for candidate in range(port, min(port + TRIES, 65536)) if port else (0,):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit this. Without it a response in two pieces waits 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            listener.bind((resolved[0], candidate))
            listener.listen(128)
        except OSError as error:
            listener.close()
            failure = error
            if error.errno not in (98, 48, 13):  # in use (Linux, macOS), not permitted
                break
        else:
            return listener
    raise UsageError(
        f"cannot listen on {host} from port {port} on: {failure.strerror if failure else 'no such port'}; "
        "give another --port or --host"
    )


def address(host: str, port: int, token: str | None) -> str:
    """Returns the URL to open in a browser."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?{urlencode({'token': token})}" if token else "")
