"""Events, in one order for everybody: whoever has read up to one asks for those after it, and has missed none."""

from typing import Any

from sqlalchemy import Connection, and_, delete, func, or_, select

from ..records import Event
from ..tables import events, searches
from .part import Part, as_text, reads, tell, writes

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
