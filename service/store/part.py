"""Common to the parts of the store: decorators that make a method one transaction, and helpers for queries and checks."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Row, Select, Table, insert, select, text

from ..records import Event
from ..tables import events
from .connection import Database

DAY_S = 86400.0
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


def add_event(connection: Connection, now: float, search: str | None, kind: str, data: dict[str, Any]) -> Event:
    """Records an event. Must be the transaction's last write: on Postgres it blocks other transactions that record
    events.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _EVENTS_LOCK})
    values = {"search": search, "time": now, "kind": kind, "data": data}
    key = connection.execute(insert(events).values(**values)).inserted_primary_key
    assert key is not None
    return Event(id=int(key[0]), **values)  # type: ignore[arg-type]


def one(connection: Connection, query: Select[Any]) -> Row[Any] | None:
    """Returns the first row of a query; None if there is none."""
    return connection.execute(query).first()


def locked(connection: Connection, table: Table, key: Any) -> Row[Any] | None:
    """Returns the row of that id, locked against changes until the transaction ends. Other rows may refer to it
    meanwhile.
    """
    return one(connection, select(table).where(table.c.id == key).with_for_update(key_share=True))
