"""Searches: submitted, taken up by a searcher, ended. A later attempt at a search fences off the earlier one."""

from typing import Any

from sqlalchemy import Connection, Row, Select, and_, func, insert, or_, select, update

from ...errors import AttemptOver, KeyTaken, NotFound, Refused, UsageError
from ..records import DryRunState, Search, SearchState, User
from ..tables import dry_runs, searches, users
from .part import Part, as_count, as_text, beats, locked, new_id, one, reads, tell, writes

MOST_PRIORITY = 100
"""Priorities are from minus this to this."""
SAME = ("request", "devices", "device")
"""What a key stands for: another of these under it is another search."""


class Searches(Part):
    """What is searched."""

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
        most_queued: int | None = None,
    ) -> tuple[Search, bool]:
        """Records a search, to be taken up by a searcher.

        Args:
            user: whose it is.
            request: what is searched.
            devices: devices of one dry run.
            device: kind of device; empty for any.
            priority: the higher goes first.
            name: what its owner calls it.
            key: the same key of the same user is the same search.
            reuse: whether measured configurations may be answered from the store.
            most_queued: of this user; None for any number.

        Returns:
            The search, and whether it is new.

        Raises:
            KeyTaken: the key stands for another request.
            UsageError: a value is none that can be kept.
            NotFound: there is no such user.
            Refused: they have as many searches queued as they may.
        """
        made = new_id()
        values = {
            "id": made,
            "user": user.id if isinstance(user, User) else user,
            "key": made if key is None else as_text("key", key, empty=False),
            "name": as_text("name", name),
            "request": request,
            "priority": as_count("priority", priority, least=-MOST_PRIORITY, most=MOST_PRIORITY),
            "devices": as_count("devices", devices, least=1),
            "device": as_text("device", device),
            "reuse": bool(reuse),
        }
        return self._submit(values, most_queued)

    @writes
    def _submit(self, connection: Connection, values: dict[str, Any], most_queued: int | None) -> tuple[Search, bool]:
        known = one(connection, _search_rows().where(_keyed(values["user"], values["key"])))
        if known is not None:
            # What devices it came to is written where it first runs; what was asked for then is not known any more.
            same = all(getattr(known, each) == values[each] or (each == "device" and not values[each]) for each in SAME)
            if not same:
                raise KeyTaken(
                    f"the key '{values['key']}' stands for the search {known.id}, which asks for something else; "
                    "give another key"
                )
            return _search(known), known.id == values["id"]
        if one(connection, select(users.c.id).where(users.c.id == values["user"])) is None:
            raise NotFound(f"there is no user {values['user']}")
        if most_queued is not None and _queued_by(connection, values["user"]) >= most_queued:
            raise Refused(
                f"you have {most_queued} searches queued, as many as a user of this server may; wait, or cancel some"
            )
        now = self.clock()
        begun = {"state": SearchState.QUEUED, "reason": "", "created": now, "attempt": 0, "finished": 0, "seconds": 0.0}
        connection.execute(insert(searches).values(**values, **begun))
        tell(connection, now, values["id"], "search", {"state": SearchState.QUEUED, "reason": ""})
        return _get(connection, values["id"]), True

    @reads
    def search(self, connection: Connection, search: str) -> Search:
        """The search of that id.

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
    ) -> list[Search]:
        """Searches, the latest first.

        Args:
            user: whose; None for everybody's.
            state: in which state; None for any.
            after: go on below this search.
            limit: how many at most.

        Raises:
            NotFound: there is no search `after`.
        """
        query = _search_rows().order_by(searches.c.created.desc(), searches.c.id.desc()).limit(limit)
        if user is not None:
            query = query.where(searches.c.user == user)
        if state is not None:
            query = query.where(searches.c.state == str(state))
        if after is not None:
            last = _get(connection, after)
            earlier = and_(searches.c.created == last.created, searches.c.id < last.id)
            query = query.where(or_(searches.c.created < last.created, earlier))
        return [_search(each) for each in connection.execute(query)]

    @writes
    def cancel(self, connection: Connection, search: str) -> Search:
        """Ends a search: nothing of it starts any more, and what runs is withdrawn. One that has ended stays as it is.

        Raises:
            NotFound: there is no such search.
        """
        row = _locked(connection, search)
        if SearchState(row.state).ended:
            return _get(connection, search)
        return self._end(connection, search, SearchState.CANCELLED, "cancelled", None)

    @writes
    def take_search(self, connection: Connection, search: str) -> int:
        """The number of a new attempt at a search, which is running from now on; every earlier attempt is over.

        Raises:
            NotFound: there is no such search.
            AttemptOver: it has ended.
        """
        row = _locked(connection, search)
        if SearchState(row.state).ended:
            raise AttemptOver(f"the search {search} has ended: it is {row.state}")
        now = self.clock()
        values = {"state": SearchState.RUNNING, "attempt": row.attempt + 1, "heartbeat": now, "reason": ""}
        started = now if row.started is None else row.started
        connection.execute(update(searches).where(searches.c.id == search).values(**values, started=started))
        tell(
            connection, now, search, "search", {"state": SearchState.RUNNING, "attempt": row.attempt + 1, "reason": ""}
        )
        return row.attempt + 1

    @beats
    def beat_search(self, connection: Connection, search: str, attempt: int) -> Search:
        """Records that an attempt's searcher lives; the search, whose state says whether it was cancelled.

        Raises:
            NotFound: there is no such search.
            AttemptOver: a later attempt has it.
        """
        row = _locked(connection, search)
        check_attempt(row, attempt)
        if not SearchState(row.state).ended:
            connection.execute(update(searches).where(searches.c.id == search).values(heartbeat=self.clock()))
        return _get(connection, search)

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
        """Records how a search ended. One that was cancelled stays cancelled, and keeps the best that it had.

        Raises:
            NotFound: there is no such search.
            AttemptOver: a later attempt has it.
            UsageError: `state` is none in which a search has ended.
        """
        if not SearchState(state).ended:
            raise UsageError(f"a search does not end as {state}; give done, failed or cancelled")
        row = _locked(connection, search)
        check_attempt(row, attempt)
        if row.state == SearchState.CANCELLED:
            if best is not None:
                connection.execute(update(searches).where(searches.c.id == search).values(best=best))
            return _get(connection, search)
        if row.state == str(state):  # told again, as its answer was lost
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
        over = {"state": DryRunState.WITHDRAWN, "lease": dry_runs.c.lease + 1, "ended": now}
        connection.execute(update(dry_runs).where(open_ones).values(**over))
        tell(connection, now, search, "search", {"state": state, "reason": reason})
        return _get(connection, search)


def _queued_by(connection: Connection, user: int) -> int:
    mine = and_(searches.c.user == user, searches.c.state == SearchState.QUEUED)
    return int(connection.execute(select(func.count()).select_from(searches).where(mine)).scalar_one())


def check_attempt(row: Row[Any], attempt: int) -> None:
    """Whether a search's attempt is the latest.

    Raises:
        AttemptOver: it is not.
    """
    if row.attempt != attempt:
        raise AttemptOver(f"attempt {attempt} at the search {row.id} is over: attempt {row.attempt} has it")


def _search_rows() -> Select[Any]:
    columns = [each for each in searches.c if each.name not in ("finished", "seconds")]
    return select(*columns, users.c.name.label("owner")).join(users, users.c.id == searches.c.user)


def _keyed(user: int, key: str) -> Any:
    return and_(searches.c.user == user, searches.c.key == key)


def _search(row: Row[Any]) -> Search:
    return Search(**{**row._mapping, "state": SearchState(row.state)})


def _get(connection: Connection, search: str) -> Search:
    found = one(connection, _search_rows().where(searches.c.id == search))
    if found is None:
        raise NotFound(f"there is no search '{search}'")
    return _search(found)


def _locked(connection: Connection, search: str) -> Row[Any]:
    found = locked(connection, searches, search)
    if found is None:
        raise NotFound(f"there is no search '{search}'")
    return found
