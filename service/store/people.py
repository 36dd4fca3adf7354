"""Users of the service, and their tokens."""

import contextlib
import hashlib
import hmac
import secrets
from dataclasses import asdict, fields, replace
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, or_, select, update

from ...base.errors import KeyTaken, NotFound, StorageUnavailable, UsageError, unknown
from ..records import Rights, Role, Token, User
from ..tables import tokens, users
from .part import Part, one, reads, writes

USED_S = 60.0
"""Resolution of the time when a token was last used, s."""
PREFIX = "redline_"
"""Prefix of a token, so that scanners for leaked secrets recognise it."""
LONGEST_NAME = 200
"""Largest length of a name, characters."""
_IS_SESSION = tokens.c.opened_with.is_not(None)
_RIGHTS = tuple(field.name for field in fields(Rights))


class People(Part):
    """Operations on users and tokens."""

    @writes
    def add_user(self, connection: Connection, name: str, role: Role | str = Role.SUBMITTER, **rights: Any) -> User:
        """Adds a user with `Rights`.

        Raises:
            KeyTaken: there is one of that name.
            UsageError: the name or a right is invalid.
        """
        if not name:
            raise UsageError("a user's name must not be empty")
        values = {
            **_rights_row({"role": role, **rights}),
            "name": _text("a user's name", name),
            "created": self.clock(),
        }
        if one(connection, select(users.c.id).where(users.c.name == name)):
            raise KeyTaken(f"there is a user '{name}' already")
        connection.execute(insert(users).values(**values))
        return _user(self._row(connection, name))

    @writes
    def change_user(self, connection: Connection, name: str, **changes: Any) -> User:
        """Changes a user's role, limits or state. The tokens of a disabled user are rejected.

        Args:
            name: of the user.
            changes: fields of `Rights`, and `disabled` (a boolean).

        Raises:
            NotFound: the user does not exist.
            UsageError: a value is invalid, or there would be no admin left.
        """
        row = self._row(connection, name, lock=True)
        disabled = changes.get("disabled", row.disabled is not None)
        rights = {right: value for right, value in changes.items() if right != "disabled"}
        values = _rights_row({**{right: getattr(row, right) for right in _RIGHTS}, **rights})
        values["disabled"] = (row.disabled or self.clock()) if disabled else None
        admins = users.c.role == Role.ADMIN, users.c.disabled.is_(None), users.c.id != row.id
        was_one = row.role == Role.ADMIN and row.disabled is None
        stays_one = values["role"] == Role.ADMIN and not disabled
        if was_one and not stays_one and one(connection, select(users.c.id).where(*admins)) is None:
            raise UsageError(f"{name} is the only admin; make another user an admin first")
        connection.execute(update(users).where(users.c.id == row.id).values(**values))
        return _user(self._row(connection, name))

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
        return _user(self._row(connection, name))

    def _row(self, connection: Connection, name: str, lock: bool = False) -> Row[Any]:
        query = select(users).where(users.c.name == name)
        row = one(connection, query.with_for_update() if lock else query)
        if row is None:
            raise NotFound(unknown("user", name, connection.execute(select(users.c.name)).scalars()))
        return row

    def new_token(self, user: int | User, name: str = "", expires: float | None = None) -> str:
        """Makes a token and returns its text, of which only a digest is stored.

        Args:
            user: the owner.
            name: its purpose.
            expires: when it stops being accepted, s since 1970; None for never.

        Raises:
            NotFound: the user does not exist.
        """
        text = _new_text()
        owner = user.id if isinstance(user, User) else user
        self._keep_token(text, {"user": owner, "name": _text("a token's name", name), "expires": expires})
        return text

    @writes
    def _keep_token(self, connection: Connection, text: str, values: dict[str, Any]) -> None:
        if one(connection, select(users.c.id).where(users.c.id == values["user"])) is None:
            raise NotFound(f"there is no user {values['user']}")
        self._insert_token(connection, text, values)

    def _insert_token(self, connection: Connection, text: str, values: dict[str, Any]) -> None:
        """Stores a token, unless an earlier run of the transaction has stored it."""
        if self._token(connection, text) is None:
            values = {**values, "id": _id_of(text), "digest": _digest(text), "created": self.clock()}
            connection.execute(insert(tokens).values(**values))

    def user_of(self, text: str, *, session: bool = False) -> User | None:
        """Returns the owner of a token, or of the session of a page; None if it is unknown, has expired or was revoked, or
        its user is disabled.

        Also records the time of use, to a minute.
        """
        owner = self._user_of(text, session)
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
    def _user_of(self, connection: Connection, text: str, session: bool) -> tuple[User, float | None] | None:
        """Returns the owner of a token and when it was last used; None as for `user_of`."""
        row = self._token(connection, text)
        if row is None or (row.opened_with is not None) is not session:
            return None
        user = self._good(connection, row)
        return None if user is None else (user, row.used)

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
        """Begins a session of a page for the owner of a token. Returns its text: another token, which ends after that time
        and with the one that it was opened with.

        Raises:
            NotFound: the token is unknown, has expired or was revoked.
        """
        text = _new_text()
        self._keep_session(text, token, seconds)
        return text

    @writes
    def _keep_session(self, connection: Connection, text: str, token: str, seconds: float) -> None:
        row = self._token(connection, token)
        if row is None or self._good(connection, row) is None:
            raise NotFound("the token is not known, was revoked or has expired")
        now = self.clock()
        connection.execute(delete(tokens).where(_IS_SESSION, tokens.c.expires <= now))
        expires = now + seconds if row.expires is None else min(row.expires, now + seconds)
        self._insert_token(connection, text, {"user": row.user, "name": "", "expires": expires, "opened_with": row.id})

    @writes
    def end_session(self, connection: Connection, text: str) -> None:
        """Ends a session."""
        connection.execute(delete(tokens).where(_IS_SESSION, tokens.c.digest == _digest(text)))

    @reads
    def tokens(self, connection: Connection) -> list[Token]:
        """Returns the tokens of all users, the oldest first, without sessions of pages."""
        query = select(tokens).where(~_IS_SESSION).order_by(tokens.c.created, tokens.c.id)
        return [_record(row) for row in connection.execute(query)]

    @writes
    def revoke(self, connection: Connection, token: str) -> Token:
        """Revokes a token, with the sessions that were opened with it. Its record is kept.

        Args:
            token: its id, the beginning of its id, or its text.

        Raises:
            NotFound: no token begins so.
            UsageError: several do.
        """
        begins = _id_of(token) or token.removeprefix(PREFIX)
        rows = connection.execute(select(tokens).where(~_IS_SESSION).with_for_update()).all()
        matching = [row for row in rows if begins and row.id.startswith(begins)]
        if not matching:
            raise NotFound(unknown("token", begins, [row.id for row in rows if row.revoked is None]))
        if len(matching) > 1:
            raise UsageError(f"several tokens begin with '{begins}': {', '.join(row.id for row in matching)}")
        (row,) = matching
        revoked = self.clock() if row.revoked is None else row.revoked
        with_sessions = or_(tokens.c.id == row.id, tokens.c.opened_with == row.id)
        connection.execute(update(tokens).where(with_sessions).values(revoked=revoked))
        return replace(_record(row), revoked=revoked)


