"""Searches: submitted and changed by users, listed, ended."""

import secrets
import shutil
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, delete, func, insert, or_, select, update

from ...base.errors import KeyTaken, NotFound, Refused, UsageError
from ..records import Search, SearchState, User
from ..tables import events, searches, users
from .part import Part, add_event, locked, one, reads, writes

SAME = ("request", "devices", "device")
"""Fields that must agree between two submissions with the same key."""
_INTERNAL = ("concurrency", "began", "pid", "pid_started", "read")
"""Columns that are not part of a `Search`."""


class Searches(Part):
    """Operations of users on searches."""

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
        most_queued: int | None = None,
    ) -> tuple[Search, bool]:
        """Stores a search, which joins the queue.

        Args:
            user: the owner.
            request: the search's request.
            devices: devices of one trial.
            device: kind of device; empty for any.
            priority: the higher goes first.
            name: given by the owner.
            key: idempotency key, unique per user.
            most_queued: limit of queued searches of this user; None for no limit.

        Returns:
            The search, and whether it is new.

        Raises:
            KeyTaken: the key belongs to another request.
            NotFound: the user does not exist.
            Refused: the user has reached `most_queued`.
        """
        search_id = secrets.token_hex(6)
        values = {
            "id": search_id,
            "user": user.id if isinstance(user, User) else user,
            "key": search_id if key is None else key,
            "name": name,
            "request": request,
            "priority": priority,
            "devices": devices,
            "concurrency": request.get("concurrency"),
            "device": device,
        }
        return self._submit(values, most_queued)

    @writes
    def _submit(self, connection: Connection, values: dict[str, Any], most_queued: int | None) -> tuple[Search, bool]:
        same_key = searches.c.user == values["user"], searches.c.key == values["key"]
        earlier = one(connection, _search_rows().where(*same_key))
        if earlier is not None:
            if different := [name for name in SAME if getattr(earlier, name) != values[name]]:
                raise KeyTaken(
                    f"the key '{values['key']}' belongs to the search {earlier.id}, of which {' and '.join(different)} "
                    f"{'is' if len(different) == 1 else 'are'} different; give another key"
                )
            return _search(earlier), earlier.id == values["id"]
        if one(connection, select(users.c.id).where(users.c.id == values["user"])) is None:
            raise NotFound(f"there is no user {values['user']}")
        _check_queued(connection, values["user"], most_queued)
        now = self.clock()
        initial = {
            "state": SearchState.QUEUED,
            "reason": "",
            "kind": "",
            "uses": 0,
            "created": now,
            "queued": now,
            "attempt": 0,
            "used_s": 0.0,
            "read": 0,
            "trials": 0,
        }
        connection.execute(insert(searches).values(**values, **initial))
        add_event(connection, now, values["id"], "search", {"state": SearchState.QUEUED, "reason": ""})
        return get_search(connection, values["id"]), True

    @reads
    def search(self, connection: Connection, search: str) -> Search:
        """Returns the search of that id.

        Raises:
            NotFound: there is none.
        """
        return get_search(connection, search)

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
        """Returns searches, the newest first.

        Args:
            user: only those of this user; None for all users.
            state: only those in this state; None for any.
            after: only those listed after this search.
            limit: maximum number.

        Raises:
            NotFound: the search `after` does not exist.
        """
        query = _search_rows().order_by(searches.c.created.desc(), searches.c.id.desc()).limit(limit)
        if user is not None:
            query = query.where(searches.c.user == user)
        if state is not None:
            query = query.where(searches.c.state == str(state))
        if after is not None:
            last = get_search(connection, after)
            earlier = and_(searches.c.created == last.created, searches.c.id < last.id)
            # The first condition is redundant, but an index serves it.
            query = query.where(searches.c.created <= last.created, or_(searches.c.created < last.created, earlier))
        return [_search(row) for row in connection.execute(query)]

    @writes
    def cancel(self, connection: Connection, search: str) -> Search:
        """Ends a search. Its process, if it has one, is ended by the server. Does nothing if it has ended.

        Raises:
            NotFound: the search does not exist.
        """
        row = locked_search(connection, search)
        if not SearchState(row.state).ended:
            end_search(connection, search, SearchState.CANCELLED, "", None, self.clock())
        return get_search(connection, search)

    @writes
    def set_priority(self, connection: Connection, search: str, priority: int) -> Search:
        """Changes a search's priority.

        Raises:
            NotFound: the search does not exist.
        """
        locked_search(connection, search)
        connection.execute(update(searches).where(searches.c.id == search).values(priority=priority))
        add_event(connection, self.clock(), search, "changed", {"priority": priority})
        return get_search(connection, search)

    @writes
    def retry(self, connection: Connection, search: str, most_queued: int | None = None) -> Search:
        """Returns a failed or cancelled search to the queue. Its finished trials are not repeated. Does nothing if it is
        queued or running.

        Args:
            most_queued: limit of queued searches of its owner; None for no limit.

        Raises:
            NotFound: the search does not exist.
            UsageError: it is done, or its process has not ended yet.
            Refused: the owner has reached `most_queued`.
        """
        row = locked_search(connection, search)
        if row.state == SearchState.DONE:
            raise UsageError(f"the search {search} is done and cannot be retried: submit it again for another result")
        if SearchState(row.state).ended:
            if row.uses:
                raise UsageError(f"the process of {search} has not ended yet; retry it in a moment")
            _check_queued(connection, row.user, most_queued)
            now = self.clock()
            values = {"state": SearchState.QUEUED, "reason": "", "ended": None, "best": None, "queued": now}
            connection.execute(update(searches).where(searches.c.id == search).values(**values))
            add_event(connection, now, search, "search", {"state": SearchState.QUEUED, "reason": "retried"})
        return get_search(connection, search)

    @writes
    def delete_search(self, connection: Connection, search: str, folder: Path) -> None:
        """Deletes a search that has ended, with its events and its folder.

        Raises:
            NotFound: the search does not exist.
            UsageError: it has not ended, or its process is still ending.
            OSError: the folder cannot be deleted.
        """
        row = locked_search(connection, search)
        if not SearchState(row.state).ended:
            raise UsageError(f"the search {search} is {row.state}: cancel it before it is deleted")
        if row.uses:
            raise UsageError(f"the process of {search} has not ended yet; delete the search in a moment")
        if folder.is_dir():
            shutil.rmtree(folder)
        # `add_event` adds a newer event, so that event numbers keep increasing although the latest may be deleted here.
        connection.execute(delete(events).where(events.c.search == search))
        connection.execute(delete(searches).where(searches.c.id == search))
        add_event(connection, self.clock(), None, "deleted", {"search": search})

    @reads
    def ended_before(self, connection: Connection, before: float, limit: int = 100) -> list[str]:
        """Returns the ids of searches that ended before a time, the earliest first."""
        query = select(searches.c.id).where(searches.c.ended < before).order_by(searches.c.ended).limit(limit)
        return list(connection.execute(query).scalars())


