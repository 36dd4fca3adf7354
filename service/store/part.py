"""What the parts of the store have in common: a method is one transaction."""

import secrets
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Row, Select, Table, insert, select, text
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from ...base.errors import UsageError
from ..records import Event
from ..tables import events, usage
from .connection import Database

DAY_S = 86400.0
LONGEST_NAME = 200
"""Characters of a name or key."""
LARGEST = 2**31 - 1
"""The largest number in a column of whole numbers."""
_EVENTS_LOCK = 0x7265646C696E65
"""Postgres: whoever tells an event holds this lock until its transaction ends, so that events appear in the order of
their numbers, and whoever has read up to one has missed none before it."""

P = ParamSpec("P")
R = TypeVar("R")


class Part:
    """A part of the store.

    Args:
        database: where it is kept.
        clock: tells the time, in seconds since 1970.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self.database = database
        self.clock = clock


S = TypeVar("S", bound=Part)


def reads(method: Callable[Concatenate[S, Connection, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that reads: its connection is given to it."""

    @wraps(method)
    def run(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.database.read(lambda connection: method(self, connection, *args, **kwargs))

    return run


def writes(method: Callable[Concatenate[S, Connection, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that writes. It may be run again where a connection was lost (see `Database.write`)."""

    @wraps(method)
    def run(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.database.write(lambda connection: method(self, connection, *args, **kwargs))

    return run


def beats(method: Callable[Concatenate[S, Connection, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that writes what a power cut may take back, as it comes again in a moment."""

    @wraps(method)
    def run(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.database.write(lambda connection: method(self, connection, *args, **kwargs), durable=False)

    return run


def new_id() -> str:
    """12 hexadecimal digits."""
    return secrets.token_hex(6)


def tell(connection: Connection, now: float, search: str | None, kind: str, data: dict[str, Any]) -> Event:
    """Records an event. It is the last that its transaction writes: on Postgres all who tell wait for each other."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _EVENTS_LOCK})
    number = add(connection, events, {"search": search, "time": now, "kind": kind, "data": data})
    return Event(id=number, search=search, time=now, kind=kind, data=data)


def used(connection: Connection, user: int, now: float, device_seconds: float) -> None:
    """Adds to what a user has had of the devices, for the quota of device-hours: to the day on which it ended."""
    if not device_seconds > 0:
        return
    day = int(now // DAY_S)
    row = {"user": user, "day": day, "device_seconds": device_seconds}
    made = (postgres_insert if connection.dialect.name == "postgresql" else sqlite_insert)(usage).values(**row)
    added = {"device_seconds": usage.c.device_seconds + made.excluded.device_seconds}
    connection.execute(made.on_conflict_do_update(index_elements=["day", "user"], set_=added))


def add(connection: Connection, table: Table, values: dict[str, Any]) -> int:
    """Adds a row to a table that counts its rows; its number."""
    key = connection.execute(insert(table).values(**values)).inserted_primary_key
    assert key is not None
    return int(key[0])


def one(connection: Connection, query: Select[Any]) -> Row[Any] | None:
    """The first row of a query."""
    return connection.execute(query).first()


def locked(connection: Connection, table: Table, key: Any) -> Row[Any] | None:
    """The row of that id, which nobody else changes until this transaction ends; others may refer to it meanwhile."""
    return one(connection, select(table).where(table.c.id == key).with_for_update(key_share=True))


def as_text(field: str, value: str, *, longest: int = LONGEST_NAME, empty: bool = True) -> str:
    """A text that both databases can hold.

    Raises:
        UsageError: it is empty, too long, or holds what is no character.
    """
    if not isinstance(value, str):
        raise UsageError(f"{field} must be a text, but got {value!r:.80}")
    if not value and not empty:
        raise UsageError(f"{field} must not be empty")
    if len(value) > longest:
        raise UsageError(f"{field} has at most {longest} characters, but got {len(value)}")
    if "\0" in value or any("\ud800" <= each <= "\udfff" for each in value):
        raise UsageError(f"{field} holds a NUL or half a surrogate pair: {value!r:.80}")
    return value


def as_count(field: str, value: int, *, least: int = 0, most: int = LARGEST) -> int:
    """A whole number within bounds.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{field} must be a whole number from {least} to {most}, but got {value!r:.80}")
    return value
