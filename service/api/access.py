"""Who asks: a bearer token, or the cookie of a page that was logged in to; and what their role lets them do."""

import hashlib
import hmac
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
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
"""What the cookie's name starts with; a dash and the port follow, as ports of a host share cookies."""
CSRF = "x-csrf-token"
LONGEST_TOKEN = 200
SESSION_S = 12 * 3600.0
"""How long a page is logged in, s."""
_MAY = {
    Role.READER: (Role.READER, Role.SUBMITTER, Role.ADMIN),
    Role.SUBMITTER: (Role.SUBMITTER, Role.ADMIN),
    Role.WORKER: (Role.WORKER, Role.ADMIN),
    Role.ADMIN: (Role.ADMIN,),
}
"""Who may do what needs a role."""
_UNLIMITED = ("/v1/leases/", "/v1/workers/")
"""What workers do as often as their dry runs ask for."""
_SAFE = ("GET", "HEAD", "OPTIONS")
bearer = HTTPBearer(auto_error=False, description="`redline token new` makes one.")
TOO_MANY_STRANGERS = "too many requests without a token came from this address; wait a little"
MOST_VALUES = 50_000
"""Commas and opening brackets of a body: a MiB of empty lists takes a second of the interpreter, which all others wait for."""
_PARSING = CapacityLimiter(2)
"""Bodies that are parsed at once: more would only have all others wait for the interpreter."""


def csrf_of(session: str) -> str:
    """What a page's changes must bring beside its cookie: only who has the session can make it."""
    return hmac.new(session.encode(), b"redline csrf", hashlib.sha256).hexdigest()


def cookie_name(request: Request) -> str:
    """The session cookie of this server."""
    return f"{COOKIE}-{request.url.port or (443 if request.url.scheme == 'https' else 80)}"


def user_of(parts: Parts, token: str, address: str, *, session: bool = False) -> User:
    """Whose token it is, or whose session of a page.

    Raises:
        Problem: nobody's, or too many were tried.
    """
    usable = token if 0 < len(token) <= LONGEST_TOKEN and token.isascii() and token.isprintable() else ""
    known = parts.store.user_of_session if session else parts.store.user_of
    found = known(usable) if usable else None
    if found is None:
        parts.failures.take(address, "too many wrong tokens came from this address; wait a little")
        parts.metrics.refused_tokens.inc()
        raise Problem(
            401, "bad_token", "the token is not known, was revoked or has expired; `redline token new` makes another",
            headers={"www-authenticate": "Bearer"},
        )  # fmt: skip
    return found


def address_of(request: Request) -> str:
    """From where a request came."""
    return request.client.host if request.client else ""


def _caller(request: Request) -> User:
    """Who asks.

    Raises:
        Problem: nobody that is known, or too often.
    """
    parts, address = parts_of(request), address_of(request)
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and given:
        token = given.strip()
        user, still = user_of(parts, token, address), parts.store.user_of
    elif token := request.cookies.get(cookie_name(request), ""):
        user, still = user_of(parts, token, address, session=True), parts.store.user_of_session
        brought = request.headers.get(CSRF, "")
        if request.method not in _SAFE and not hmac.compare_digest(brought.encode(), csrf_of(token).encode()):
            raise Problem(
                403,
                "csrf",
                f"a change by a page must bring the header {CSRF} that GET /v1/me names; load the page anew",
            )
    else:
        parts.strangers.take(address, TOO_MANY_STRANGERS)
        raise Problem(
            401, "no_token", "give a token: `Authorization: Bearer ...`, or log in at /login",
            headers={"www-authenticate": "Bearer"},
        )  # fmt: skip
    if not request.url.path.startswith(_UNLIMITED):
        parts.rates.take(f"user {user.id}", f"{user.name} asks more often than this server allows; wait a little")
    request.state.user, request.state.still = user.name, partial(still, token)
    return user


@dataclass(frozen=True)
class Needs:
    """A dependency: the caller, who must have that role or one that may do the same. `Guarded` routes know it before
    they read the body."""

    role: Role

    def __call__(self, request: Request, given: Annotated[Any, Depends(bearer)]) -> User:
        return self.admitted(request)

    def admitted(self, request: Request) -> User:
        """The caller.

        Raises:
            Problem: nobody that is known, too often, or without that role.
        """
        user: User | None = getattr(request.state, "caller", None)
        if user is None:
            user = request.state.caller = _caller(request)
        if Role(user.role) not in _MAY[self.role]:
            raise Problem(
                403, "role", f"{user.name} is a {user.role}; this needs the role {self.role}: ask an admin for it",
                given=str(user.role), rule=" or ".join(_MAY[self.role]),
            )  # fmt: skip
        return user


class Guarded(APIRoute):
    """A route that knows its caller before it reads a body, and does not parse that body in the event loop.

    FastAPI parses and checks a body in the event loop, and before any dependency is called: whoever has no token would have
    everybody wait for that. The checked form is put where FastAPI finds what a body was parsed to.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        needs = next((each.call for each in self.dependant.dependencies if isinstance(each.call, Needs)), None)
        body = self.body_field.field_info.annotation if self.body_field is not None else None
        form = body if isinstance(body, type) and issubclass(body, Body) else None

        async def guarded(request: Request) -> Response:
            if needs is not None:
                await run_sync(needs.admitted, request)
            if form is not None and _is_json(request) and (text := await request.body()):
                request._json = await run_sync(_formed, form, text, limiter=_PARSING)
            return await handle(request)

        return guarded


def _is_json(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


def _formed(form: type[Body], text: bytes) -> Body:
    """A body, parsed and checked.

    Raises:
        RequestValidationError: it breaks a rule.
        Problem: it cannot be parsed.
    """
    if sum(text.count(each) for each in (b",", b"[", b"{")) > MOST_VALUES:
        rule = f"at most {MOST_VALUES:,} commas and opening brackets"
        raise Problem(422, "invalid", f"the body holds too many values to be read: {rule}", rule=rule)
    try:
        return form.model_validate(json.loads(text))
    except ValidationError as error:
        raise RequestValidationError(
            [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        ) from None
    except (ValueError, RecursionError) as error:
        words = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise Problem(400, "malformed", f"the body is no JSON: {words}") from None


Reader = Annotated[User, Depends(Needs(Role.READER))]
Submitter = Annotated[User, Depends(Needs(Role.SUBMITTER))]
Joiner = Annotated[User, Depends(Needs(Role.WORKER))]
Admin = Annotated[User, Depends(Needs(Role.ADMIN))]
