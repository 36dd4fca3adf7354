"""Events as they happen, for any number of listeners: read from the database once, and handed to each from memory.

A listener who comes back says which event it saw last. What has left the memory by then it gets from the database, so
that nothing is missed, by whom and after whatever.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import takewhile

from ...base.errors import ServiceError
from ..records import Event
from ..store import Store
from .problems import Problem

EVERY_S = 0.1
"""How often the database is asked for what is new."""
IDLE_S = 1.0
"""The same where nobody listens."""
REMEMBERED = 10_000
"""Events in memory."""
MOST_LISTENERS = 2000
KEEP_ALIVE_S = 15.0
"""A comment is sent after so long without an event, so that proxies and dead connections show."""
CHECKED_S = 30.0
"""How often it is asked whether who listens still may, s."""
PAGE = 1000
"""Events that are read at once."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Told:
    """An event in memory."""

    id: int
    search: str | None
    last: bool
    """Whether it is the end of its search."""
    text: bytes
    """As it is sent."""


def told(event: Event) -> bytes:
    """An event as a stream has it (WHATWG HTML, 9.2)."""
    data = {"id": event.id, "search": event.search, "time": event.time, "kind": event.kind, "data": event.data}
    return f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _entry(event: Event) -> _Told:
    last = event.kind == "search" and event.data.get("state") in ("done", "failed", "cancelled")
    return _Told(event.id, event.search, last, told(event))


class Feed:
    """The events of a store. All of it is used in the event loop that `run` runs in.

    Args:
        store: where they are.
        every: s between two looks.
    """

    def __init__(self, store: Store, every: float = EVERY_S) -> None:
        self._store, self._every = store, every
        self._memory: deque[_Told] = deque(maxlen=REMEMBERED)
        self._before = 0  # the last event that is not in memory any more
        self._last = 0
        self._changed = asyncio.Event()
        self._stopped = False
        self.listeners = 0
        """How many there are."""

    @property
    def stopped(self) -> bool:
        """Whether this server is about to end."""
        return self._stopped

    async def run(self) -> None:
        """Reads what is new until `stop`."""
        begun = False
        while not self._stopped:
            found: list[Event] = []
            try:
                if not begun:
                    self._last = self._before = await asyncio.to_thread(self._store.latest)
                    begun = True
                found = await asyncio.to_thread(self._store.events, self._last, limit=PAGE)
            except ServiceError as error:
                _log.warning("events cannot be read: %s", error)
            self._take(found)
            if len(found) < PAGE:
                await asyncio.sleep(self._every if self.listeners else min(IDLE_S, 10 * self._every))

    def stop(self) -> None:
        """Ends `run` and every stream."""
        self._stopped = True
        self._changed.set()

    def _take(self, found: list[Event]) -> None:
        if not found:
            return
        for event in found:
            if len(self._memory) == REMEMBERED:
                self._before = self._memory[0].id
            self._memory.append(_entry(event))
        self._last = found[-1].id
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(
        self,
        after: int | None,
        search: str | None = None,
        allowed: Callable[[], bool] = lambda: True,
        hidden: Callable[[set[str]], set[str]] = lambda searches: set(),
    ) -> AsyncIterator[bytes]:
        """What happens, as chunks of a stream.

        Args:
            after: the event that was seen last; None for what happens from now on.
            search: only what happens to it; the stream ends when it does.
            allowed: asked now and then, in a thread, whether who listens still may; the stream ends when not.
            hidden: which of some searches who listens does not see; asked in a thread.

        Raises:
            Problem: there are too many listeners.
        """
        if self.listeners >= MOST_LISTENERS:
            raise Problem(503, "too_many_listeners", f"{MOST_LISTENERS} streams are open; come again later")
        self.listeners += 1
        try:
            yield b"retry: 1000\n\n"
            seen, checked = await self._begin(after), time.monotonic()
            while not self._stopped:
                changed = self._changed
                try:
                    if time.monotonic() - checked > CHECKED_S:
                        if not await asyncio.to_thread(allowed):
                            return
                        checked = time.monotonic()
                    found, seen = await self._since(seen, search)
                    if others := {each.search for each in found if each.search not in (None, search)}:
                        out = await asyncio.to_thread(hidden, {each for each in others if each is not None})
                        found = [each for each in found if each.search not in out] if out else found
                except ServiceError:  # it is missed by nobody: it is read when the database is back
                    yield b": the database is away\n\n"
                    await asyncio.sleep(IDLE_S)
                    continue
                if found:
                    yield b"".join(each.text for each in found)
                    if search is not None and any(each.last for each in found):
                        return
                elif not await self._waited(changed):
                    yield b": nothing new\n\n"
        finally:
            self.listeners -= 1

    async def _begin(self, after: int | None) -> int:
        """Where a stream begins; an event that is still to come is one of another database."""
        if after is None:
            return self._last
        try:
            if after > self._last and after > (newest := await asyncio.to_thread(self._store.latest)):
                return newest
        except ServiceError:  # as of an id that is to come, once the database is back
            return self._last
        return after

    async def _since(self, seen: int, search: str | None) -> tuple[list[_Told], int]:
        """What came after an event, and up to where that is all; from the database where it has left the memory."""
        if seen < self._before:
            before = self._before
            events = await asyncio.to_thread(self._store.events, seen, search=search, limit=PAGE)
            return [_entry(event) for event in events], events[-1].id if len(events) == PAGE else max(
                before, events[-1].id if events else 0
            )
        fresh = list(takewhile(lambda each: each.id > seen, reversed(self._memory)))
        last = fresh[0].id if fresh else seen
        return [each for each in reversed(fresh) if search is None or each.search == search], last

    async def _waited(self, changed: asyncio.Event) -> bool:
        """Waits for something new; whether it came in time."""
        try:
            await asyncio.wait_for(changed.wait(), KEEP_ALIVE_S)
        except TimeoutError:
            return False
        return True
