"""Workers: they join the pool, report, and leave."""

from typing import Any

from sqlalchemy import Connection, Row, and_, insert, select, update

from ...base.errors import NotFound
from ..records import DryRunState, User, Worker
from ..tables import dry_runs, users, workers
from .part import Part, add_event, as_count, as_text, beats, locked, new_id, one, reads, writes

UNSEEN_S = 60.0
"""A worker that has not reported for this long has left, s."""


class Workers(Part):
    """Operations on workers."""

    def join(
        self,
        user: int | User,
        name: str,
        host: str,
        device: dict[str, Any],
        devices: int,
        memory_mib: int,
        software: dict[str, Any],
    ) -> Worker:
        """Adds a worker to the pool.

        Args:
            user: who joins it.
            name: shown in lists.
            host: name of its host.
            device: its kind of device, in the form of `Device.to_dict`.
            devices: number of devices.
            memory_mib: memory of one, MiB.
            software: versions.

        Raises:
            UsageError: a value is invalid.
            NotFound: the user does not exist.
        """
        values = {
            "id": new_id(),
            "user": user.id if isinstance(user, User) else user,
            "name": as_text("a worker's name", name),
            "host": as_text("host", host),
            "device": device,
            "devices": as_count("devices", devices, least=1),
            "memory_mib": as_count("memory_mib", memory_mib),
            "software": software,
        }
        return self._join(values)

    @writes
    def _join(self, connection: Connection, values: dict[str, Any]) -> Worker:
        known = one(connection, select(workers).where(workers.c.id == values["id"]))
        if known is not None:
            return _worker(known)
        if one(connection, select(users.c.id).where(users.c.id == values["user"])) is None:
            raise NotFound(f"there is no user {values['user']}")
        now = self.clock()
        connection.execute(insert(workers).values(**values, seen=now))
        data = {"worker": values["id"], "state": "joined", "name": values["name"], "devices": values["devices"]}
        add_event(connection, now, None, "worker", data)
        return _get(connection, values["id"])

    @beats
    def seen(self, connection: Connection, worker: str) -> Worker:
        """Records that a worker reported. One that was considered gone is back in the pool.

        Raises:
            NotFound: the worker does not exist.
        """
        row = _locked(connection, worker)
        now = self.clock()
        connection.execute(update(workers).where(workers.c.id == worker).values(seen=now, left=None))
        if row.left is not None:
            add_event(connection, now, None, "worker", {"worker": worker, "state": "back", "name": row.name})
        return _get(connection, worker)

    @writes
    def leave(self, connection: Connection, worker: str) -> None:
        """Removes a worker from the pool. Its dry runs return to the queue and do not count as lost.

        Raises:
            NotFound: the worker does not exist.
        """
        row = one(connection, select(workers).where(workers.c.id == worker))
        if row is None:
            raise NotFound(f"there is no worker '{worker}'")
        has = and_(dry_runs.c.worker == worker, dry_runs.c.state == DryRunState.LEASED)
        again = {"state": DryRunState.WAITING, "until": None, "attempts": dry_runs.c.attempts - 1}
        connection.execute(update(dry_runs).where(has).values(**again))
        if row.left is None:
            self._gone(connection, row, "left")

    def forget_unseen(self, seconds: float = UNSEEN_S) -> list[Worker]:
        """Removes workers that have not reported for `seconds` from the pool, and returns them. Their dry runs return
        to the queue when their leases expire.
        """
        since = self.clock() - seconds
        unseen = [each.id for each in self.workers() if each.seen < since]
        return self._forget(unseen, since) if unseen else []

    @writes
    def _forget(self, connection: Connection, unseen: list[str], since: float) -> list[Worker]:
        left_workers = []
        for worker in unseen:
            row = _locked(connection, worker)
            if row.left is None and row.seen < since:  # it may have reported just now
                self._gone(connection, row, "unseen")
                left_workers.append(_get(connection, worker))
        return left_workers

    @reads
    def worker(self, connection: Connection, worker: str) -> Worker:
        """Returns the worker of that id.

        Raises:
            NotFound: there is none.
        """
        return _get(connection, worker)

    @reads
    def workers(self, connection: Connection) -> list[Worker]:
        """Returns the workers in the pool, by id."""
        present = select(workers).where(workers.c.left.is_(None)).order_by(workers.c.id)
        return [_worker(each) for each in connection.execute(present)]

    def _gone(self, connection: Connection, row: Row[Any], how: str) -> None:
        now = self.clock()
        connection.execute(update(workers).where(workers.c.id == row.id).values(left=now))
        add_event(connection, now, None, "worker", {"worker": row.id, "state": how, "name": row.name})


def _worker(row: Row[Any]) -> Worker:
    return Worker(**row._mapping)


def _get(connection: Connection, worker: str) -> Worker:
    row = one(connection, select(workers).where(workers.c.id == worker))
    if row is None:
        raise NotFound(f"there is no worker '{worker}'")
    return _worker(row)


def _locked(connection: Connection, worker: str) -> Row[Any]:
    row = locked(connection, workers, worker)
    if row is None:
        raise NotFound(f"there is no worker '{worker}'")
    return row
