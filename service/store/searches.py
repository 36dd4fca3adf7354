"""Searches: submitted, taken up by a searcher, ended. A later attempt at a search fences off the earlier one."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, case, delete, func, insert, or_, select, update

from ...base.errors import AttemptOver, KeyTaken, NotFound, Refused, UsageError, unknown
from ..records import MOST_PRIORITY, VISIBILITIES, DryRunState, Role, Search, SearchState, User
from ..tables import dry_runs, events, measured, searches, users
from .part import Part, add_event, add_usage, as_count, as_text, locked, new_id, one, reads, writes

SAME = ("request", "devices", "device", "visibility", "reuse")
"""Fields that must agree between two submissions with the same key."""
SIMULATE = "simulate"
"""The runner of a search that needs no devices."""
_INTERNAL = ("finished", "seconds")
"""Columns that are not part of a record."""


class Searches(Part):
    """Operations on searches."""

    def submit(
        self,
        user: int | User,
        request: dict[str, Any],
        *,
        devices: int,
        device: str = "",
        priority: int = 0,
        name: str = "",
        key: str | None = None,
        reuse: bool = False,
        visibility: str = "all",
        most_queued: int | None = None,
    ) -> tuple[Search, bool]:
        """Stores a search, to be taken up by a searcher.

        Args:
            user: the owner.
            request: the search's request.
            devices: devices of one dry run.
            device: kind of device; empty for any.
            priority: the higher goes first.
            name: given by the owner.
            key: idempotency key, unique per user.
            reuse: whether stored measurements may answer its dry runs.
            visibility: one of `VISIBILITIES`.
            most_queued: limit of queued searches of this user; None for no limit.

        Returns:
            The search, and whether it is new.

        Raises:
            KeyTaken: the key belongs to another request.
            UsageError: a value is invalid.
            NotFound: the user does not exist.
            Refused: the user has reached `most_queued`.
        """
        number = new_id()
        values = {
            "id": number,
            "user": user.id if isinstance(user, User) else user,
            "key": number if key is None else as_text("key", key, empty=False),
            "name": as_text("name", name),
            "request": request,
            "priority": as_count("priority", priority, least=-MOST_PRIORITY, most=MOST_PRIORITY),
            "devices": as_count("devices", devices, least=1),
            "device": as_text("device", device),
            "reuse": bool(reuse),
            "visibility": _visibility(visibility),
            "simulated": request.get("runner") == SIMULATE,
        }
        return self._submit(values, most_queued)

    @writes
    def _submit(self, connection: Connection, values: dict[str, Any], most_queued: int | None) -> tuple[Search, bool]:
        own = searches.c.user == values["user"]
        known = one(connection, _search_rows().where(own, searches.c.key == values["key"]))
        if known is not None:
            if other := [each for each in SAME if getattr(known, each) != values[each]]:
                raise KeyTaken(
                    f"the key '{values['key']}' belongs to the search {known.id}, of which {' and '.join(other)} "
                    f"{'is' if len(other) == 1 else 'are'} different; give another key"
                )
            return _search(known), known.id == values["id"]
        if one(connection, select(users.c.id).where(users.c.id == values["user"])) is None:
            raise NotFound(f"there is no user {values['user']}")
        _check_queued(connection, values["user"], most_queued)
        now = self.clock()
        initial = {
            "state": SearchState.QUEUED,
            "reason": "",
            "created": now,
            "attempt": 0,
            "finished": 0,
            "seconds": 0.0,
            "trials": 0,
            "kind": "",
            "held": False,
        }
        connection.execute(insert(searches).values(**values, **initial))
        add_event(connection, now, values["id"], "search", {"state": SearchState.QUEUED, "reason": ""})
        return _get(connection, values["id"]), True

    @reads
    def search(self, connection: Connection, search: str) -> Search:
        """Returns the search of that id.

        Raises:
            NotFound: there is none.
        """
        return _get(connection, search)

    @reads
    def searches(
        self,
        connection: Connection,
        *,
        user: int | None = None,
        state: SearchState | str | None = None,
        after: str | None = None,
        limit: int = 100,
        seen_by: User | None = None,
        counts_for: int | None = None,
    ) -> list[Search]:
        """Returns searches, the newest first.

        Args:
            user: only those of this user; None for all users.
            seen_by: only those visible to this user; None for all.
            counts_for: only those that the searches of this user may learn from and name; None for all.
            state: only those in this state; None for any.
            after: only those listed after this search.
            limit: maximum number.

        Raises:
            NotFound: the search `after` does not exist.
        """
        query = _search_rows().order_by(searches.c.created.desc(), searches.c.id.desc()).limit(limit)
        if user is not None:
            query = query.where(searches.c.user == user)
        if seen_by is not None and seen_by.role != Role.ADMIN:
            query = query.where(_shown_to(seen_by))
        if counts_for is not None:
            query = query.where(counting_for(counts_for))
        if state is not None:
            query = query.where(searches.c.state == str(state))
        if after is not None:
            last = _get(connection, after)
            earlier = and_(searches.c.created == last.created, searches.c.id < last.id)
            # The first condition is redundant, but an index serves it.
            query = query.where(searches.c.created <= last.created, or_(searches.c.created < last.created, earlier))
        return [_search(each) for each in connection.execute(query)]

    @reads
    def sees(self, connection: Connection, user: User, search: str) -> bool:
        """True if a search is visible to a user."""
        if user.role == Role.ADMIN:
            return True
        query = select(searches.c.id).join(users, users.c.id == searches.c.user)
        return one(connection, query.where(searches.c.id == search, _shown_to(user))) is not None

    @reads
    def hidden_from(self, connection: Connection, user: User, found: Iterable[str]) -> set[str]:
        """Returns those of these searches that are not visible to a user. Deleted ones are visible to admins only."""
        if user.role == Role.ADMIN:
            return set()
        given = set(found)
        query = select(searches.c.id).join(users, users.c.id == searches.c.user)
        query = query.where(searches.c.id.in_(given), _shown_to(user))
        return given - set(connection.execute(query).scalars())

    @writes
    def cancel(self, connection: Connection, search: str) -> Search:
        """Ends a search: its waiting and running dry runs are withdrawn. Does nothing if it has ended.

        Raises:
            NotFound: the search does not exist.
        """
        row = locked_search(connection, search)
        if SearchState(row.state).ended:
            return _get(connection, search)
        return self._end(connection, search, SearchState.CANCELLED, "cancelled", None)

    @writes
    def take_search(self, connection: Connection, search: str) -> int:
        """Begins an attempt at a search and returns its number. The search is running, and all earlier attempts are
        over.

        Raises:
            NotFound: the search does not exist.
            AttemptOver: it has ended.
        """
        row = locked_search(connection, search)
        if SearchState(row.state).ended:
            raise AttemptOver(f"the search {search} has ended: it is {row.state}")
        now = self.clock()
        if row.held:
            raise AttemptOver(f"the search {search} is held")
        values = {"state": SearchState.RUNNING, "attempt": row.attempt + 1, "reason": ""}
        started = now if row.started is None else row.started
        connection.execute(update(searches).where(searches.c.id == search).values(**values, started=started))
        add_event(
            connection, now, search, "search", {"state": SearchState.RUNNING, "attempt": row.attempt + 1, "reason": ""}
        )
        return row.attempt + 1

    @writes
    def place_search(
        self, connection: Connection, search: str, attempt: int, kind: str, placed: dict[str, Any]
    ) -> None:
        """Fixes the kind of device that a search runs on, and records the event `placed`.

        Raises:
            NotFound: the search does not exist.
            AttemptOver: it has ended, or a later attempt has it.
        """
        row = locked_search(connection, search)
        check_attempt(row, attempt)
        if SearchState(row.state).ended:
            raise AttemptOver(f"the search {search} has ended: it is {row.state}")
        connection.execute(update(searches).where(searches.c.id == search).values(kind=as_text("kind", kind)))
        add_event(connection, self.clock(), search, "placed", placed)

    @writes
    def put_back(self, connection: Connection, search: str, reason: str) -> bool:
        """Returns a running search that cannot run to the queue, which frees its slot and ends its attempt. Its
        results are kept.

        Returns:
            False if it does not run any more, or a worker has a dry run of it, which is never interrupted.

        Raises:
            NotFound: the search does not exist.
        """
        row = locked_search(connection, search)
        leased = select(dry_runs.c.id).where(dry_runs.c.search == search, dry_runs.c.state == DryRunState.LEASED)
        if row.state != SearchState.RUNNING or one(connection, leased.limit(1)) is not None:
            return False
        values = {"state": SearchState.QUEUED, "attempt": row.attempt + 1}
        connection.execute(update(searches).where(searches.c.id == search).values(**values))
        add_event(connection, self.clock(), search, "search", {"state": SearchState.QUEUED, "reason": reason})
        return True

    @writes
    def hold(self, connection: Connection, search: str, held: bool = True) -> Search:
        """Holds or releases a search. While it is held, leased dry runs finish and nothing else starts. Does nothing
        if it has ended.

        Raises:
            NotFound: the search does not exist.
        """
        row = locked_search(connection, search)
        if not SearchState(row.state).ended and row.held != held:
            connection.execute(update(searches).where(searches.c.id == search).values(held=held))
            add_event(connection, self.clock(), search, "held" if held else "released", {})
        return _get(connection, search)

    @writes
    def change_search(
        self, connection: Connection, search: str, *, priority: int | None = None, visibility: str | None = None
    ) -> Search:
        """Changes a search's priority or visibility.

        Raises:
            NotFound: the search does not exist.
            UsageError: a value is invalid.
        """
        locked_search(connection, search)
        values: dict[str, Any] = {}
        if priority is not None:
            values["priority"] = as_count("priority", priority, least=-MOST_PRIORITY, most=MOST_PRIORITY)
        if visibility is not None:
            values["visibility"] = _visibility(visibility)
        if values:
            connection.execute(update(searches).where(searches.c.id == search).values(**values))
            add_event(connection, self.clock(), search, "changed", values)
        return _get(connection, search)

    @writes
    def retry(self, connection: Connection, search: str, most_queued: int | None = None) -> Search:
        """Returns a failed or cancelled search to the queue. Its finished dry runs are not repeated, and its
        earlier attempt is over. Does nothing if it is queued or running.

        Args:
            most_queued: limit of queued searches of its owner; None for no limit.

        Raises:
            NotFound: the search does not exist.
            UsageError: it is done.
            Refused: the owner has reached `most_queued`.
        """
        row = locked_search(connection, search)
        if row.state == SearchState.DONE:
            raise UsageError(f"the search {search} is done and cannot be retried: submit it again for another result")
        if SearchState(row.state).ended:
            _check_queued(connection, row.user, most_queued)
            values = {
                "state": SearchState.QUEUED,
                "reason": "",
                "ended": None,
                "best": None,
                "attempt": row.attempt + 1,
            }
            connection.execute(update(searches).where(searches.c.id == search).values(**values))
            add_event(connection, self.clock(), search, "search", {"state": SearchState.QUEUED, "reason": "retried"})
        return _get(connection, search)

    @writes
    def delete_search(self, connection: Connection, search: str) -> None:
        """Deletes a search that has ended, with its dry runs and events. Its measurements are kept for other searches
        if it was visible to all.

        Raises:
            NotFound: the search does not exist.
            UsageError: it has not ended.
        """
        row = locked_search(connection, search)
        check_ended(search, row.state)
        # `add_event` below adds a newer event, so that event numbers keep increasing although the latest may be deleted here.
        connection.execute(delete(events).where(events.c.search == search))
        public = row.visibility == "all"
        if public:
            connection.execute(update(measured).where(measured.c.search == search).values(search=None))
        else:
            connection.execute(delete(measured).where(measured.c.search == search))
        connection.execute(delete(dry_runs).where(dry_runs.c.search == search))
        connection.execute(delete(searches).where(searches.c.id == search))
        add_event(connection, self.clock(), None, "deleted", {"search": search} if public else {})

    @reads
    def ended_before(self, connection: Connection, before: float, limit: int = 100) -> list[str]:
        """Returns the ids of searches that ended before a time, the earliest first."""
        query = select(searches.c.id).where(searches.c.ended < before).order_by(searches.c.ended).limit(limit)
        return list(connection.execute(query).scalars())

    @writes
    def tell_trial(self, connection: Connection, search: str, attempt: int, trials: int, data: dict[str, Any]) -> None:
        """Records the event `finished` of a trial, and the number of finished trials.

        Raises:
            NotFound: the search does not exist.
            AttemptOver: a later attempt has it.
        """
        check_attempt(locked_search(connection, search), attempt)
        connection.execute(update(searches).where(searches.c.id == search).values(trials=trials))
        add_event(connection, self.clock(), search, "finished", data)

    @reads
    def attempted_search(self, connection: Connection, search: str, attempt: int) -> Search:
        """Returns a search for an attempt at it. Its state shows if it was cancelled.

        Raises:
            NotFound: the search does not exist.
            AttemptOver: a later attempt has it.
        """
        found = _get(connection, search)
        check_attempt(found, attempt)
        return found

    @writes
    def finish(
        self,
        connection: Connection,
        search: str,
        attempt: int,
        state: SearchState | str,
        reason: str = "",
        best: dict[str, Any] | None = None,
    ) -> Search:
        """Records how a search ended. A cancelled search stays cancelled and gets the best so far.

        Raises:
            NotFound: the search does not exist.
            AttemptOver: a later attempt has it.
            UsageError: `state` is not a final state.
        """
        if not SearchState(state).ended:
            raise UsageError(f"{state} is not a final state; give done, failed or cancelled")
        row = locked_search(connection, search)
        check_attempt(row, attempt)
        if row.state == SearchState.CANCELLED:
            if best is not None:
                connection.execute(update(searches).where(searches.c.id == search).values(best=best))
            return _get(connection, search)
        if row.state == str(state):  # repeated, because its answer was lost
            return _get(connection, search)
        return self._end(connection, search, SearchState(state), reason, best)

    def _end(
        self, connection: Connection, search: str, state: SearchState, reason: str, best: dict[str, Any] | None
    ) -> Search:
        now = self.clock()
        values = {"state": state, "reason": reason, "ended": now}
        connection.execute(
            update(searches).where(searches.c.id == search).values(**values, **({} if best is None else {"best": best}))
        )
        open_ones = and_(dry_runs.c.search == search, dry_runs.c.state.in_(["waiting", "leased"]))
        # A waiting one may have had a lease that was lost: it has used no device since then.
        started = case((dry_runs.c.state == DryRunState.LEASED, dry_runs.c.started), else_=None)
        over = {"state": DryRunState.WITHDRAWN, "lease": dry_runs.c.lease + 1, "started": started, "ended": now}
        row = one(connection, select(searches.c.user).where(searches.c.id == search))
        assert row is not None
        leased = and_(dry_runs.c.search == search, dry_runs.c.state == DryRunState.LEASED)
        device_seconds = select(func.sum(dry_runs.c.devices * (now - dry_runs.c.started))).where(leased)
        add_usage(connection, row.user, now, connection.execute(device_seconds).scalar() or 0.0)
        connection.execute(update(dry_runs).where(open_ones).values(**over))
        add_event(connection, now, search, "search", {"state": state, "reason": reason})
        return _get(connection, search)


def check_ended(search: str, state: str) -> None:
    """Checks that a search in this state may be deleted.

    Raises:
        UsageError: it has not ended.
    """
    if not SearchState(state).ended:
        raise UsageError(f"the search {search} is {state}: cancel it before it is deleted")


def check_attempt(row: Row[Any] | Search, attempt: int) -> None:
    """Checks that `attempt` is the latest one.

    Raises:
        AttemptOver: it is not.
    """
    if row.attempt != attempt:
        raise AttemptOver(f"attempt {attempt} at the search {row.id} is over: the latest is {row.attempt}")


def counting_for(user: int) -> Any:
    """Returns the condition that the searches of a user may learn from a search and name it: it is theirs, or visible
    to all.
    """
    return or_(searches.c.user == user, searches.c.visibility == "all")


def _shown_to(user: User) -> Any:
    """Returns the condition that a search is visible to a user. The query must join the search's owner."""
    shown = [searches.c.visibility == "all", searches.c.user == user.id]
    if user.team:
        shown.append(and_(searches.c.visibility == "team", users.c.team == user.team))
    return or_(*shown)


