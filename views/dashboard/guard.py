"""Who may see the dashboard, and what a browser may do with its pages."""

import hmac
import re
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

COOKIE = "redline-token"
"""What the cookie's name starts with; a dash and the port follow."""

HEADERS = {
    # Scripts and styles only from this server's own files: a text that looks like HTML stays a text.
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
    """An ASGI application in front of another: checks the Host header or the token, adds `HEADERS`.

    Args:
        app: what is guarded.
        token: what a visitor must bring, once as `?token=` (then kept in a cookie) or as a bearer token; None
            on this machine's own addresses.
        hosts: names the Host header may have; None for any. Without this a page of somebody else's site could
            reach the server under its own name, by DNS rebinding.
    """

    def __init__(self, app: Any, *, token: str | None, hosts: Iterable[str] | None) -> None:
        self.app = app
        self.token = token
        self.hosts = None if hosts is None else frozenset(hosts)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def guarded(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                kept = [each for each in message["headers"] if each[0].decode("latin-1").lower() not in HEADERS]
                message = message | {"headers": [*kept, *own]}
            await send(message)

        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self.hosts is not None and _host(headers.get("host", "")) not in self.hosts:
            await _answer(guarded, 400, "This dashboard answers to this machine's own names only.")
            return
        if self.token is not None:
            # Cookies are shared by all ports of a host, and each may have a dashboard of its own.
            cookie = f"{COOKIE}-{(scope.get('server') or ('', ''))[1]}"
            query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            brought = next((value for name, value in query if name == "token"), None)
            if brought is not None and self._right(brought):
                rest = urlencode([each for each in query if each[0] != "token"])
                where = scope["path"] if scope["path"].startswith("/") and not scope["path"].startswith("//") else "/"
                kept = f"{cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
                await _answer(guarded, 303, "", {"location": where + ("?" + rest if rest else ""), "set-cookie": kept})
                return
            if not self._right(_cookie(headers, cookie)) and not self._right(_bearer(headers)):
                await _answer(
                    guarded,
                    401,
                    "This dashboard needs its token: open the address it printed when it was started, with ?token=...",
                )
                return
        await self.app(scope, receive, guarded)

    def _right(self, brought: str | None) -> bool:
        return (
            brought is not None
            and self.token is not None
            and hmac.compare_digest(brought.encode(), self.token.encode())
        )


def _host(header: str) -> str:
    """The whole name in a Host header, without its port (RFC 9110, 7.2); empty where it is anything else."""
    found = _NAME.fullmatch(header.strip().lower())
    return found[1] if found else ""


def _cookie(headers: dict[str, str], name: str) -> str | None:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return None
    return found.value if found else None


def _bearer(headers: dict[str, str]) -> str | None:
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


async def _answer(send: Any, status: int, text: str, headers: dict[str, str] | None = None) -> None:
    body = text.encode()
    told = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), **(headers or {})}
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(name.encode(), value.encode("latin-1", "replace")) for name, value in told.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
