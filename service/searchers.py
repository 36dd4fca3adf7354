"""The searchers of a server: a process for each running search, started anew when it dies."""

import logging
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ..errors import NotFound, StorageUnavailable
from .placing import obstacle
from .records import Search, SearchState
from .searcher import FROM_STDIN
from .store import Store

MOST = 8
"""Searches that run at once; the others are queued. Each takes a process with its imports, about half a GiB."""
LOOK_S = 0.5
"""How often it is looked after them, s."""
LIVED_S = 30.0
"""A searcher that lived so long before it died counts as one that works."""
MOST_DEATHS = 8
"""How often one dies in a row, each time sooner than that, before its search has failed."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""How long it is waited before a searcher is started again, s: at first, and after many deaths."""
END_S = 5.0
"""How long searchers may take to end, s."""
LAST_WORDS = 2000
"""Characters of what a searcher printed last that are told."""
_EVERYTHING = 1_000_000

_log = logging.getLogger("redline.searchers")


@dataclass
class _Child:
    """The process of a search."""

    process: subprocess.Popen[bytes] | None = None
    printed: IO[bytes] | None = None
    began: float = 0.0
    deaths: int = 0
    again_at: float = 0.0
    """When it is started again, on the monotonic clock."""


@dataclass
class Searchers:
    """Has a process search for every running search, and begins with queued ones while there are not too many."""

    store: Store
    """The service's."""
    url: str
    """Of its database."""
    data: Path
    """The server's data."""
    most: int = MOST
    """Searches that run at once."""
    program: tuple[str, ...] = ("-m", "redline.service.searcher")
    """What Python runs for a search."""
    _children: dict[str, _Child] = field(default_factory=dict, init=False)
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self) -> None:
        """Looks after them from now on, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="searchers")
        self._thread.start()

    def close(self) -> None:
        """Ends the processes; their searches stay as they are, and go on with the next server."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        living = [each.process for each in self._children.values() if each.process is not None]
        for process in living:
            process.terminate()
        until = time.monotonic() + END_S
        for process in living:
            try:
                process.wait(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._children.clear()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.look()
            except StorageUnavailable as error:
                _log.warning("searches are not looked after at the moment: %s", error)
            self._stopping.wait(LOOK_S)

    def look(self) -> None:
        """Looks after them once."""
        running = {each.id: each for each in self.store.searches(state=SearchState.RUNNING, limit=_EVERYTHING)}
        now = time.monotonic()
        for name, child in list(self._children.items()):
            self._look_at(name, child, now)
        room = self.most - len(self._children)
        for search in running.values():
            if search.id not in self._children:  # of a server before this one
                self._children[search.id] = _Child()
        if room > 0:
            for search in self._queued()[:room]:
                self._children.setdefault(search.id, _Child())
        for name, child in self._children.items():
            if child.process is None and now >= child.again_at:
                self._begin(name, child)

    def _queued(self) -> list[Search]:
        """The queued searches that can run on what is there, in their order."""
        queued = self.store.searches(state=SearchState.QUEUED, limit=_EVERYTHING)
        if not queued:
            return []
        workers = self.store.workers()
        able = [each for each in queued if each.id not in self._children and not obstacle(each, workers)]
        return sorted(able, key=lambda search: (-search.priority, search.created, search.id))

    def _look_at(self, search: str, child: _Child, now: float) -> None:
        if child.process is None or (code := child.process.poll()) is None:
            return
        words = _last_words(child)
        child.process = None
        if self.store.search(search).state.ended:
            del self._children[search]
            return
        child.deaths = 1 if now - child.began > LIVED_S else child.deaths + 1
        _log.warning("the searcher of %s ended with %d: %s", search, code, words)
        if child.deaths >= MOST_DEATHS:
            self._give_up(search, code, words)
            del self._children[search]
            return
        child.again_at = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (child.deaths - 1))

    def _begin(self, search: str, child: _Child) -> None:
        child.printed = tempfile.TemporaryFile()  # noqa: SIM115
        child.began = time.monotonic()
        child.process = subprocess.Popen(
            [
                sys.executable,
                *self.program,
                "--storage",
                FROM_STDIN,
                "--data",
                str(self.data),
                search,
            ],
            stdin=subprocess.PIPE,
            stdout=child.printed,
            stderr=child.printed,
        )
        assert child.process.stdin is not None
        try:
            # It stays open as long as this process lives: by its end the searcher knows of ours.
            child.process.stdin.write(f"{self.url}\n".encode())
            child.process.stdin.flush()
        except BrokenPipeError:  # it died at once, which is seen next time
            return

    def _give_up(self, search: str, code: int, words: str) -> None:
        try:
            attempt = self.store.take_search(search)
            reason = f"its searcher died {MOST_DEATHS} times in a row, at last with {code}: {words}"
            self.store.finish(search, attempt, SearchState.FAILED, reason)
        except NotFound:
            return


def _last_words(child: _Child) -> str:
    """What it printed last, and lets go of that."""
    if child.process is not None and child.process.stdin is not None:
        child.process.stdin.close()
    if child.printed is None:
        return ""
    with child.printed as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LAST_WORDS))
        return file.read().decode("utf-8", "replace").strip()
