"""Access control of the dashboard, and security headers of its responses."""

import hmac
import re
from collections.abc import Iterable, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

COOKIE = "redline-token"
"""Prefix of the cookie's name; a dash and the port follow."""

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
    """An ASGI middleware that checks the Host header or the token and adds `HEADERS`.

    Args:
        app: the guarded application.
        token: the token that a visitor must send, once as `?token=` (then kept in a cookie) or as a bearer token;
            None on the loopback addresses of this machine.
        hosts: names that the Host header may have; None for any. Without this check a page of another site could
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

        guarded = with_headers(send, HEADERS)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self.hosts is not None and _host(headers.get("host", "")) not in self.hosts:
            await _answer(guarded, 400, "This dashboard accepts only the names of this machine.")
            return
        if self.token is not None:
            # Cookies are shared by all ports of a host, and each port may have its own dashboard.
            cookie = f"{COOKIE}-{(scope.get('server') or ('', ''))[1]}"
            query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            token = next((value for name, value in query if name == "token"), None)
            if token is not None and self._is_token(token):
                query_left = urlencode([pair for pair in query if pair[0] != "token"])
                path = scope["path"] if scope["path"].startswith("/") and not scope["path"].startswith("//") else "/"
                stored_cookie = f"{cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
                location = path + ("?" + query_left if query_left else "")
                await _answer(guarded, 303, "", {"location": location, "set-cookie": stored_cookie})
                return
            if not self._is_token(_cookie(headers, cookie)) and not self._is_token(_bearer(headers)):
                await _answer(
                    guarded,
                    401,
                    "This dashboard needs its token: open the address with ?token=... that it printed at its start.",
                )
                return
        await self.app(scope, receive, guarded)

    def _is_token(self, token: str | None) -> bool:
        return token is not None and self.token is not None and hmac.compare_digest(token.encode(), self.token.encode())


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


def _cookie(headers: dict[str, str], name: str) -> str | None:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return None
    return morsel.value if morsel else None


def _bearer(headers: dict[str, str]) -> str | None:
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


async def _answer(send: Any, status: int, message: str, headers: dict[str, str] | None = None) -> None:
    body = message.encode()
    all_headers = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), **(headers or {})}
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(name.encode(), value.encode("latin-1", "replace")) for name, value in all_headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
