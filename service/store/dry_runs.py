"""Dry runs and their leases, the leases that count against a dry run, and stored measurements.

Leases of a dry run have increasing numbers (fencing tokens): an answer contains its number and is refused unless it is
the latest. A lease that expired before another one began is still the latest, so no finished work is thrown away. An
outcome is written once.

| how a lease ended | it counts | because |
|---|---|---|
| its worker gave it back, or left the pool | no | nothing was lost |
| its worker requested the dry run again | in place of the next one | the worker was slow, not lost |
| while no server ran that could renew it | no | the server was lost |
| in the same moment as others of its worker | no | it is not known which one caused it |
| otherwise | yes | its worker was lost while it ran this |

`MOST_ATTEMPTS` leases that count make the outcome a crash. From lease `FORGIVEN` + 1 on all leases count except those
that were given back: each of these reasons may be caused by this dry run, and it must end at some point.
"""

from collections import Counter
from typing import Any

from sqlalchemy import Connection, Row, and_, func, or_, select, update

from ...base.errors import AttemptOver, LeaseOver, NotFound, Refused
from ..records import Assignment, DryRun, DryRunState, SearchState, StoredMeasurement
from ..tables import dry_runs, measured, searches, workers
from .part import Part, add, add_event, add_usage, as_count, as_text, beats, locked, one, reads, writes
from .searches import check_attempt, counting_for, locked_search

MOST_ATTEMPTS = 3
"""Number of counted leases after which the outcome is a crash."""
FORGIVEN = 10
"""Number of the last lease that may be forgiven."""


def attempts_when_leased(attempts: int, latest: int, *, same_worker: bool) -> int:
    """Returns the number of counted leases after a new lease.

    Args:
        attempts: number counted before.
        latest: number of the latest lease.
        same_worker: whether the new lease goes to the worker that let the latest one expire.
    """
    return max(1, attempts) if same_worker and latest <= FORGIVEN else attempts + 1


def attempts_when_lost(attempts: int, latest: int, *, with_server: bool, with_others: bool) -> int:
    """Returns the number of counted leases after the latest one was lost.

    Args:
        attempts: number counted while it ran.
        latest: its number.
        with_server: whether no server ran that could renew it.
        with_others: whether others of its worker were lost at the same time.
    """
    return attempts - 1 if (with_server or with_others) and latest <= FORGIVEN else attempts


