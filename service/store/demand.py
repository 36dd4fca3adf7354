"""What waits, what runs, and what every user has had of the devices: what scheduling looks at, a query each."""

from typing import Any

from sqlalchemy import Connection, and_, case, func, literal, select

from ..records import DryRunState, Running, SearchState, Share, Waiting
from ..tables import dry_runs, searches, users
from .part import Part, reads

RECENT_S = 3600.0
"""How far back fair shares look, s."""
QUOTA_S = 30 * 86400.0
"""How far back quotas of device-hours look, s."""


class Demand(Part):
    """What is wanted of the pool."""

    @reads
    def waiting(self, connection: Connection) -> list[Waiting]:
        """The dry runs that wait for devices, in no order that means anything."""
        rows = connection.execute(
            select(
                dry_runs.c.id,
                dry_runs.c.search,
                searches.c.user,
                searches.c.priority,
                searches.c.device,
                dry_runs.c.devices,
                searches.c.created,
                _average(),
            )
            .join(searches, searches.c.id == dry_runs.c.search)
            .where(dry_runs.c.state == DryRunState.WAITING, searches.c.state == SearchState.RUNNING)
            .order_by(dry_runs.c.id)
        )
        names = ("dry_run", "search", "user", "priority", "device", "devices", "submitted", "seconds")
        return [Waiting(**dict(zip(names, row, strict=True))) for row in rows]

    @reads
    def running(self, connection: Connection) -> list[Running]:
        """The dry runs that workers have."""
        rows = connection.execute(
            select(
                dry_runs.c.id,
                dry_runs.c.search,
                searches.c.user,
                dry_runs.c.worker,
                dry_runs.c.devices,
                dry_runs.c.started,
                _average(),
            )
            .join(searches, searches.c.id == dry_runs.c.search)
            .where(dry_runs.c.state == DryRunState.LEASED)
            .order_by(dry_runs.c.id)
        )
        names = ("dry_run", "search", "user", "worker", "devices", "started", "seconds")
        return [Running(**dict(zip(names, row, strict=True))) for row in rows]

    @reads
    def usage(self, connection: Connection, window_s: float = QUOTA_S) -> dict[int, float]:
        """Device-seconds of every user who had any within the last `window_s`."""
        return self._device_seconds(connection, window_s, fading=False)

    @reads
    def shares(self, connection: Connection) -> list[Share]:
        """What every user has had of the devices, and may have.

        Lately is within `RECENT_S`, and a second counts the less the longer it is ago, in proportion.
        """
        recent = self._device_seconds(connection, RECENT_S, fading=True)
        used = self._device_seconds(connection, QUOTA_S, fading=False)
        return [
            Share(
                user=each.id,
                weight=each.weight,
                recent=recent.get(each.id, 0.0),
                used_hours=used.get(each.id, 0.0) / 3600,
                device_hours=each.device_hours,
                running=each.running,
            )
            for each in connection.execute(select(users))
        ]

    def _device_seconds(self, connection: Connection, window_s: float, *, fading: bool) -> dict[int, float]:
        now = self.clock()
        since = now - window_s
        ended = case((dry_runs.c.state == DryRunState.LEASED, literal(now)), else_=dry_runs.c.ended)
        began = case((dry_runs.c.started > since, dry_runs.c.started), else_=literal(since))
        had = dry_runs.c.devices * (ended - began)
        if fading:  # the integral of what a second counts: 0 at the window's beginning, 1 now
            had = had * ((began + ended) / 2 - since) / window_s
        counts = and_(
            dry_runs.c.started.is_not(None),
            (dry_runs.c.ended > since) | (dry_runs.c.state == DryRunState.LEASED),
            ended > began,
        )
        query = select(searches.c.user, func.sum(had)).join(searches, searches.c.id == dry_runs.c.search).where(counts)
        return {user: float(total) for user, total in connection.execute(query.group_by(searches.c.user))}


def _average() -> Any:
    return case((searches.c.finished > 0, searches.c.seconds / searches.c.finished), else_=None)