def _rights_row(rights: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a user's columns.

    Raises:
        UsageError: a right is invalid.
    """
    return {**asdict(Rights(**rights)), "role": str(rights["role"])}


def _user(row: Row[Any] | None) -> User:
    assert row is not None
    return User(**{**row._mapping, "role": Role(row.role)})


def _record(row: Row[Any]) -> Token:
    return Token(**{field.name: getattr(row, field.name) for field in fields(Token)})


def _text(field: str, value: str) -> str:
    """Returns a text that every database can store.

    Raises:
        UsageError: it is none.
    """
    if len(value) > LONGEST_NAME or not value.isprintable():
        raise UsageError(f"{field} must have at most {LONGEST_NAME} printable characters, but got {value!r:.80}")
    return value


def _new_text() -> str:
    """Returns the text of a new token: its id and a secret."""
    return f"{PREFIX}{secrets.token_hex(4)}_{secrets.token_urlsafe(32)}"


def _digest(text: str) -> str:
    # A token is 256 random bits: no salt or slow digest makes it harder to guess.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _id_of(text: str) -> str:
    """Returns the id in a token's text; empty if the text is not a token."""
    number, _, secret = text.removeprefix(PREFIX).partition("_")
    plain = text.startswith(PREFIX) and secret and len(number) == 8
    return number if plain and set(number) <= set("0123456789abcdef") else ""
