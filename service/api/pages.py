"""The pages: queue, devices, a form to submit a search, live events, and the dashboard's pages of each search."""

import html
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl

from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response

from ...views.dashboard.serve import HEADERS, asset_file as of_dashboard, make_app as make_dashboard, with_headers
from ...views.report.page import asset, bundle
from ..runs import SearchLibrary
from .access import SESSION_S, body_of, check_origin, cookie_name, credentials_of, user_of
from .parts import AUDIT, Parts
from .problems import Problem

LARGEST_FORM, MOST_FIELDS = 4096, 10
"""Limits of the form of a login: bytes and fields."""
_SCRIPTS = ("dom", "format")
_PAGES = ("asking", "queue", "submit", "search", "service")
_POLICY = "content-security-policy"
_HEADERS = {**HEADERS, _POLICY: HEADERS[_POLICY].replace("form-action 'none'", "form-action 'self'")}
RUNS = "/runs"
"""Path of the dashboard's pages of searches."""
_LISTS = ("/api/runs", "/api/training", "/api/printed")
"""Paths of the dashboard that would read all folders."""
LIST = "../"
"""Path of the list of searches relative to these."""


def add(app: FastAPI, parts: Parts) -> None:
    """Adds the pages to an application."""
    parts.runs.searches.mkdir(parents=True, exist_ok=True)

    @app.get(RUNS, include_in_schema=False)
    async def runs() -> Response:
        return RedirectResponse(f"{RUNS}/", status_code=307)

    app.mount(RUNS, _LoggedIn(make_dashboard(SearchLibrary(parts.runs)), parts))

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        if not request.cookies.get(cookie_name(request)):
            return RedirectResponse("/login", status_code=303)
        return _html(page_file("index.html"))

    @app.get("/login", include_in_schema=False)
    async def login() -> Response:
        return _html(page_file("login.html").replace("<!--why-->", ""))

    @app.post("/login", include_in_schema=False)
    async def logging_in(request: Request) -> Response:
        check_origin(request)
        body = await body_of(request, LARGEST_FORM)
        try:
            form = dict(parse_qsl(body.decode("utf-8", "replace"), max_num_fields=MOST_FIELDS))
        except ValueError:
            rule = f"at most {MOST_FIELDS} fields"
            raise Problem(400, "malformed", f"the form has too many fields: {rule}", rule=rule) from None
        token = form.get("token", "").strip()
        try:
            user = await run_sync(user_of, parts, token)
        except Problem as error:
            return _html(
                page_file("login.html").replace("<!--why-->", f"<p role=alert>{html.escape(str(error))}</p>"),
                error.status,
            )
        AUDIT.info("%s logs in from %s", user.name, request.client.host if request.client else "")
        session_text = await run_sync(parts.store.new_session, token, SESSION_S)
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(
            cookie_name(request), session_text, max_age=int(SESSION_S), httponly=True, samesite="strict",
            secure=request.url.scheme == "https",
        )  # fmt: skip
        return answer

    @app.post("/logout", include_in_schema=False)
    async def logout(request: Request) -> Response:
        check_origin(request)
        if cookie := request.cookies.get(cookie_name(request), ""):
            await run_sync(parts.store.end_session, cookie)
        answer = RedirectResponse("/login", status_code=303)
        answer.delete_cookie(cookie_name(request), httponly=True, samesite="strict")
        return answer

    @app.get("/icon.svg", include_in_schema=False)
    async def icon() -> Response:
        return Response(of_dashboard("icon.svg"), media_type="image/svg+xml")

    @app.get("/service.js", include_in_schema=False)
    async def script() -> Response:
        text = bundle(_SCRIPTS, *(page_file(f"{name}.js") for name in _PAGES))
        return Response(text, media_type="text/javascript; charset=utf-8")

    @app.get("/service.css", include_in_schema=False)
    async def style() -> Response:
        text = asset("style.css") + of_dashboard("dashboard.css") + page_file("service.css")
        return Response(text, media_type="text/css; charset=utf-8")


def page_file(name: str) -> str:
    """Returns a file of the pages, as text."""
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _html(text: str, status: int = 200) -> Response:
    return Response(text, status_code=status, media_type="text/html; charset=utf-8")


class Headers:
    """ASGI middleware that adds security headers to every answer."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        await self.app(scope, receive, with_headers(send, _HEADERS) if scope["type"] == "http" else send)


class _LoggedIn:
    """ASGI middleware that admits logged-in users and bearer tokens to the dashboard."""

    def __init__(self, app: Any, parts: Parts) -> None:
        self.app, self._parts = app, parts

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        token, session = credentials_of(request)
        if not token:
            await RedirectResponse("/login", status_code=303)(scope, receive, send)
            return
        try:
            await run_sync(partial(user_of, self._parts, token, session=session))
        except Problem as error:
            await error.answer()(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.startswith(_LISTS):
            problem = Problem(404, "not_found", "GET /v1/searches lists searches; the pages of runs show one at a time")
            await problem.answer()(scope, receive, send)
            return
        if path == "/":  # the service's queue replaces the dashboard's list
            answer = _html(of_dashboard("index.html").replace("<html ", f'<html data-list="{LIST}" '))
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, send)