class DryRuns(Part):
    """Operations on dry runs."""

    @writes
    def ask_dry_run(
        self,
        connection: Connection,
        search: str,
        attempt: int,
        key: str,
        kind: str,
        payload: dict[str, Any],
        devices: int,
    ) -> DryRun:
        """Requests a dry run. An earlier request under the same key returns the same dry run, with its outcome if
        known. One that a worker refused is run again: a search that is repeated may have another worker.

        Raises:
            NotFound: the search does not exist.
            AttemptOver: the search has ended, or a later attempt has it.
        """
        owner = locked_search(connection, search)
        check_attempt(owner, attempt)
        known = one(connection, select(dry_runs).where(dry_runs.c.search == search, dry_runs.c.key == key))
        refused = known is not None and "refused" in (known.outcome or {})
        if known is not None and known.state != DryRunState.WITHDRAWN and not refused:
            return _dry_run(known)
        if owner.state != SearchState.RUNNING:
            raise AttemptOver(f"the search {search} is {owner.state}")
        now = self.clock()
        values = {"kind": kind, "payload": payload, "devices": as_count("devices", devices, least=1)}
        values |= {"state": DryRunState.WAITING, "created": now, "ended": None, "attempts": 0}
        if known is not None:
            number = known.id
            values |= {"outcome": None, "lease": known.lease + 1}  # an answer to the earlier request is late
            connection.execute(update(dry_runs).where(dry_runs.c.id == number).values(**values))
        else:
            values |= {"search": search, "key": as_text("key", key, empty=False), "lease": 0}
            number = add(connection, dry_runs, values)
        self._record_event(connection, number, search, key, DryRunState.WAITING)
        return _get(connection, number)

    @reads
    def outcome(self, connection: Connection, dry_run: int) -> dict[str, Any] | None:
        """Returns the outcome of a dry run; None if it has none yet.

        Raises:
            NotFound: the dry run does not exist.
            LeaseOver: it was withdrawn, so it will get none.
        """
        row = one(connection, select(dry_runs.c.state, dry_runs.c.outcome).where(dry_runs.c.id == dry_run))
        if row is None:
            raise NotFound(f"there is no dry run {dry_run}")
        if row.state == DryRunState.WITHDRAWN:
            raise LeaseOver(f"the dry run {dry_run} was withdrawn")
        return row.outcome

    @reads
    def dry_run(self, connection: Connection, dry_run: int) -> DryRun:
        """Returns the dry run of that number.

        Raises:
            NotFound: there is none.
        """
        return _get(connection, dry_run)

    @reads
    def dry_runs(self, connection: Connection, search: str) -> list[DryRun]:
        """Returns the dry runs of a search, in order."""
        query = select(dry_runs).where(dry_runs.c.search == search).order_by(dry_runs.c.id)
        return [_dry_run(each) for each in connection.execute(query)]

    @writes
    def lease(self, connection: Connection, dry_run: int, worker: str, seconds: float) -> Assignment:
        """Leases a dry run to a worker for `seconds`.

        The worker's devices must be of the kind that the search was placed on, since throughput on different devices
        is not comparable.

        Raises:
            NotFound: the dry run or worker does not exist.
            LeaseOver: the dry run does not wait any more.
            Refused: the worker has not enough free devices, or another kind than the search.
        """
        row = _locked(connection, dry_run)
        search = one(connection, select(searches).where(searches.c.id == row.search))
        host = locked(connection, workers, worker)
        if host is None:
            raise NotFound(f"there is no worker '{worker}'")
        assert search is not None
        if row.state != DryRunState.WAITING or search.state != SearchState.RUNNING or search.held:
            raise LeaseOver(f"the dry run {dry_run} does not wait: it is {row.state}, its search {search.state}")
        if host.left is not None:
            raise Refused(f"the worker {worker} has left")
        busy = _taken(connection, worker)
        if host.devices - busy < row.devices:
            raise Refused(
                f"the worker {worker} has {host.devices - busy} of {host.devices} devices free, not {row.devices}"
            )
        kind = str(host.device.get("name", ""))
        if search.kind != kind:
            raise Refused(f"the search {search.id} needs '{search.kind}', but the worker {worker} has '{kind}'")
        now = self.clock()
        values = {"state": DryRunState.LEASED, "lease": row.lease + 1, "worker": worker, "until": now + seconds}
        same_worker = row.worker == worker and row.until is not None
        more = {"started": now, "attempts": attempts_when_leased(row.attempts, row.lease, same_worker=same_worker)}
        connection.execute(update(dry_runs).where(dry_runs.c.id == dry_run).values(**values, **more))
        self._record_event(connection, dry_run, row.search, row.key, DryRunState.LEASED, worker=worker)
        return Assignment(
            dry_run=dry_run,
            lease=row.lease + 1,
            worker=worker,
            until=now + seconds,
            search=search.id,
            attempt=search.attempt,
            user=search.user,
            request=search.request,
            kind=row.kind,
            payload=row.payload,
            devices=row.devices,
        )

    @beats
    def renew(self, connection: Connection, dry_run: int, lease: int, seconds: float) -> float:
        """Extends a lease to `seconds` from now and returns its new end. An expired lease is revived unless another
        worker has the dry run.

        Raises:
            NotFound: the dry run does not exist.
            LeaseOver: the number is not that of the latest lease, or the dry run has ended, was withdrawn or given
                back.
        """
        row = _leased(connection, dry_run, lease)
        if row.state == DryRunState.WAITING and row.until is None:
            raise LeaseOver(f"the dry run {dry_run} was given back")
        if row.state == DryRunState.DONE:
            raise LeaseOver(f"the dry run {dry_run} has its outcome")
        until = self.clock() + seconds
        values = {"state": DryRunState.LEASED, "until": until}
        connection.execute(update(dry_runs).where(dry_runs.c.id == dry_run).values(**values))
        return until

    @writes
    def answer(self, connection: Connection, dry_run: int, lease: int, outcome: dict[str, Any]) -> DryRun:
        """Stores the outcome of a dry run. A repeated answer changes nothing.

        Raises:
            NotFound: the dry run does not exist.
            LeaseOver: the number is not that of the latest lease, or the dry run was withdrawn.
        """
        row = _leased(connection, dry_run, lease)
        if row.state != DryRunState.DONE:
            self._ended(connection, row, outcome, lease)
        return _get(connection, dry_run)

    @writes
    def give_back(self, connection: Connection, dry_run: int, lease: int) -> None:
        """Returns a dry run to the queue without counting it as lost.

        Raises:
            NotFound: the dry run does not exist.
            LeaseOver: as for `renew`.
        """
        row = _leased(connection, dry_run, lease)
        if row.state == DryRunState.DONE:
            raise LeaseOver(f"the dry run {dry_run} has its outcome")
        if row.state == DryRunState.LEASED:
            self._requeue(connection, row, attempts=row.attempts - 1, until=None)

    def expire(self, *, renewed_after: float = float("-inf"), overdue_s: float = 0.0) -> list[DryRun]:
        """Returns expired dry runs to the queue, or ends them as crashes after `MOST_ATTEMPTS` counted leases.
        Returns these dry runs.

        The table above lists which leases count.

        Args:
            renewed_after: a lease that expires before this time was lost with a server, since the present one could
                not renew it.
            overdue_s: if one lease of a worker has expired, its other leases that expire within this time count as
                expired as well: a live worker renews earlier.
        """
        # Called often and rarely successful: a read first, which does not block writers.
        over = self._expired(overdue_s)
        return self._expire(over, renewed_after) if over else []

    @reads
    def _expired(self, connection: Connection, overdue_s: float) -> dict[int, float]:
        """Returns the dry runs whose worker let a lease expire, with the end of their leases."""
        now = self.clock()
        leased = dry_runs.c.state == DryRunState.LEASED
        silent = select(dry_runs.c.worker).where(leased, dry_runs.c.until < now)
        over = and_(leased, dry_runs.c.worker.in_(silent), dry_runs.c.until < now + overdue_s)
        query = select(dry_runs.c.id, dry_runs.c.until).where(over)
        return {row.id: row.until for row in connection.execute(query.order_by(dry_runs.c.id))}

    @writes
    def _expire(self, connection: Connection, over: dict[int, float], renewed_after: float) -> list[DryRun]:
        rows = [_locked(connection, number) for number in over]
        # The others were renewed or answered just now.
        rows = [row for row in rows if row.state == DryRunState.LEASED and row.until == over[row.id]]
        of_worker = Counter(row.worker for row in rows)
        for row in rows:
            with_server, with_others = row.until < renewed_after, of_worker[row.worker] > 1
            attempts = attempts_when_lost(row.attempts, row.lease, with_server=with_server, with_others=with_others)
            if attempts >= MOST_ATTEMPTS:
                reason = f"{attempts} workers were lost while they ran it: the dry run itself may be the cause"
                self._ended(connection, row, lost_outcome(reason), row.lease + 1)
            else:
                self._requeue(connection, row, attempts=attempts, until=row.until)
        return [_get(connection, row.id) for row in rows]

    def _ended(self, connection: Connection, row: Row[Any], outcome: dict[str, Any], lease: int) -> None:
        now = self.clock()
        values = {"state": DryRunState.DONE, "outcome": outcome, "ended": now, "lease": lease}
        connection.execute(update(dry_runs).where(dry_runs.c.id == row.id).values(**values))
        took = {"finished": searches.c.finished + 1, "seconds": searches.c.seconds + (now - row.started)}
        connection.execute(update(searches).where(searches.c.id == row.search).values(**took))
        self._used(connection, row, now)
        self._record_event(connection, row.id, row.search, row.key, DryRunState.DONE, worker=row.worker)

    def _used(self, connection: Connection, row: Row[Any], now: float) -> None:
        owner = one(connection, select(searches.c.user).where(searches.c.id == row.search))
        assert owner is not None
        add_usage(connection, owner.user, now, row.devices * (now - row.started))

    def _requeue(self, connection: Connection, row: Row[Any], *, attempts: int, until: float | None) -> None:
        """Returns a dry run to the queue. `until` is None if its worker gave it back and so cannot renew the lease."""
        values = {"state": DryRunState.WAITING, "attempts": attempts, "until": until}
        connection.execute(update(dry_runs).where(dry_runs.c.id == row.id).values(**values))
        self._record_event(connection, row.id, row.search, row.key, DryRunState.WAITING, worker=row.worker)

    def _record_event(
        self, connection: Connection, number: int, search: str, key: str, state: DryRunState, **more: Any
    ) -> None:
        add_event(connection, self.clock(), search, "dry_run", {"dry_run": number, "key": key, "state": state, **more})