def _check_queued(connection: Connection, user: int, most: int | None) -> None:
    """Raises Refused if a user has as many searches queued as this server allows."""
    own = (searches.c.user == user) & (searches.c.state == SearchState.QUEUED)
    if (
        most is not None
        and connection.execute(select(func.count()).select_from(searches).where(own)).scalar_one() >= most
    ):
        raise Refused(f"{most} searches are queued, which is this server's limit for a user; wait, or cancel some")


def _visibility(value: str) -> str:
    if value not in VISIBILITIES:
        raise UsageError(unknown("visibility", value, VISIBILITIES))
    return value


def _search_rows() -> Select[Any]:
    columns = [each for each in searches.c if each.name not in _INTERNAL]
    return select(*columns, users.c.name.label("owner")).join(users, users.c.id == searches.c.user)


def _search(row: Row[Any]) -> Search:
    return Search(**{**row._mapping, "state": SearchState(row.state)})


def _get(connection: Connection, search: str) -> Search:
    found = one(connection, _search_rows().where(searches.c.id == search))
    if found is None:
        raise NotFound(f"there is no search '{search}'")
    return _search(found)


def locked_search(connection: Connection, search: str) -> Row[Any]:
    """Returns the row of a search, locked against changes.

    Raises:
        NotFound: there is none.
    """
    found = locked(connection, searches, search)
    if found is None:
        raise NotFound(f"there is no search '{search}'")
    return found
