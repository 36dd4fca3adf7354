"""What was measured, by all searches: to warm-start others, and to answer what was measured already."""

from typing import Any

from sqlalchemy import Connection, or_, select

from ..records import Measured
from ..tables import measured, searches
from .part import Part, add, as_text, one, reads, writes
from .searches import counting_for


class Knowledge(Part):
    """Measured configurations."""

    @writes
    def note_measured(
        self,
        connection: Connection,
        fingerprint: str,
        config_id: str,
        config: dict[str, Any],
        measurement: dict[str, Any],
        search: str | None = None,
    ) -> None:
        """Keeps what a configuration measured. A search's later word on a configuration is not kept beside its first.

        Args:
            fingerprint: digest of all else that decides what is measured.
            config_id: the configuration's id.
            config: the configuration.
            measurement: what came of it.
            search: who measured it.
        """
        same = (measured.c.fingerprint == fingerprint, measured.c.config_id == config_id, measured.c.search == search)
        if one(connection, select(measured.c.id).where(*same)):
            return
        values = {"fingerprint": as_text("fingerprint", fingerprint, longest=64, empty=False)}
        values["config_id"] = as_text("config_id", config_id, longest=64, empty=False)
        more = {"config": config, "measurement": measurement, "search": search, "time": self.clock()}
        add(connection, measured, values | more)

    @reads
    def measured(self, connection: Connection, fingerprint: str, *, counts_for: int | None = None) -> list[Measured]:
        """The configurations measured under a fingerprint, as they came; of one, the last is the latest.

        Args:
            fingerprint: as for `note_measured`.
            counts_for: only what the searches of this user may be answered by; None for all.
        """
        query = select(measured).where(measured.c.fingerprint == fingerprint).order_by(measured.c.id)
        if counts_for is not None:
            query = query.outerjoin(searches, searches.c.id == measured.c.search)
            query = query.where(or_(measured.c.search.is_(None), counting_for(counts_for)))
        return [Measured(**each._mapping) for each in connection.execute(query)]
