"""Common to the parts of the store: decorators that make a method one transaction, and helpers for queries and checks."""

import secrets
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Row, Select, Table, insert, select, text

from ...base.errors import UsageError
from ..records import Event
from ..tables import events
from .connection import Database

DAY_S = 86400.0
LONGEST_NAME = 200
"""Largest length of a name or key, characters."""
LARGEST = 2**31 - 1
"""Largest value in an integer column."""
_EVENTS_LOCK = 0x7265646C696E65
"""Lock of the transaction that writes an event, on Postgres, kept until it ends. Events therefore appear in the order
of their numbers, and a reader that has read up to one has missed none before it.
"""

P = ParamSpec("P")
R = TypeVar("R")


class Part:
    """A part of the store.

    Args:
        database: contains the tables.
        clock: returns the time, s since 1970.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self.database = database
        self.clock = clock


S = TypeVar("S", bound=Part)


def reads(method: Callable[Concatenate[S, Connection, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorates a method that reads, which gets its connection as an argument."""

    @wraps(method)
    def run(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.database.read(lambda connection: method(self, connection, *args, **kwargs))

    return run


def writes(method: Callable[Concatenate[S, Connection, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorates a method that writes. It may run again if the connection was lost (see `Database.write`)."""

    @wraps(method)
    def run(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.database.write(lambda connection: method(self, connection, *args, **kwargs))

    return run


def new_id() -> str:
    """Returns 12 random hexadecimal digits."""
    return secrets.token_hex(6)


def add_event(connection: Connection, now: float, search: str | None, kind: str, data: dict[str, Any]) -> Event:
    """Records an event. Must be the transaction's last write: on Postgres it blocks other transactions that record
    events.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _EVENTS_LOCK})
    number = add(connection, events, {"search": search, "time": now, "kind": kind, "data": data})
    return Event(id=number, search=search, time=now, kind=kind, data=data)


def add(connection: Connection, table: Table, values: dict[str, Any]) -> int:
    """Inserts a row into a table with an autoincremented id, and returns the id."""
    key = connection.execute(insert(table).values(**values)).inserted_primary_key
    assert key is not None
    return int(key[0])


def one(connection: Connection, query: Select[Any]) -> Row[Any] | None:
    """Returns the first row of a query; None if there is none."""
    return connection.execute(query).first()


def locked(connection: Connection, table: Table, key: Any) -> Row[Any] | None:
    """Returns the row of that id, locked against changes until the transaction ends. Other rows may refer to it
    meanwhile.
    """
    return one(connection, select(table).where(table.c.id == key).with_for_update(key_share=True))


def as_text(field: str, value: str, *, longest: int = LONGEST_NAME, empty: bool = True) -> str:
    """Returns the text if both databases can store it.

    Raises:
        UsageError: it is empty, too long, or contains an invalid character.
    """
    if not isinstance(value, str):
        raise UsageError(f"{field} must be a text, but got {value!r:.80}")
    if not value and not empty:
        raise UsageError(f"{field} must not be empty")
    if len(value) > longest:
        raise UsageError(f"{field} must have at most {longest} characters, but got {len(value)}")
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UsageError(f"{field} must not contain a NUL or half a surrogate pair, but got {value!r:.80}")
    return value


def as_count(field: str, value: int, *, least: int = 0, most: int = LARGEST) -> int:
    """Returns the whole number if it is in range.

    Raises:
        UsageError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{field} must be a whole number from {least} to {most}, but got {value!r:.80}")
    return value
