"""Live events for any number of listeners, read from the database once and sent to each from memory.

A listener that reconnects names the last event it saw. Events that are no longer in memory are read from the database,
so that no listener misses one.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from itertools import takewhile

from ...base.errors import NotFound, ServiceError
from ..records import Event
from ..store import Store

EVERY_S = 0.1
"""Interval between reads of new events, s."""
IDLE_S = 1.0
"""The same while nobody listens, s."""
REMEMBERED = 10_000
"""Number of events in memory."""
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
    text: bytes
    """As sent: a server-sent event (WHATWG HTML, 9.2)."""


def _entry(event: Event) -> _Entry:
    data = json.dumps(asdict(event), separators=(",", ":"))
    return _Entry(event.id, event.search, f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n".encode())


class Feed:
    """The live events of a store. To be used only in the event loop that `run` runs in."""

    def __init__(self, store: Store, every: float = EVERY_S) -> None:
        self._store, self._every = store, every
        self._memory: deque[_Entry] = deque(maxlen=REMEMBERED)
        self._before = 0  # the last event that is not in memory any more
        self._last = 0
        self._changed = asyncio.Event()
        self._stopped = False
        self.listeners = 0
        """Number of open streams."""

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

    async def follow(
        self, allowed: Callable[[], bool], after: int | None, search: str | None = None
    ) -> AsyncIterator[bytes]:
        """Yields events as chunks of a stream.

        Args:
            allowed: called now and then, in a thread; the stream ends when it returns False.
            after: id of the last event seen; None for new events only.
            search: only events of this search; the stream ends when the search has ended.
        """
        self.listeners += 1
        try:
            yield b"retry: 1000\n\n"
            seen, checked, over = None, time.monotonic(), False
            while not self._stopped and not over:
                changed = self._changed
                try:
                    if time.monotonic() - checked > CHECKED_S:
                        if not await asyncio.to_thread(allowed):
                            return
                        checked = time.monotonic()
                    begin = await self._begin(after) if seen is None else seen
                    entries, upto = await self._since(begin, search)
                    if search is not None and (seen is None or entries):
                        over = await asyncio.to_thread(self._is_over, search, upto)
                except ServiceError:  # no event is lost: the read is repeated when the database is back
                    yield b": the database is unavailable\n\n"
                    await asyncio.sleep(IDLE_S)
                    continue
                if entries:
                    yield b"".join(entry.text for entry in entries)
                elif upto == begin and not over and not await self._waited(changed):
                    yield b": nothing new\n\n"
                seen = upto
        finally:
            self.listeners -= 1

    def _is_over(self, search: str, seen: int) -> bool:
        """True if a search was deleted, or has ended and has no events after `seen`."""
        try:
            return self._store.search(search).state.ended and not self._store.events(seen, search=search, limit=1)
        except NotFound:
            return True

    async def _begin(self, after: int | None) -> int:
        """Returns the event that a stream starts after. An id beyond the latest one belongs to another database and
        is replaced by the latest.
        """
        if after is None:
            return self._last
        return after if after <= self._last else min(after, await asyncio.to_thread(self._store.latest))

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
