"""Live events for any number of listeners, read from the database once and sent to each from memory.

A listener that reconnects names the last event it saw. Events that are no longer in memory are read from the database,
so that no listener misses one.
"""

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import takewhile

from ...base.errors import NotFound, ServiceError
from ..records import ENDED, Event
from ..store import Store
from .problems import Problem

EVERY_S = 0.1
"""Interval between reads of new events, s."""
IDLE_S = 1.0
"""The same while nobody listens, s."""
REMEMBERED = 10_000
"""Number of events in memory."""
MOST_LISTENERS = 2000
MOST_OF_A_USER = 1000
KEEP_ALIVE_S = 15.0
"""A comment is sent after this long without an event, s, to keep proxies from closing the stream and to detect dead
connections.
"""
CHECKED_S = 30.0
"""Interval between checks of a listener's permission, s."""
PAGE = 1000
"""Number of events read at once."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An event in memory."""

    id: int
    search: str | None
    last: bool
    """True if it ends its search, which may be retried later."""
    text: bytes
    """The event as sent."""


def encoded(event: Event) -> bytes:
    """Returns an event in the format of a server-sent event (WHATWG HTML, 9.2)."""
    data = {"id": event.id, "search": event.search, "time": event.time, "kind": event.kind, "data": event.data}
    return f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _entry(event: Event) -> _Entry:
    last = event.kind == "search" and event.data.get("state") in ENDED
    return _Entry(event.id, event.search, last, encoded(event))


class Feed:
    """The live events of a store. To be used only in the event loop that `run` runs in."""

    def __init__(self, store: Store, every: float = EVERY_S) -> None:
        self._store, self._every = store, every
        self._memory: deque[_Entry] = deque(maxlen=REMEMBERED)
        self._before = 0  # the last event that is not in memory any more
        self._last = 0
        self._changed = asyncio.Event()
        self._stopped = False
        self._open: Counter[str] = Counter()
        """Number of open streams of each user."""

    @property
    def listeners(self) -> int:
        """Number of open streams."""
        return self._open.total()

    @property
    def stopped(self) -> bool:
        """True if the server is stopping."""
        return self._stopped

    async def run(self) -> None:
        """Reads new events until `stop`."""
        started = False
        while not self._stopped:
            events: list[Event] = []
            try:
                if not started:
                    self._last = self._before = await asyncio.to_thread(self._store.latest)
                    started = True
                events = await asyncio.to_thread(self._store.events, self._last, limit=PAGE)
            except ServiceError as error:
                _log.warning("events cannot be read: %s", error)
            except Exception:  # the next read may succeed, and without this task no stream has events
                _log.exception("events cannot be read")
            self._take(events)
            if len(events) < PAGE:
                await asyncio.sleep(self._every if self.listeners else min(IDLE_S, 10 * self._every))

    def stop(self) -> None:
        """Ends `run` and every stream."""
        self._stopped = True
        self._changed.set()

    def _take(self, events: list[Event]) -> None:
        if not events:
            return
        for event in events:
            if len(self._memory) == REMEMBERED:
                self._before = self._memory[0].id
            self._memory.append(_entry(event))
        self._last = events[-1].id
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def follow(
        self,
        user: str,
        after: int | None,
        search: str | None = None,
        allowed: Callable[[], bool] = lambda: True,
        hidden: Callable[[set[str]], set[str]] = lambda searches: set(),
    ) -> AsyncIterator[bytes]:
        """Returns events as chunks of a stream.

        Args:
            user: the listener.
            after: id of the last event seen; None for new events only.
            search: only events of this search; the stream ends when the search has ended, or the listener may not see
                it any more.
            allowed: called now and then, in a thread; the stream ends when it returns False.
            hidden: returns those of some searches that the listener may not see; called in a thread.

        Raises:
            Problem: there are too many listeners.
        """
        for count, most, whose in (
            (self.listeners, MOST_LISTENERS, ""),
            (self._open[user], MOST_OF_A_USER, f" of '{user}'"),
        ):
            if count >= most:
                reason = f"{count} event streams{whose} are open, the limit; try again later"
                raise Problem(503, "too_many_listeners", reason)
        return self._stream(user, after, search, allowed, hidden)

    async def _stream(
        self,
        user: str,
        after: int | None,
        search: str | None,
        allowed: Callable[[], bool],
        hidden: Callable[[set[str]], set[str]],
    ) -> AsyncIterator[bytes]:
        self._open[user] += 1
        try:
            yield b"retry: 1000\n\n"
            seen, checked = await self._begin(after), time.monotonic()
            ended, over = search is not None, False
            while not self._stopped:
                changed = self._changed
                try:
                    if time.monotonic() - checked > CHECKED_S:
                        if not await asyncio.to_thread(allowed):
                            return
                        checked = time.monotonic()
                    entries, upto = await self._since(seen, search)
                    read_some = upto != seen
                    if searches := {entry.search for entry in entries if entry.search is not None}:
                        hidden_searches = await asyncio.to_thread(hidden, searches)
                        if search in hidden_searches:
                            return
                        entries = [entry for entry in entries if entry.search not in hidden_searches]
                    if search is not None and (ended or any(entry.last for entry in entries)):
                        ended, over = await asyncio.to_thread(self.ended, search, upto)
                    seen = upto
                except ServiceError:  # no event is lost: the read is repeated when the database is back
                    yield b": the database is unavailable\n\n"
                    await asyncio.sleep(IDLE_S)
                    continue
                if entries:
                    yield b"".join(entry.text for entry in entries)
                if over:
                    return
                if not read_some and not await self._waited(changed):
                    yield b": nothing new\n\n"
        finally:
            self._open -= Counter([user])  # without those at zero

    def ended(self, search: str, seen: int) -> tuple[bool, bool]:
        """Returns whether a search has ended or was deleted, and whether it has no events after `seen` either."""
        try:
            ended = self._store.search(search).state.ended
        except NotFound:
            return True, True
        return ended, ended and not self._store.events(seen, search=search, limit=1)

    async def _begin(self, after: int | None) -> int:
        """Returns the event that a stream starts after. An id beyond the latest one belongs to another database and
        is replaced by the latest.
        """
        if after is None:
            return self._last
        try:
            if after > self._last and after > (newest := await asyncio.to_thread(self._store.latest)):
                return newest
        except ServiceError:  # the id cannot be checked while the database is unavailable
            return self._last
        return after

    async def _since(self, seen: int, search: str | None) -> tuple[list[_Entry], int]:
        """Returns the events after `seen`, and the id up to which these are all. Reads the database if they are no
        longer in memory.
        """
        if seen < self._before:
            before = self._before
            events = await asyncio.to_thread(self._store.events, seen, search=search, limit=PAGE)
            return [_entry(event) for event in events], events[-1].id if len(events) == PAGE else max(
                before, events[-1].id if events else 0
            )
        fresh = list(takewhile(lambda entry: entry.id > seen, reversed(self._memory)))
        upto = fresh[0].id if fresh else seen
        return [entry for entry in reversed(fresh) if search is None or entry.search == search], upto

    async def _waited(self, changed: asyncio.Event) -> bool:
        """Waits for a new event. Returns False after `KEEP_ALIVE_S`."""
        try:
            await asyncio.wait_for(changed.wait(), KEEP_ALIVE_S)
        except TimeoutError:
            return False
        return True