def end_search(
    connection: Connection, search: str, state: SearchState, reason: str, best: dict[str, Any] | None, now: float
) -> None:
    """Records how a search ended."""
    values = {"state": state, "reason": reason, "ended": now, **({} if best is None else {"best": best})}
    connection.execute(update(searches).where(searches.c.id == search).values(**values))
    add_event(connection, now, search, "search", {"state": state, "reason": reason})


def _check_queued(connection: Connection, user: int, most: int | None) -> None:
    """Raises Refused if a user has as many searches queued as this server allows."""
    queued = (searches.c.user == user) & (searches.c.state == SearchState.QUEUED)
    if (
        most is not None
        and connection.execute(select(func.count()).select_from(searches).where(queued)).scalar_one() >= most
    ):
        raise Refused(f"{most} searches are queued, which is this server's limit for a user; wait, or cancel some")


def _search_rows() -> Select[Any]:
    columns = [column for column in searches.c if column.name not in _INTERNAL]
    return select(*columns, users.c.name.label("owner")).join(users, users.c.id == searches.c.user)


def _search(row: Row[Any]) -> Search:
    return Search(**{**row._mapping, "state": SearchState(row.state)})


def get_search(connection: Connection, search: str) -> Search:
    """Returns the search of that id.

    Raises:
        NotFound: there is none.
    """
    row = one(connection, _search_rows().where(searches.c.id == search))
    if row is None:
        raise NotFound(f"there is no search '{search}'")
    return _search(row)


def locked_search(connection: Connection, search: str) -> Row[Any]:
    """Returns the row of a search, locked against changes.

    Raises:
        NotFound: there is none.
    """
    row = locked(connection, searches, search)
    if row is None:
        raise NotFound(f"there is no search '{search}'")
    return row