def lost_outcome(reason: str) -> dict[str, Any]:
    """Returns the outcome of a dry run whose runner was lost repeatedly: a measurement's status and reason."""
    return {"status": "crash", "reason": reason}


def _taken(connection: Connection, worker: str) -> int:
    query = select(func.coalesce(func.sum(dry_runs.c.devices), 0))
    held = and_(dry_runs.c.worker == worker, dry_runs.c.state == DryRunState.LEASED)
    return int(connection.execute(query.where(held)).scalar_one())


def _dry_run(row: Row[Any]) -> DryRun:
    return DryRun(**{**row._mapping, "state": DryRunState(row.state)})


def _get_row(connection: Connection, dry_run: int) -> Row[Any]:
    row = one(connection, select(dry_runs).where(dry_runs.c.id == dry_run))
    if row is None:
        raise NotFound(f"there is no dry run {dry_run}")
    return row


def _get(connection: Connection, dry_run: int) -> DryRun:
    return _dry_run(_get_row(connection, dry_run))


def _locked(connection: Connection, dry_run: int) -> Row[Any]:
    """Returns a dry run locked against changes, together with its search.

    Rows are locked in the same order everywhere, search before dry run before worker, to avoid deadlocks.
    """
    locked(connection, searches, _get_row(connection, dry_run).search)
    row = locked(connection, dry_runs, dry_run)
    assert row is not None
    return row


