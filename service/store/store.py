"""The store, made of its parts, and the log of events."""

import time
from collections.abc import Callable
from typing import Any, Self

from sqlalchemy import Connection, func, select

from ..records import Event
from ..tables import events
from .connection import PATIENCE_S, Database, migrate, write_ahead
from .part import Part, add_event, reads, writes
from .people import People
from .running import Running
from .searches import Searches


class Events(Part):
    """Operations on events."""

    @writes
    def add_event(self, connection: Connection, search: str | None, kind: str, data: dict[str, Any]) -> Event:
        """Records an event of a search; None for one of the service."""
        return add_event(connection, self.clock(), search, kind, data)

    @reads
    def events(
        self, connection: Connection, after: int = 0, search: str | None = None, limit: int = 1000
    ) -> list[Event]:
        """Returns the events after event `after`, of everything or of one search, in order."""
        query = select(events).where(events.c.id > after).order_by(events.c.id).limit(limit)
        if search is not None:
            query = query.where(events.c.search == search)
        return [Event(**row._mapping) for row in connection.execute(query)]

    @reads
    def latest(self, connection: Connection) -> int:
        """Returns the number of the latest event; 0 before the first. A cheap way to detect changes."""
        return connection.execute(select(func.max(events.c.id))).scalar() or 0


class Store(People, Searches, Running, Events):
    """The service's state. Threads may share a store; every process opens its own."""

    @classmethod
    def open(
        cls,
        url: str,
        *,
        clock: Callable[[], float] = time.time,
        patience_s: float = PATIENCE_S,
    ) -> Self:
        """Opens the store in a database. Creates its tables, or upgrades those of an earlier version.

        Args:
            url: `sqlite:///FILE` or `postgresql://USER@HOST/DATABASE`.
            clock: returns the time, s since 1970.
            patience_s: how long an unreachable database is retried before `StorageUnavailable`, s.

        Raises:
            UsageError: the URL is of another kind of database.
            StorageAhead: a later version of redline has written it.
            StorageUnavailable: it cannot be used.
            MissingDependency: its driver is not installed.
        """
        database = Database(url, patience_s=patience_s)
        try:
            write_ahead(database)
            migrate(database)
        except BaseException:
            database.close()
            raise
        return cls(database, clock)

    def close(self) -> None:
        """Closes the connections."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
