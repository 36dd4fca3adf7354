"""Who asks: a bearer token, or the cookie of a page that was logged in to; and what their role lets them do."""

import hashlib
import hmac
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from ..records import Role, User
from .limits import Rates
from .parts import Parts, parts_of
from .problems import Problem

COOKIE = "redline-session"
"""What the cookie's name starts with; a dash and the port follow, as ports of a host share cookies."""
CSRF = "x-csrf-token"
LONGEST_TOKEN = 200
_ORDER = (Role.READER, Role.SUBMITTER, Role.ADMIN)
_UNLIMITED = ("/v1/leases/", "/v1/workers/")
"""What workers do as often as their dry runs ask for."""
_SAFE = ("GET", "HEAD", "OPTIONS")
bearer = HTTPBearer(auto_error=False, description="`redline token new` makes one.")
failures = Rates(0.5, 20)
"""Wrong tokens from one address."""


def csrf_of(token: str) -> str:
    """What a page's changes must bring beside its cookie: only who has the token can make it."""
    return hmac.new(token.encode(), b"redline csrf", hashlib.sha256).hexdigest()


def cookie_name(request: Request) -> str:
    """The session cookie of this server."""
    return f"{COOKIE}-{request.url.port or (443 if request.url.scheme == 'https' else 80)}"


def user_of(parts: Parts, token: str, address: str) -> User:
    """Whose token it is.

    Raises:
        Problem: nobody's, or too many were tried.
    """
    usable = token if 0 < len(token) <= LONGEST_TOKEN and token.isascii() and token.isprintable() else ""
    found = parts.store.user_of(usable) if usable else None
    if found is None:
        failures.take(address, "too many wrong tokens came from this address; wait a little")
        parts.metrics.refused_tokens.inc()
        raise Problem(
            401, "bad_token", "the token is not known, was revoked or has expired; `redline token new` makes another",
            headers={"www-authenticate": "Bearer"},
        )  # fmt: skip
    return found


def _caller(request: Request, given: Annotated[Any, Depends(bearer)]) -> User:
    parts = parts_of(request)
    address = request.client.host if request.client else ""
    if given is not None:
        token = given.credentials
        user = user_of(parts, token, address)
    elif token := request.cookies.get(cookie_name(request), ""):
        user = user_of(parts, token, address)
        brought = request.headers.get(CSRF, "")
        if request.method not in _SAFE and not hmac.compare_digest(brought.encode(), csrf_of(token).encode()):
            raise Problem(
                403,
                "csrf",
                f"a change by a page must bring the header {CSRF} that GET /v1/me names; load the page anew",
            )
    else:
        raise Problem(
            401, "no_token", "give a token: `Authorization: Bearer ...`, or log in at /login",
            headers={"www-authenticate": "Bearer"},
        )  # fmt: skip
    if not request.url.path.startswith(_UNLIMITED):
        parts.rates.take(f"user {user.id}", f"{user.name} asks more often than this server allows; wait a little")
    request.state.user, request.state.token = user.name, token
    return user


def needs(role: Role) -> Callable[..., User]:
    """A dependency: the caller, who must have at least that role."""

    def check(user: Annotated[User, Depends(_caller)]) -> User:
        if _ORDER.index(Role(user.role)) < _ORDER.index(role):
            raise Problem(
                403, "role", f"{user.name} is a {user.role}; this needs the role {role}: ask an admin for it",
                given=str(user.role), rule=f"at least {role}",
            )  # fmt: skip
        return user

    return check


Reader = Annotated[User, Depends(needs(Role.READER))]
Submitter = Annotated[User, Depends(needs(Role.SUBMITTER))]
Admin = Annotated[User, Depends(needs(Role.ADMIN))]
