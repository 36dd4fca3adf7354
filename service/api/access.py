"""Authentication and authorization: a bearer token or the session cookie of a page, the permissions of the user's role."""

import hashlib
import hmac
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from email.message import Message
from functools import partial
from typing import Annotated, Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import ValidationError

from ..records import Role, User
from .models import Body
from .parts import Parts, parts_of
from .problems import Problem

COOKIE = "redline-session"
"""Beginning of the session cookie's name. A dash and the port follow, since the ports of a host share cookies."""
CSRF = "x-csrf-token"
LONGEST_TOKEN = 200
SESSION_S = 12 * 3600.0
"""Duration of a page's session, s."""
_SAFE = ("GET", "HEAD", "OPTIONS")
bearer = HTTPBearer(auto_error=False, description="`redline token new` makes one.")
TOO_MANY = "{} sends more requests than this server allows; wait a little"
TOO_MANY_STRANGERS = "too many requests without a token came from this address; wait a little"
MOST_VALUES = 50_000
"""Largest number of commas and opening brackets in a body. A MiB of empty lists takes the interpreter a second, which
blocks all other requests.
"""
_PARSING = CapacityLimiter(2)
"""Number of bodies parsed at once. Parsing holds the interpreter's lock, so more would only delay other requests."""


def csrf_of(session: str) -> str:
    """Returns the token that a page must send with a change besides its cookie. Only the owner of the session can
    compute it.
    """
    return hmac.new(session.encode(), b"redline csrf", hashlib.sha256).hexdigest()


def cookie_name(request: Request) -> str:
    """Returns the name of this server's session cookie."""
    return f"{COOKIE}-{request.url.port or (443 if request.url.scheme == 'https' else 80)}"


def user_of(parts: Parts, token: str, address: str, *, session: bool = False) -> User:
    """Returns the user of a token, or of a page's session.

    Raises:
        Problem: the token is not valid, or too many wrong ones were tried.
    """
    usable = token if 0 < len(token) <= LONGEST_TOKEN and token.isascii() and token.isprintable() else ""
    lookup = parts.store.user_of_session if session else parts.store.user_of
    user = lookup(usable) if usable else None
    if user is None:
        parts.failures.take(address, "too many wrong tokens came from this address; wait a little")
        parts.metrics.refused_tokens.inc()
        raise Problem(
            401, "bad_token", "the token is unknown, was revoked or has expired; `redline token new` makes another",
            headers={"www-authenticate": "Bearer"},
        )  # fmt: skip
    return user


def address_of(request: Request) -> str:
    """Returns the address that a request came from."""
    return request.client.host if request.client else ""


def _caller(request: Request) -> User:
    """Returns the authenticated user.

    Raises:
        Problem: the credentials are missing or not valid, or the user sends too many requests.
    """
    parts, address = parts_of(request), address_of(request)
    kind, _, credentials = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and credentials:
        token = credentials.strip()
        user, lookup = user_of(parts, token, address), parts.store.user_of
    elif token := request.cookies.get(cookie_name(request), ""):
        user, lookup = user_of(parts, token, address, session=True), parts.store.user_of_session
        given_csrf = request.headers.get(CSRF, "")
        if request.method not in _SAFE and not hmac.compare_digest(given_csrf.encode(), csrf_of(token).encode()):
            raise Problem(
                403,
                "csrf",
                f"a change by a page must have the header {CSRF}, which GET /session returns; reload the page",
            )
    else:
        parts.strangers.take(address, TOO_MANY_STRANGERS)
        raise Problem(
            401, "no_token", "a token is required: send `Authorization: Bearer ...`, or log in at /login",
            headers={"www-authenticate": "Bearer"},
        )  # fmt: skip
    parts.rates.take(f"user {user.id}", TOO_MANY.format(user.name))
    request.state.user, request.state.still = user.name, partial(lookup, token)
    return user


@dataclass(frozen=True)
class RequiredRole:
    """A dependency that returns the caller, who must have this role or one that includes it. `Guarded` routes check
    it before they read the body.
    """

    role: Role

    def __call__(self, request: Request, credentials: Annotated[Any, Depends(bearer)]) -> User:
        return self.admitted(request)

    def admitted(self, request: Request) -> User:
        """Returns the caller.

        Raises:
            Problem: the caller is not authenticated, sends too many requests, or lacks the role.
        """
        user: User | None = getattr(request.state, "caller", None)
        if user is None:
            user = request.state.caller = _caller(request)
        if not user.role.includes(self.role):
            raise Problem(
                403, "role", f"{user.name} has the role {user.role}, but this needs the role {self.role}; ask an admin for it",
                given=str(user.role), rule=str(self.role),
            )  # fmt: skip
        return user


class Guarded(APIRoute):
    """A route that authenticates its caller before it reads a body, and parses the body outside of the event loop.

    FastAPI parses and validates a body in the event loop and before any dependency, so that a client without a token
    could block all others. The validated form is put where FastAPI looks for the parsed body.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        roles = [dependency.call for dependency in self.dependant.dependencies]
        required = next((role for role in roles if isinstance(role, RequiredRole)), None)
        body = self.body_field.field_info.annotation if self.body_field is not None else None
        form = body if isinstance(body, type) and issubclass(body, Body) else None
        takes_body = self.body_field is not None

        async def guarded(request: Request) -> Response:
            if required is not None:
                await run_sync(required.admitted, request)
            is_json = takes_body and _is_json(request, form is not None)
            if form is not None and is_json and (text := await request.body()):
                request._json = await run_sync(_formed, form, text, limiter=_PARSING)
            return await handle(request)

        return guarded


def _is_json(request: Request, accepted: bool) -> bool:
    """True if FastAPI would parse the body as JSON.

    Args:
        request: the request.
        accepted: whether the route accepts application/json.

    Raises:
        Problem: the route does not accept JSON, or not of this type, and FastAPI would parse it without limits.
    """
    header = Message()  # parsed as FastAPI does
    header["content-type"] = request.headers.get("content-type", "")
    kind, _, subtype = header.get_content_type().partition("/")
    if kind == "application" and subtype == "json" and accepted:
        return True
    if accepted or (kind == "application" and (subtype == "json" or subtype.endswith("+json"))):
        rule = "application/json" if accepted else "application/octet-stream"
        raise Problem(
            415, "media_type", f"the body must be {rule}, but the content type is {kind}/{subtype[:80]}",
            given=f"{kind}/{subtype}", rule=rule,
        )  # fmt: skip
    return False


def _formed(form: type[Body], text: bytes) -> Body:
    """Parses and validates a body.

    Raises:
        RequestValidationError: it breaks a rule.
        Problem: it cannot be parsed.
    """
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > MOST_VALUES:
        rule = f"at most {MOST_VALUES:,} commas and opening brackets"
        raise Problem(422, "invalid", f"the body has too many values: {rule}", rule=rule)
    try:
        return form.model_validate(json.loads(text))
    except ValidationError as error:
        raise RequestValidationError(
            [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors(include_url=False)]
        ) from None
    except (ValueError, RecursionError) as error:
        words = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise Problem(400, "malformed", f"the body is not valid JSON: {words}") from None


Reader = Annotated[User, Depends(RequiredRole(Role.READER))]
Submitter = Annotated[User, Depends(RequiredRole(Role.SUBMITTER))]
