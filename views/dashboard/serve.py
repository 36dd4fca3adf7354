"""Server of the dashboard: its endpoints, its port, and security headers of its responses."""

import ipaddress
import json
import re
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ...base.errors import MissingDependency, NotFound, StudyError, UsageError
from ...base.reading import Outside, open_inside, read_inside, tail_inside
from ...results.names import TABLE
from ...results.table import LARGEST_TABLE
from ..report import Source
from ..report.page import SCRIPTS, asset, bundle, exports
from .library import Library

ADDRESS = "127.0.0.1"
"""Address that it listens on."""
NAMES = frozenset({"localhost", ADDRESS, "[::1]"})
"""Names that the Host header may have."""
HEADERS = {
    # Scripts and styles only from files of this server, so that text which looks like HTML has no effect.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


_NAME = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/@\s]+)(?::[0-9]{1,5})?")


class Guard:
    """An ASGI middleware that checks the Host header and adds `HEADERS`. Without the check a page of another site could reach the
    server under its own name, by DNS rebinding.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        guarded = with_headers(send, HEADERS)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if _host(headers.get("host", "")) in NAMES:
            await self.app(scope, receive, guarded)
            return
        body = b"This dashboard accepts only the names of this machine."
        answer = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        await guarded({"type": "http.response.start", "status": 400, "headers": answer})
        await guarded({"type": "http.response.body", "body": body})


def with_headers(send: Any, headers: Mapping[str, str]) -> Any:
    """Returns an ASGI `send` that sets these headers in every answer."""
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def send_with_headers(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            unchanged = [header for header in message["headers"] if header[0].decode("latin-1").lower() not in headers]
            message = message | {"headers": [*unchanged, *encoded]}
        await send(message)

    return send_with_headers


def _host(header: str) -> str | None:
    """Returns the host name in a Host header, without the port (RFC 9110, 7.2); None if the header has any other form."""
    match = _NAME.fullmatch(header.strip().lower())
    return match[1] if match else None


PORT = 8420
TRIES = 100
"""Ports that are tried, from the requested one upwards."""


def serve(
    root: str | Path,
    *,
    port: int = PORT,
    say: Callable[[str], None] = print,
    started: Callable[[Any], None] = lambda server: None,
) -> None:
    """Serves the dashboard of the runs under `root` until it is interrupted.

    Args:
        root: the folder.
        port: the first port to try; 0 for any.
        say: receives the lines to print: the address, and a port in use.
        started: receives the uvicorn server before it runs; its `should_exit` ends it.

    Raises:
        StudyError: the folder does not exist, or contains no readable run.
        UsageError: no port is free.
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

        app = make_app(library)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"the dashboard needs {error.name}, which is not installed: pip install 'redline[dashboard]'"
        ) from error
    listening = listen(ADDRESS, port)
    chosen = listening.getsockname()[1]
    if port not in (0, chosen):
        say(f"port {port} is in use; serving on {chosen} instead")
    # On a line of its own the address can be clicked in terminals.
    count = len(library.ids())
    say(f"redline dashboard of {library.root}, {count} run{'s' * (count != 1)}:\nhttp://{ADDRESS}:{chosen}/")
    config = uvicorn.Config(
        Guard(app), log_level="warning", access_log=False, server_header=False,
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
            Source.read(library.folder(run))
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


LOG_BYTES = 256 * 1024
"""Bytes shown from the end of a log; the whole log can be downloaded."""

PAGES = ("api", "list", "watch", "overlay", "main")
"""The scripts of the dashboard itself, loaded after those that it shares with the report."""


def make_app(library: Library) -> Any:
    """Returns the FastAPI application over a library's runs, without the guard (see `serve`)."""
    from fastapi import FastAPI, Request
    from fastapi.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.middleware.gzip import GZipMiddleware

    # No generated documentation: its scripts would be loaded from other hosts.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(GZipMiddleware, minimum_size=2048, compresslevel=3)

    def answer(content: Any) -> Response:
        encoded = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return Response(encoded.encode("utf-8", "replace"), media_type="application/json")

    @app.exception_handler(NotFound)
    def not_found(request: Request, error: NotFound) -> Response:
        return PlainTextResponse(str(error), status_code=404)

    @app.exception_handler(StudyError)
    def unreadable(request: Request, error: StudyError) -> Response:
        return PlainTextResponse(str(error), status_code=500)

    @app.get("/")
    def index() -> Response:
        return Response(asset_file("index.html"), media_type="text/html; charset=utf-8")

    @app.get("/icon.svg")
    def icon() -> Response:
        return Response(asset_file("icon.svg"), media_type="image/svg+xml")

    @app.get("/redline.js")
    def script() -> Response:
        return Response(scripts(), media_type="text/javascript; charset=utf-8")

    @app.get("/redline.css")
    def style() -> Response:
        return Response(asset("style.css") + asset_file("dashboard.css"), media_type="text/css; charset=utf-8")

    @app.get("/api/runs")
    def runs() -> Response:
        return answer({"root": library.root.name, "runs": library.lines()})

    @app.get("/api/run")
    def run(run: str, have: str = "") -> Response:
        changes = library.changes(run, have)
        return Response(status_code=204) if changes is None else answer(changes)

    @app.get("/api/exports")
    def formats(run: str, trial: int) -> Response:
        return answer(exports(library.source(run), library.trial(run, trial)))

    @app.get("/api/log")
    def log(run: str, trial: int) -> Response:
        name = library.trial(run, trial).measured.log
        if not name:
            return answer({"why": "The table names no log."})
        try:
            content, size = tail_inside(library.folder(run), name, at_most=LOG_BYTES)
        except OSError as error:
            return answer({"why": f"The log cannot be shown: {error.strerror or error}."})
        return answer({"text": content, "size": size, "cut": size > LOG_BYTES})

    @app.get("/log")
    def whole_log(run: str, trial: int) -> Response:
        name = library.trial(run, trial).measured.log
        stack = ExitStack()
        try:
            file = stack.enter_context(open_inside(library.folder(run), name))
        except OSError as error:
            return PlainTextResponse(f"The log cannot be read: {error.strerror or error}.", status_code=404)

        def chunks() -> Any:
            with stack:
                while data := file.read(1 << 18):
                    yield data

        return StreamingResponse(
            chunks(), media_type="text/plain; charset=utf-8", headers=attachment(f"trial-{trial}.log")
        )

    @app.get("/table")
    def table(run: str) -> Response:
        folder = library.folder(run)
        try:
            data = read_inside(folder, TABLE, at_most=LARGEST_TABLE)
        except (Outside, OSError) as error:
            return PlainTextResponse(f"{TABLE} cannot be read: {error.strerror or error}.", status_code=404)
        return Response(data, media_type="text/csv; charset=utf-8", headers=attachment(f"{folder.name}.csv"))

    return app


def asset_file(name: str) -> str:
    """Returns a file of the dashboard as text."""
    from importlib.resources import files

    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def scripts() -> str:
    """Returns all scripts as one: those of the report that draw a run, then the pages of the dashboard."""
    return bundle(SCRIPTS, *(asset_file(f"{name}.js") for name in PAGES))


def attachment(name: str) -> dict[str, str]:
    """Returns the header that makes a browser save the response under a plain file name."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    return {"content-disposition": f'attachment; filename="{plain}"'}
