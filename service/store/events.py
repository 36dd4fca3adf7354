"""Events, in one order for everybody: whoever has read up to one asks for those after it, and has missed none."""

from typing import Any

from sqlalchemy import Connection, func, select

from ..records import Event
from ..tables import events
from .part import Part, as_text, reads, tell, writes


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