def _leased(connection: Connection, dry_run: int, lease: int) -> Row[Any]:
    """Returns a dry run as `_locked` does, after checking that `lease` is its latest lease.

    Raises:
        NotFound: the dry run does not exist.
        LeaseOver: it is not.
    """
    row = _locked(connection, dry_run)
    if row.lease != lease:
        raise LeaseOver(f"lease {lease} of the dry run {dry_run} is over: it is {row.state} with the lease {row.lease}")
    return row


class Knowledge(Part):
    """Operations on stored measurements."""

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
        """Stores a measurement. Only the first one of a search and configuration is kept.

        Args:
            fingerprint: digest of everything else that affects the measurement.
            config_id: the configuration's id.
            config: the configuration.
            measurement: its measurement.
            search: id of the search that measured it.
        """
        same = (measured.c.fingerprint == fingerprint, measured.c.config_id == config_id, measured.c.search == search)
        if one(connection, select(measured.c.id).where(*same)):
            return
        values = {"fingerprint": as_text("fingerprint", fingerprint, longest=64, empty=False)}
        values["config_id"] = as_text("config_id", config_id, longest=64, empty=False)
        more = {"config": config, "measurement": measurement, "search": search, "time": self.clock()}
        add(connection, measured, values | more)

    @reads
    def measured(
        self, connection: Connection, fingerprint: str, config_id: str | None = None, *, counts_for: int | None = None
    ) -> list[StoredMeasurement]:
        """Returns the measurements under a fingerprint, in order of arrival.

        Args:
            fingerprint: as for `note_measured`.
            config_id: only those of this configuration; None for all.
            counts_for: only those that the searches of this user may use; None for all.
        """
        query = select(measured).where(measured.c.fingerprint == fingerprint).order_by(measured.c.id)
        if config_id is not None:
            query = query.where(measured.c.config_id == config_id)
        if counts_for is not None:
            query = query.outerjoin(searches, searches.c.id == measured.c.search)
            query = query.where(or_(measured.c.search.is_(None), counting_for(counts_for)))
        return [StoredMeasurement(**each._mapping) for each in connection.execute(query)]
