"""Users of the service, their tokens, and the audit log."""

import contextlib
import hashlib
import hmac
import math
import secrets
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from ...base.errors import KeyTaken, NotFound, StorageUnavailable, UsageError, unknown
from ..records import MOST_PRIORITY, AuditEntry, Role, Token, User
from ..tables import audit, sessions, tokens, users
from .part import Part, add, as_count, as_text, one, reads, writes

USED_S = 60.0
"""Resolution of the time when a token was last used, s."""
PREFIX = "redline_"
"""Prefix of a token, so that scanners for leaked secrets recognise it."""


class People(Part):
    """Operations on users and tokens."""

    @writes
    def add_user(
        self,
        connection: Connection,
        name: str,
        role: Role | str = Role.SUBMITTER,
        *,
        searches: int | None = None,
        devices: int | None = None,
        device_hours: float | None = None,
        weight: float = 1.0,
        team: str = "",
        priority: int = 0,
    ) -> User:
        """Adds a user.

        Raises:
            KeyTaken: there is one of that name.
            UsageError: name, role or limits are invalid.
        """
        values = {
            "name": as_text("a user's name", name, empty=False),
            "role": _role(role),
            "searches": _limit("searches", searches),
            "devices": _limit("devices", devices),
            "device_hours": _positive("device_hours", device_hours),
            "weight": _positive("weight", weight) or 1.0,
            "team": as_text("team", team),
            "priority": as_count("priority", priority, most=MOST_PRIORITY),
            "created": self.clock(),
        }
        if one(connection, select(users.c.id).where(users.c.name == name)):
            raise KeyTaken(f"there is a user '{name}' already")
        number = add(connection, users, values)
        return _user(one(connection, select(users).where(users.c.id == number)))

    @writes
    def change_user(self, connection: Connection, name: str, **changes: Any) -> User:
        """Changes a user's role, limits or state. The tokens of a disabled user are rejected.

        Args:
            name: of the user.
            changes: `role`, `searches`, `devices` and `device_hours` (None for no limit), `weight`, `team`, `priority`,
                `disabled` (a boolean).

        Raises:
            NotFound: the user does not exist.
            UsageError: a value is invalid, or there would be no admin left.
        """
        row = one(connection, select(users).where(users.c.name == name).with_for_update())
        if row is None:
            raise NotFound(unknown("user", name, connection.execute(select(users.c.name)).scalars()))
        values = {field: _CHANGES[field](value) for field, value in changes.items()}
        if "disabled" in changes:
            values["disabled"] = (row.disabled or self.clock()) if changes["disabled"] else None
        admins = users.c.role == Role.ADMIN, users.c.disabled.is_(None), users.c.id != row.id
        was_one = row.role == Role.ADMIN and row.disabled is None
        stays_one = values.get("role", row.role) == Role.ADMIN and values.get("disabled", row.disabled) is None
        if was_one and not stays_one and one(connection, select(users.c.id).where(*admins)) is None:
            raise UsageError(f"{name} is the only admin; make another user an admin first")
        if values:
            connection.execute(update(users).where(users.c.id == row.id).values(**values))
        return _user(one(connection, select(users).where(users.c.id == row.id)))

    @reads
    def users(self, connection: Connection) -> list[User]:
        """Returns all users, by name."""
        return [_user(row) for row in connection.execute(select(users).order_by(users.c.name))]

    @reads
    def user(self, connection: Connection, name: str) -> User:
        """Returns the user of that name.

        Raises:
            NotFound: there is none.
        """
        row = one(connection, select(users).where(users.c.name == name))
        if row is None:
            raise NotFound(unknown("user", name, connection.execute(select(users.c.name)).scalars()))
        return _user(row)

    def new_token(self, user: int | User, name: str = "", expires: float | None = None) -> str:
        """Makes a token and returns its text, of which only a digest is stored.

        Args:
            user: the owner.
            name: its purpose.
            expires: when it stops being accepted, s since 1970; None for never.

        Raises:
            NotFound: the user does not exist.
        """
        number, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
        text = f"{PREFIX}{number}_{secret}"
        self._keep_token(number, _digest(text), user.id if isinstance(user, User) else user, name, expires)
        return text

    @writes
    def _keep_token(
        self, connection: Connection, number: str, digest: str, user: int, name: str, expires: float | None
    ) -> None:
        if one(connection, select(users.c.id).where(users.c.id == user)) is None:
            raise NotFound(f"there is no user {user}")
        if one(connection, select(tokens.c.id).where(tokens.c.id == number, tokens.c.digest == digest)):
            return
        values = {"id": number, "digest": digest, "user": user, "name": as_text("a token's name", name)}
        connection.execute(insert(tokens).values(**values, created=self.clock(), expires=expires))

    def user_of(self, text: str) -> User | None:
        """Returns the owner of a token; None if it is unknown, has expired or was revoked, or its user is disabled.

        Also records the time of use, to a minute.
        """
        owner = self._user_of(text)
        if owner is None:
            return None
        user, used = owner
        if used is None or self.clock() - used > USED_S:
            with contextlib.suppress(StorageUnavailable):  # a token also works while the database is read-only
                self._used_token(_id_of(text))
        return user

    @writes
    def _used_token(self, connection: Connection, token: str) -> None:
        connection.execute(update(tokens).where(tokens.c.id == token).values(used=self.clock()))

    @reads
    def _user_of(self, connection: Connection, text: str) -> tuple[User, float | None] | None:
        """Returns the owner of a token and when it was last used; None as for `user_of`."""
        row = self._token(connection, text)
        user = None if row is None else self._good(connection, row)
        return None if row is None or user is None else (user, row.used)

    def _token(self, connection: Connection, text: str) -> Row[Any] | None:
        """Returns the token of that text; None if it is unknown."""
        number = _id_of(text)
        row = one(connection, select(tokens).where(tokens.c.id == number)) if number else None
        # Compared in constant time, and also if there is none, so that the duration reveals nothing.
        same = hmac.compare_digest(_digest(text), row.digest if row else _digest(""))
        return row if same else None

    def _good(self, connection: Connection, row: Row[Any]) -> User | None:
        """Returns the owner of a known token; None if it has expired or was revoked, or its user is disabled."""
        if row.revoked is not None:
            return None
        if row.expires is not None and row.expires <= self.clock():
            return None
        user = _user(one(connection, select(users).where(users.c.id == row.user)))
        return None if user.disabled is not None else user

    def new_session(self, token: str, seconds: float) -> str:
        """Begins a session of a page for the owner of a token and returns its text, of which only a digest is stored.

        Raises:
            NotFound: the token is unknown, has expired or was revoked.
        """
        text = secrets.token_urlsafe(32)
        self._keep_session(_digest(text), token, seconds)
        return text

    @writes
    def _keep_session(self, connection: Connection, digest: str, token: str, seconds: float) -> None:
        row = self._token(connection, token)
        if row is None or self._good(connection, row) is None:
            raise NotFound("the token is not known, was revoked or has expired")
        if one(connection, select(sessions.c.digest).where(sessions.c.digest == digest)):
            return
        now = self.clock()
        connection.execute(delete(sessions).where(sessions.c.expires <= now))
        values = {"digest": digest, "token": _id_of(token), "expires": now + seconds}
        connection.execute(insert(sessions).values(**values))

    @reads
    def user_of_session(self, connection: Connection, text: str) -> User | None:
        """Returns the owner of a session; None if it is unknown or over, or its token is not valid any more."""
        row = one(
            connection,
            select(tokens)
            .join(sessions, sessions.c.token == tokens.c.id)
            .where(sessions.c.digest == _digest(text), sessions.c.expires > self.clock()),
        )
        return None if row is None else self._good(connection, row)

    @writes
    def end_session(self, connection: Connection, text: str) -> None:
        """Ends a session."""
        connection.execute(delete(sessions).where(sessions.c.digest == _digest(text)))

    @reads
    def tokens(self, connection: Connection, user: int | None = None) -> list[Token]:
        """Returns the tokens of all users or of one, the oldest first."""
        query = select(tokens).order_by(tokens.c.created, tokens.c.id)
        if user is not None:
            query = query.where(tokens.c.user == user)
        return [_record(row) for row in connection.execute(query)]

    @writes
    def revoke(self, connection: Connection, token: str) -> Token:
        """Revokes a token. Its record is kept.

        Args:
            token: its id, the beginning of its id, or its text.

        Raises:
            NotFound: no token begins so.
            UsageError: several do.
        """
        begins = _id_of(token) or token.removeprefix(PREFIX)
        rows = connection.execute(select(tokens).with_for_update()).all()
        matching = [row for row in rows if begins and row.id.startswith(begins)]
        if not matching:
            raise NotFound(unknown("token", begins, [row.id for row in rows if row.revoked is None]))
        if len(matching) > 1:
            raise UsageError(f"several tokens begin with '{begins}': {', '.join(row.id for row in matching)}")
        (row,) = matching
        revoked = self.clock() if row.revoked is None else row.revoked
        connection.execute(update(tokens).where(tokens.c.id == row.id).values(revoked=revoked))
        return replace(_record(row), revoked=revoked)

    @writes
    def audit(self, connection: Connection, user: str, action: str, subject: str = "", detail: Any = None) -> None:
        """Records an action of a user."""
        values = {"user": user[:200], "action": action[:80], "subject": subject[:200], "detail": detail or {}}
        connection.execute(insert(audit).values(time=self.clock(), **values))

    @reads
    def audited(self, connection: Connection, limit: int = 1000, *, user: str | None = None) -> list[AuditEntry]:
        """Returns the latest entries of the audit log, in order, of all users or of the user of that name."""
        query = select(audit).order_by(audit.c.id.desc()).limit(limit)
        if user is not None:
            query = query.where(audit.c.user == user)
        return [AuditEntry(**row._mapping) for row in connection.execute(query)][::-1]


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "role": lambda value: _role(value),
    "device_hours": lambda value: _positive("device_hours", value),
    "searches": lambda value: _limit("searches", value),
    "devices": lambda value: _limit("devices", value),
    "weight": lambda value: _positive("weight", value) or 1.0,
    "team": lambda value: as_text("team", value),
    "priority": lambda value: as_count("priority", value, most=MOST_PRIORITY),
    "disabled": bool,
}
"""The fields of a user that can be changed, with the function that checks a value."""


def _user(row: Row[Any] | None) -> User:
    assert row is not None
    return User(**{**row._mapping, "role": Role(row.role)})


def _record(row: Row[Any]) -> Token:
    return Token(**{field.name: getattr(row, field.name) for field in fields(Token)})


def _role(role: Role | str) -> str:
    if role not in {str(name) for name in Role}:
        raise UsageError(unknown("role", role, Role))
    return str(role)


def _limit(field: str, value: int | None) -> int | None:
    return None if value is None else as_count(field, value, least=1)


def _positive(field: str, value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise UsageError(f"{field} must be a number above 0, but got {value!r:.80}")
    return float(value)


def _digest(text: str) -> str:
    # A token is 256 random bits: no salt or slow digest makes it harder to guess.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _id_of(text: str) -> str:
    """Returns the id in a token's text; empty if the text is not a token."""
    number, _, secret = text.removeprefix(PREFIX).partition("_")
    plain = text.startswith(PREFIX) and secret and len(number) == 8
    return number if plain and set(number) <= set("0123456789abcdef") else ""
