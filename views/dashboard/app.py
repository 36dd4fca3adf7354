"""HTTP endpoints of the dashboard."""

import json
import re
from typing import Any

from ...base.errors import NotFound, StudyError
from ...base.reading import Outside, open_inside, read_inside, tail_inside
from ...results.names import TABLE
from ...results.table import LARGEST_TABLE
from ..report.document import exports
from ..report.page import SCRIPTS, asset, bundle
from .library import Library

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
        opened = open_inside(library.folder(run), name)
        try:
            file = opened.__enter__()
        except OSError as error:
            return PlainTextResponse(f"The log cannot be read: {error.strerror or error}.", status_code=404)

        def chunks() -> Any:
            try:
                while data := file.read(1 << 18):
                    yield data
            finally:
                opened.__exit__(None, None, None)

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
