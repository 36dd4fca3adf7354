"""The application: its routes, error answers, pages, and the metrics of requests."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware.gzip import GZipMiddleware

from ... import __version__
from . import operations, pages, searches
from .models import ErrorAnswer
from .parts import Parts
from .problems import answer_problems

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request is refused."},
    "5XX": {"model": ErrorAnswer, "description": "The service, or a part of it, is unavailable."},
}
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""Methods that metrics count separately."""


def make_app(parts: Parts) -> Any:
    """Returns the ASGI application of a service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        reading = asyncio.create_task(parts.feed.run())
        yield
        parts.feed.stop()
        await reading

    # No generated documentation pages: they would load scripts from another host.
    app = FastAPI(
        title="redline", version=__version__, description="Searches for a team on shared devices.",
        openapi_url="/v1/openapi.json", docs_url=None, redoc_url=None, lifespan=lifespan, responses=_ERRORS,
        # Redirects would send clients to the host that the Host header names.
        redirect_slashes=False,
    )  # fmt: skip
    app.state.parts = parts
    answer_problems(app)
    for routes in (operations, searches):
        app.include_router(routes.router)
    pages.add(app, parts)
    app.add_middleware(GZipMiddleware, minimum_size=2048, compresslevel=3)
    # Outermost, because FastAPI itself answers requests that fail.
    return pages.Headers(RequestCounter(app, parts))


class RequestCounter:
    """ASGI middleware that counts and times requests."""

    def __init__(self, app: Any, parts: Parts) -> None:
        self.app, self._metrics = app, parts.metrics

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.monotonic(), 500

        async def send_counted(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._metrics.seconds.labels(_route(scope)).observe(time.monotonic() - start)
            await send(message)

        try:
            await self.app(scope, receive, send_counted)
        finally:
            self._metrics.requests.labels(_method(scope), _route(scope), str(status)).inc()


def _method(scope: dict[str, Any]) -> str:
    """Returns the method, or `other`: a request may have any text as its method, without a token."""
    return str(scope["method"]) if scope["method"] in _METHODS else "other"


def _route(scope: dict[str, Any]) -> str:
    """Returns the route's template, so that ids do not become labels."""
    return str(getattr(scope.get("route"), "path", "other"))


class PlainLines(logging.Formatter):
    """Formats log records as text. Escapes control characters, so that data from clients cannot end a line or control
    a terminal.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:
        return "".join(
            letter if letter.isprintable() else letter.encode("unicode_escape").decode()
            for letter in super().formatMessage(record)
        )
