"""The store: its parts, the log of events, and how it is opened."""

import time
from collections.abc import Callable
from typing import Any, Self

from sqlalchemy import Connection, and_, delete, func, or_, select

from ..records import Event
from ..tables import events, searches
from .connection import PATIENCE_S, Database, migrate, write_ahead
from .demand import Demand
from .dry_runs import DryRuns, Knowledge
from .part import Part, as_text, reads, tell, writes
from .people import People
from .searches import Searches
from .workers import Workers

MOST_FORGOTTEN = 1000
"""Events that one transaction deletes: others write in between."""


class Events(Part):
    """What happened."""

    @writes
    def tell(self, connection: Connection, search: str | None, kind: str, data: dict[str, Any]) -> Event:
        """Records an event of a search, or of the pool."""
        return tell(connection, self.clock(), search, as_text("kind", kind, longest=40, empty=False), data)

    @reads
    def events(
        self, connection: Connection, after: int = 0, search: str | None = None, limit: int = 1000
    ) -> list[Event]:
        """What happened after event `after`, of everything or of one search, in order."""
        query = select(events).where(events.c.id > after).order_by(events.c.id).limit(limit)
        if search is not None:
            query = query.where(events.c.search == search)
        return [Event(**each._mapping) for each in connection.execute(query)]

    @reads
    def latest(self, connection: Connection) -> int:
        """The number of the latest event; 0 before the first. Cheap: by it others see that something changed."""
        return connection.execute(select(func.max(events.c.id))).scalar() or 0

    def forget_events(self, before: float) -> int:
        """Deletes what happened in searches that ended before a time, and to the pool before it; how many events.

        When a search began and how it ended stays, so that a stream of it ends too; and so does the latest event of
        all, from which numbers go on.
        """
        total = 0
        while found := self._some_forgotten(before):
            total += found
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


class Store(People, Searches, DryRuns, Demand, Workers, Events, Knowledge):
    """Everything the service knows. Threads may share one; every process opens its own."""

    @classmethod
    def open(
        cls,
        url: str,
        *,
        create: bool = True,
        clock: Callable[[], float] = time.time,
        patience_s: float = PATIENCE_S,
    ) -> Self:
        """The store in a database.

        Args:
            url: `sqlite:///FILE` or `postgresql://USER@HOST/DATABASE`.
            create: whether to make its tables, or bring those of an earlier version up to date. Without, they must be
                there as they are.
            clock: tells the time.
            patience_s: how long a database that is away is tried again before `StorageUnavailable`, s.

        Raises:
            UsageError: the URL is of another kind of database.
            StorageAhead: a later version of redline has written it.
            StorageUnavailable: it cannot be used, or has no tables and `create` is false.
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
        """Closes its connections."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
