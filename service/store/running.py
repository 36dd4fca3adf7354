"""What the server records of running searches: their devices and processes, the events they report, and use by user."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, or_, select, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from ...base.errors import NotFound
from ..records import Contender, ProcessId, SearchState, Share
from ..tables import searches, usage, users
from .part import DAY_S, Part, add_event, locked, one, reads, writes
from .searches import end_search

WEEK_S = 7 * DAY_S
"""Window of fairness and of limits of device-hours, s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """An event that the process of a search has written."""

    time: float
    kind: str
    data: dict[str, Any]


class Running(Part):
    """Operations of the server on running searches."""

    @reads
    def contenders(self, connection: Connection) -> list[Contender]:
        """Returns the searches that are queued or have devices, in no particular order."""
        columns = ("user", "priority", "device", "kind", "devices", "concurrency", "queued", "state", "uses")
        more = ("began", "used_s", "read", "pid", "pid_started")
        query = select(searches.c.id.label("search"), *(searches.c[name] for name in (*columns, *more)))
        waits = searches.c.state.in_([SearchState.QUEUED, SearchState.RUNNING])
        contenders = []
        for row in connection.execute(query.where(or_(waits, searches.c.uses > 0))):
            fields = dict(row._mapping)
            pid, started = fields.pop("pid"), fields.pop("pid_started")
            process = None if pid is None else ProcessId(pid=pid, started=started)
            contenders.append(Contender(**{**fields, "state": SearchState(row.state), "process": process}))
        return contenders

    @writes
    def give_devices(self, connection: Connection, search: str, kind: str, uses: int) -> bool:
        """Gives a queued search devices. Returns False if it does not wait any more."""
        row = locked(connection, searches, search)
        if row is None or row.state != SearchState.QUEUED or row.uses:
            return False
        now = self.clock()
        values = {"state": SearchState.RUNNING, "reason": "", "kind": kind, "uses": uses, "began": now, "pid": None}
        started = now if row.started is None else row.started
        connection.execute(update(searches).where(searches.c.id == search).values(**values, started=started))
        add_event(connection, now, search, "search", {"state": SearchState.RUNNING, "reason": "", "kind": kind})
        return True

    @writes
    def set_process(self, connection: Connection, search: str, process: ProcessId) -> int:
        """Records a new process of a search and returns the number of the attempt.

        Raises:
            NotFound: the search does not exist.
        """
        row = locked(connection, searches, search)
        if row is None:
            raise NotFound(f"there is no search '{search}'")
        attempt = row.attempt if row.pid == process.pid and row.pid_started == process.started else row.attempt + 1
        values = {"pid": process.pid, "pid_started": process.started, "attempt": attempt}
        connection.execute(update(searches).where(searches.c.id == search).values(**values))
        return int(attempt)

    @writes
    def stop_process(self, connection: Connection, search: str) -> None:
        """Records that the server has ended the process of a search, which keeps its devices for the next server."""
        values = {"pid": None, "pid_started": None}
        connection.execute(update(searches).where(searches.c.id == search).values(**values))
        add_event(connection, self.clock(), search, "stopped", {"reason": "the server was stopped"})

    @writes
    def add_reports(
        self,
        connection: Connection,
        search: str,
        begin: int,
        end: int,
        reports: Sequence[Report],
        waits_for: str | None,
    ) -> None:
        """Records events of a search's process: bytes `begin` to `end` of its file. Does nothing if these were recorded.

        Args:
            search: its id. An unknown one, deleted meanwhile, is ignored.
            begin, end: positions in the file, bytes.
            reports: its events there.
            waits_for: what the search waits for now; None if that has not changed.
        """
        row = locked(connection, searches, search)
        if row is None or row.read != begin:
            return
        values: dict[str, Any] = {"read": end}
        finished = [report.data for report in reports if report.kind == "finished"]
        if finished:
            values["trials"] = max(row.trials, finished[-1]["done"])
        if waits_for is not None and row.state == SearchState.RUNNING:
            values["reason"] = waits_for
        connection.execute(update(searches).where(searches.c.id == search).values(**values))
        for report in reports:
            add_event(connection, report.time, search, report.kind, report.data)

    @writes
    def take_devices(
        self,
        connection: Connection,
        search: str,
        state: SearchState,
        reason: str = "",
        best: dict[str, Any] | None = None,
        *,
        read: int | None = None,
    ) -> None:
        """Records that the process of a search has ended, which gives its devices back: the search is queued again, or has
        ended. A cancelled search stays cancelled and gets the best so far. An unknown one, deleted meanwhile, is ignored.

        Args:
            search: its id.
            state: what it is now.
            reason: for that state.
            best: the winner; None if there is none.
            read: bytes of its file of events that were read; None if that has not changed.
        """
        row = locked(connection, searches, search)
        if row is None:
            return
        now = self.clock()
        values: dict[str, Any] = {"uses": 0, "began": None, "pid": None, "pid_started": None}
        if best is not None:
            values["best"] = best
        if read is not None:
            values["read"] = read
        if row.state == SearchState.RUNNING and state is SearchState.QUEUED:
            values |= {"state": state, "queued": now, "reason": ""}
        connection.execute(update(searches).where(searches.c.id == search).values(**values))
        if row.state != SearchState.RUNNING:
            return
        if state.ended:
            end_search(connection, search, state, reason, best, now)
        else:
            add_event(connection, now, search, "search", {"state": state, "reason": reason})

    @writes
    def skip_reports(self, connection: Connection, search: str, end: int) -> None:
        """Records that the file of events of a search was read up to a position, bytes."""
        connection.execute(update(searches).where(searches.c.id == search).values(read=end))

    @writes
    def charge(self, connection: Connection, seconds: Mapping[str, float]) -> None:
        """Charges searches with the time that they had their devices, s, and their users with the device-seconds.

        After a lost connection it may run twice: a few seconds of use, which no limit depends on.
        """
        day = int(self.clock() // DAY_S)
        device_seconds: dict[int, float] = defaultdict(float)
        for search in sorted(seconds):
            row = one(connection, select(searches.c.user, searches.c.uses).where(searches.c.id == search))
            if row is not None:
                device_seconds[row.user] += row.uses * seconds[search]
                used = searches.c.used_s + seconds[search]
                connection.execute(update(searches).where(searches.c.id == search).values(used_s=used))
        for user in sorted(device_seconds):
            values = {"user": user, "day": day, "device_seconds": device_seconds[user]}
            dialect_insert = postgres_insert if connection.dialect.name == "postgresql" else sqlite_insert
            statement = dialect_insert(usage).values(**values)
            total = usage.c.device_seconds + statement.excluded.device_seconds
            connection.execute(
                statement.on_conflict_do_update(index_elements=["day", "user"], set_={"device_seconds": total})
            )

    @reads
    def shares(self, connection: Connection) -> list[Share]:
        """Returns each user's use of the devices in the last seven days, and their limits.

        The total of the first day counts by the fraction of it that is in these seven days.
        """
        since = (self.clock() - WEEK_S) / DAY_S
        first = int(since)
        week_s: dict[int, float] = defaultdict(float)
        query = select(usage.c.user, usage.c.day, usage.c.device_seconds).where(usage.c.day >= first)
        for user, day, device_seconds in connection.execute(query):
            week_s[user] += device_seconds * (first + 1 - since if day == first else 1.0)
        limits = ("weight", "searches", "devices", "device_hours")
        query_users = select(users.c.id, *(users.c[name] for name in limits))
        return [
            Share(user=row.id, week_s=week_s[row.id], **{name: getattr(row, name) for name in limits})
            for row in connection.execute(query_users)
        ]
