"""The inputs of scheduling, one query each: waiting and running dry runs, and each user's use of the devices."""

from collections import defaultdict
from typing import Any

from sqlalchemy import Connection, and_, case, func, literal, select

from ..records import Contender, DryRunState, Running, SearchState, Share, Waiting
from ..tables import dry_runs, searches, usage, users
from .part import DAY_S, Part, reads

RECENT_S = 3600.0
"""Window of `Share.recent`, s."""
WEEK_S = 7 * DAY_S
"""Window of `Share.week`, s."""
QUOTA_S = 30 * DAY_S
"""Window of quotas of device-hours, s."""


class Demand(Part):
    """Queries on demand for the pool."""

    @reads
    def waiting(self, connection: Connection) -> list[Waiting]:
        """Returns the dry runs that wait for devices, in no particular order."""
        rows = connection.execute(
            select(
                dry_runs.c.id.label("dry_run"),
                dry_runs.c.search,
                searches.c.user,
                searches.c.priority,
                searches.c.kind,
                dry_runs.c.devices,
                searches.c.created.label("submitted"),
                _average().label("seconds"),
            )
            .join(searches, searches.c.id == dry_runs.c.search)
            .where(
                dry_runs.c.state == DryRunState.WAITING,
                searches.c.state == SearchState.RUNNING,
                searches.c.held.is_(False),
            )
            .order_by(dry_runs.c.id)
        )
        return [Waiting(**row._mapping) for row in rows]

    @reads
    def running(self, connection: Connection) -> list[Running]:
        """Returns the leased dry runs."""
        rows = connection.execute(
            select(
                dry_runs.c.id.label("dry_run"),
                dry_runs.c.search,
                searches.c.user,
                dry_runs.c.worker,
                dry_runs.c.devices,
                dry_runs.c.started,
                _average().label("seconds"),
            )
            .join(searches, searches.c.id == dry_runs.c.search)
            .where(dry_runs.c.state == DryRunState.LEASED)
            .order_by(dry_runs.c.id)
        )
        return [Running(**row._mapping) for row in rows]

    @reads
    def contenders(self, connection: Connection) -> list[Contender]:
        """Returns the running and queued searches, in no particular order."""
        leased = (
            select(dry_runs.c.search, func.count().label("leased"))
            .where(dry_runs.c.state == DryRunState.LEASED)
            .group_by(dry_runs.c.search)
            .subquery()
        )
        names = ("user", "priority", "device", "kind", "devices", "simulated", "held")
        rows = connection.execute(
            select(
                searches.c.id.label("search"),
                *(searches.c[name] for name in names),
                searches.c.created.label("submitted"),
                (searches.c.state == SearchState.RUNNING).label("runs"),
                func.coalesce(leased.c.leased, 0).label("leased"),
            )
            .join(leased, leased.c.search == searches.c.id, isouter=True)
            .where(searches.c.state.in_([SearchState.QUEUED, SearchState.RUNNING]))
        )
        return [Contender(**each._mapping) for each in rows]

    @reads
    def usage(self, connection: Connection) -> dict[int, float]:
        """Returns the device-seconds within `QUOTA_S` of each user who used any."""
        return self._totals(connection)[0]

    @reads
    def shares(self, connection: Connection) -> list[Share]:
        """Returns each user's use of the devices and limits.

        `recent` is over `RECENT_S`, with each second weighted less in proportion to its age.
        """
        recent, (used, week) = self._recent_usage(connection), self._totals(connection)
        return [
            Share(
                user=each.id,
                weight=each.weight,
                recent=recent.get(each.id, 0.0),
                week=week.get(each.id, 0.0),
                used_hours=used.get(each.id, 0.0) / 3600,
                device_hours=each.device_hours,
                running=each.running,
            )
            for each in connection.execute(select(users.c.id, users.c.weight, users.c.device_hours, users.c.running))
        ]

    def _totals(self, connection: Connection) -> tuple[dict[int, float], dict[int, float]]:
        """Returns each user's device-seconds within `QUOTA_S`, and those within `WEEK_S` discounted by age. Sums
        daily totals and the running dry runs.

        The total of the first day counts by the fraction of it that is in the window.
        """
        now = self.clock()
        since = (now - QUOTA_S) / DAY_S
        first = int(since)
        used: dict[int, float] = defaultdict(float)
        week: dict[int, float] = defaultdict(float)
        query = select(usage.c.user, usage.c.day, usage.c.device_seconds).where(usage.c.day >= first)
        for user, day, seconds in connection.execute(query):
            used[user] += seconds * (first + 1 - since if day == first else 1.0)
            week[user] += seconds * min(1.0, max(0.0, 1 - (now - (day + 0.5) * DAY_S) / WEEK_S))
        runs = dry_runs.c.state == DryRunState.LEASED
        device_seconds = select(searches.c.user, func.sum(dry_runs.c.devices * (now - dry_runs.c.started)))
        device_seconds = (
            device_seconds.join(searches, searches.c.id == dry_runs.c.search).where(runs).group_by(searches.c.user)
        )
        for user, total in connection.execute(device_seconds):
            used[user] += max(0.0, float(total))
            week[user] += max(0.0, float(total))
        return dict(used), dict(week)

    def _recent_usage(self, connection: Connection) -> dict[int, float]:
        """Returns each user's device-seconds within `RECENT_S` discounted by age, of dry runs that ended in that time
        or run now.
        """
        now = self.clock()
        since = now - RECENT_S
        out: dict[int, float] = {}
        for end, which in (
            (dry_runs.c.ended, dry_runs.c.ended > since),
            (literal(now), dry_runs.c.state == DryRunState.LEASED),
        ):
            start = case((dry_runs.c.started > since, dry_runs.c.started), else_=literal(since))
            # The integral of the weight of a second, which grows from 0 at the window's beginning to 1 now.
            device_seconds = dry_runs.c.devices * (end - start) * ((start + end) / 2 - since) / RECENT_S
            counts = and_(which, dry_runs.c.started.is_not(None), end > start)
            query = select(searches.c.user, func.sum(device_seconds)).join(searches, searches.c.id == dry_runs.c.search)
            for user, total in connection.execute(query.where(counts).group_by(searches.c.user)):
                out[user] = out.get(user, 0.0) + float(total)
        return out


def _average() -> Any:
    return case((searches.c.finished > 0, searches.c.seconds / searches.c.finished), else_=None)
