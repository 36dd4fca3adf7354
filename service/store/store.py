"""The store, made of its parts, and the log of events."""

import time
from collections.abc import Callable
from typing import Any, Self

from sqlalchemy import Connection, and_, delete, func, or_, select

from ..records import Event
from ..tables import events, searches
from .connection import PATIENCE_S, Database, migrate, write_ahead
from .part import Part, add_event, as_text, reads, writes
from .people import People
from .running import Running
from .searches import Searches

MOST_FORGOTTEN = 1000
"""Number of events that one transaction deletes, so that others can write in between."""


class Events(Part):
    """Operations on events."""

    @writes
    def add_event(self, connection: Connection, search: str | None, kind: str, data: dict[str, Any]) -> Event:
        """Records an event of a search; None for one of the service."""
        return add_event(connection, self.clock(), search, as_text("kind", kind, longest=40, empty=False), data)

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

    def forget_events(self, before: float) -> int:
        """Deletes the events of searches that ended before a time, and those of the service before it. Returns their
        number.

        The `search` events, which record when a search began and how it ended, are kept, so that a stream of its
        events also ends. The latest event is kept too, since numbers continue from it.
        """
        total = 0
        while deleted := self._some_forgotten(before):
            total += deleted
        return total

    @writes
    def _some_forgotten(self, connection: Connection, before: float) -> int:
        latest = select(func.max(events.c.id)).scalar_subquery()
        over = or_(
            and_(searches.c.ended < before, events.c.kind != "search"),
            and_(events.c.search.is_(None), events.c.time < before),
        )
        old = select(events.c.id).join(searches, searches.c.id == events.c.search, isouter=True)
        numbers = connection.execute(old.where(over, events.c.id < latest).limit(MOST_FORGOTTEN)).scalars().all()
        connection.execute(delete(events).where(events.c.id.in_(numbers)))
        return len(numbers)


class Store(People, Searches, Running, Events):
    """The service's state. Threads may share a store; every process opens its own."""

    @classmethod
    def open(
        cls,
        url: str,
        *,
        create: bool = True,
        clock: Callable[[], float] = time.time,
        patience_s: float = PATIENCE_S,
    ) -> Self:
        """Opens the store in a database.

        Args:
            url: `sqlite:///FILE` or `postgresql://USER@HOST/DATABASE`.
            create: whether to create its tables, or upgrade those of an earlier version. Otherwise they must be up to
                date.
            clock: returns the time, s since 1970.
            patience_s: how long an unreachable database is retried before `StorageUnavailable`, s.

        Raises:
            UsageError: the URL is of another kind of database.
            StorageAhead: a later version of redline has written it.
            StorageUnavailable: it cannot be used, or needs `create`.
            MissingDependency: its driver is not installed.
        """
        database = Database(url, patience_s=patience_s)
        try:
            if create:
                write_ahead(database)
            migrate(database, change=create)
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
