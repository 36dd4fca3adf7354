"""Authentication and authorization: a bearer token or the session cookie of a page, the permissions of the user's role."""

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
LONGEST_TOKEN = 200  # three times a token's length: others are refused without a look into the database
SESSION_S = 12 * 3600.0
"""Duration of a page's session, s."""
_SAFE = ("GET", "HEAD", "OPTIONS")
bearer = HTTPBearer(auto_error=False, description="`redline token new` makes one.")
LARGEST_BODY = 1 << 20
"""Limit of a request's body, bytes."""
MOST_VALUES = 50_000
"""Largest number of commas and opening brackets in a body. A MiB of empty lists takes the interpreter a second, which
blocks all other requests.
"""
_PARSING = CapacityLimiter(2)
"""Number of bodies parsed at once. Parsing holds the interpreter's lock, so more would only delay other requests."""


def cookie_name(request: Request) -> str:
    """Returns the name of this server's session cookie."""
    return f"{COOKIE}-{request.url.port or (443 if request.url.scheme == 'https' else 80)}"


def user_of(parts: Parts, token: str, *, session: bool = False) -> User:
    """Returns the user of a token, or of a page's session.

    Raises:
        Problem: the token is not valid.
    """
    usable = 0 < len(token) <= LONGEST_TOKEN and token.isascii() and token.isprintable()
    user = parts.store.user_of(token, session=session) if usable else None
    if user is None:
        parts.metrics.refused_tokens.inc()
        raise Problem(
            401, "bad_token", "the token is unknown, was revoked or has expired; `redline token new` makes another",
            headers={"www-authenticate": "Bearer"},
        )  # fmt: skip
    return user


def _caller(request: Request) -> User:
    """Returns the authenticated user.

    Raises:
        Problem: the credentials are missing or not valid, or a page of another site sends a change.
    """
    parts = parts_of(request)
    token, session = credentials_of(request)
    if not token:
        raise Problem(
            401, "no_token", "a token is required: send `Authorization: Bearer ...`, or log in at /login",
            headers={"www-authenticate": "Bearer"},
        )  # fmt: skip
    user = user_of(parts, token, session=session)
    if session and request.method not in _SAFE:
        check_origin(request)
    request.state.still = partial(parts.store.user_of, token, session=session)
    return user


def credentials_of(request: Request) -> tuple[str, bool]:
    """Returns the token of a request, or the session of the page that sends it, and whether it is a session; the text is empty
    if it has neither.
    """
    kind, _, credentials = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and credentials:
        return credentials.strip(), False
    return request.cookies.get(cookie_name(request), ""), True


def check_origin(request: Request) -> None:
    """Checks that a page of this server sends a request, by the headers that browsers add.

    Raises:
        Problem: a page of another site does.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    # A page that sends no referrer has the origin null, so Sec-Fetch-Site takes precedence.
    own_origin = f"{request.url.scheme}://{request.url.netloc}"
    if not (site in ("same-origin", "none") if site else origin in (None, own_origin)):
        raise Problem(403, "csrf", "a page of another site has sent this")


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
            Problem: the caller is not authenticated, or lacks the role.
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
        form = self.body_field.field_info.annotation if self.body_field is not None else None

        async def guarded(request: Request) -> Response:
            if required is not None:
                await run_sync(required.admitted, request)
            if form is not None:
                _check_json(request)
                if body := await body_of(request, LARGEST_BODY):
                    request._json = await run_sync(_formed, form, body, limiter=_PARSING)
            return await handle(request)

        return guarded


async def body_of(request: Request, most: int) -> bytes:
    """Reads a body of at most so many bytes.

    Raises:
        Problem: it is larger.
    """
    problem = Problem(
        413, "too_large", f"the body is larger than {most:,} bytes", rule=f"at most {most} bytes",
        headers={"connection": "close"},
    )  # fmt: skip
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:15]) > most:
        raise problem
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise problem
    request._body = bytes(body)  # where FastAPI looks for it
    return request._body


def _check_json(request: Request) -> None:
    """Checks that FastAPI would parse the body as JSON.

    Raises:
        Problem: it has another type, with which FastAPI might parse it without limits.
    """
    header = Message()  # parsed as FastAPI does
    header["content-type"] = request.headers.get("content-type", "")
    if (kind := header.get_content_type()) != (rule := "application/json"):
        raise Problem(
            415, "media_type", f"the body must be {rule}, but the content type is {kind[:80]}", given=kind, rule=rule
        )


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
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        words = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise Problem(400, "malformed", f"the body is not valid JSON: {words}") from None
    try:
        return form.model_validate(body)
    except ValidationError as error:
        errors = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors(include_url=False)]
        raise RequestValidationError(errors, body=body) from None


Reader = Annotated[User, Depends(RequiredRole(Role.READER))]
Submitter = Annotated[User, Depends(RequiredRole(Role.SUBMITTER))]
