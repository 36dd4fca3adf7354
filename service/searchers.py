"""The searchers of a server: a process per running search, restarted when it dies, within the slots available.

They are forks of one host agent of the server, which has imported what they need, so that one starts in a fraction of a
second. The agent ends them when the server ends, in whatever way; if the agent is killed, another one is started.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from ..base.errors import NotFound, RunnerError, StorageUnavailable
from ..runners.host import HostAgent
from ..runners.job import AgentTask, Begun
from .limits import SearcherLimits
from .logs import folder_of
from .records import Contender, Search, SearchState, Share, Worker
from .scheduling import share_slots, why_no_slot
from .searcher_task import IMPORTS, OF_MODELS, SearchTask, driver_of
from .store import Store

MOST = 8
"""Searches that run at once; the others are queued. Each takes a process, and beyond what they share some 100 MiB."""
UNABLE_S = 10.0
"""A search that cannot run for so long gives up its slot, s: a worker that is started anew may be back by then."""
DECIDE_S = 1.0
"""How often slots are looked at where none is free and nothing was submitted, and how old a reason may be, s."""
_log = logging.getLogger("redline.searchers")


class SearcherSlots:
    """Shares the slots. May be used from several threads.

    Args:
        store: of the searches.
        most: how many run at once.
        monotonic: tells time that never goes back.
    """

    def __init__(self, store: Store, most: int = MOST, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        """How many searches run at once."""
        self._store = store
        self._monotonic = monotonic
        self._decided = float("-inf")
        self._unable: dict[str, float] = {}
        self._told: tuple[float, dict[str, str]] = (float("-inf"), {})
        self._lock = threading.Lock()

    def share(self) -> tuple[set[str], list[str], list[str]]:
        """One decision, carried out in the store.

        Returns:
            The searches that have a slot, those that get one now, in order, and those that gave theirs up.
        """
        contenders, now = self._store.contenders(), self._monotonic()
        running = {each.search for each in contenders if each.runs}
        free = len(running) < self.most and len(running) < len(contenders)
        if not free and now - self._decided < DECIDE_S:
            return running, [], []
        self._decided = now
        workers, shares = self._looked_at()
        begin, cannot = share_slots(contenders, self._store.running(), workers, shares, self.most)
        held = {each.search for each in contenders if each.held}
        self._unable = {each: self._unable.get(each, now) for each in cannot}
        gone = []
        for search, since in self._unable.items():
            if (search in held or now - since >= UNABLE_S) and self._store.put_back(search, cannot[search]):
                _log.info("the search %s gives up its slot: %s", search, cannot[search])
                gone.append(search)
        return running - {*gone}, begin, gone

    def why(self, searches: Iterable[str] = ()) -> dict[str, str]:
        """Why searches in the queue have no slot, by id; a second old at most, and newer where one of these is missing."""
        with self._lock:
            asked, found = self._told
            if self._monotonic() - asked > DECIDE_S or any(each not in found for each in searches):
                contenders: list[Contender] = self._store.contenders()
                if any(not each.runs for each in contenders):
                    workers, shares = self._looked_at()
                    found = why_no_slot(contenders, self._store.running(), workers, shares, self.most)
                else:
                    found = {}
                self._told = self._monotonic(), found
            return found

    def _looked_at(self) -> tuple[list[Worker], list[Share]]:
        return self._store.workers(), self._store.shares()


LOOK_S = 0.2
"""How often it is looked after them, s."""
LIVED_S = 30.0
"""A searcher that lived so long before it died counts as one that works."""
MOST_DEATHS = 8
"""How often one dies in a row, each time sooner than that, before its search has failed."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""How long it is waited before a searcher is started again, s: at first, and after many deaths."""
LAST_WORDS = 2000
"""Characters of what a searcher printed last that are told."""
LOG, LARGEST_LOG = "searcher.log", 4 << 20
"""What a search's searchers print, in its folder; bytes from which on it is begun anew."""
ALSO_DEAD_S = 0.2
"""How long it may take until it shows that the agent had died as well, s."""


@dataclass
class _Child:
    """The process of a search."""

    of_a_model: bool
    """Whether it needs more imports than a command's."""
    connection: Connection | None = None
    """With it, as long as it lives."""
    pid: int | None = None
    """None until it has said it."""
    code: int | None = None
    """With which it said that it ends; None for one that was killed."""
    printed: int = 0
    """Where in the log begins what it printed."""
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
    slots: SearcherSlots
    """Which searches run."""
    workloads: bool = True
    """Whether searchers may run a workload's file, as this process's user."""
    limits: SearcherLimits = field(default_factory=SearcherLimits)
    """What each of them may take."""
    task: Callable[..., AgentTask] = SearchTask
    """What is done for a search, made as `SearchTask` is."""
    imports: tuple[str, ...] = IMPORTS
    """What the agent imports at once, beside the database's driver."""
    of_models: tuple[str, ...] = OF_MODELS
    """What it imports as well, unless all searches are of commands."""
    started: InitVar[HostAgent | None] = None
    """An agent that was started beforehand; closed with this."""
    agent: HostAgent = field(init=False)
    """Of which the searchers are forks."""
    _children: dict[str, _Child] = field(default_factory=dict, init=False)
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def __post_init__(self, started: HostAgent | None) -> None:
        self.agent = started or HostAgent((*self.imports, *driver_of(self.url)))

    def start(self) -> None:
        """Looks after them from now on, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="searchers")
        self._thread.start()

    def close(self) -> None:
        """Ends the processes; their searches stay as they are, and go on with the next server."""
        self._stopping.set()
        self.agent.close()
        if self._thread is not None:
            self._thread.join()
        self.agent.close()  # perhaps one that was being started in the place of another
        for child in self._children.values():
            if child.connection is not None:
                child.connection.close()
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
        now = time.monotonic()
        running, begin, gone = self.slots.share()
        # Directly before the agent is looked at: who died with it is not to blame.
        for name, child in list(self._children.items()):
            self._look_at(name, child, now)
        for name in gone:
            self._end(name)
        # Those that run and have no process are of a server before this one.
        for name in [*running, *begin[: max(0, self.slots.most - len(self._children))]]:
            if name not in self._children:
                self._children[name] = _Child(of_a_model=_of_a_model(self.store.search(name)))
        if self.agent.ended() and not self._stopping.is_set():
            self.agent.close()
            self.agent = HostAgent((*self.imports, *driver_of(self.url)))
        children = self._children.values()
        if not children or any(child.of_a_model for child in children):
            self.agent.also_import(self.of_models)  # beforehand, where there is nothing to do
        for name, child in self._children.items():
            if child.connection is None and now >= child.again_at and not self._stopping.is_set():
                self._begin(name, child)

    def _end(self, search: str) -> None:
        """Ends the process of a search that gave up its slot; it ends itself when its connection closes."""
        child = self._children.pop(search, None)
        if child is not None and child.connection is not None:
            child.connection.close()

    def _look_at(self, search: str, child: _Child, now: float) -> None:
        if child.connection is None or _lives(child):
            return
        child.connection.close()
        child.connection = child.pid = None
        if self._needs_none(search):
            del self._children[search]
            return
        how = "was killed" if child.code is None else f"ended with {child.code}"
        words = self._last_words(search, child)
        if child.code is None and self.agent.ended(ALSO_DEAD_S):
            how = "was killed with the agent that it is a fork of"
        else:
            child.deaths = 1 if now - child.began > LIVED_S else child.deaths + 1
        self._died(search, child, f"{how}: {words}" if words else how)

    def _needs_none(self, search: str) -> bool:
        """Whether a search has ended, was deleted, or waits until it is released."""
        try:
            found = self.store.search(search)
        except NotFound:
            return True
        return found.state.ended or (found.held and found.state is SearchState.QUEUED)

    def _died(self, search: str, child: _Child, how: str) -> None:
        """Has a searcher be started again after a while, unless it has died too often."""
        _log.warning("the searcher of %s %s", search, how)
        if child.deaths >= MOST_DEATHS:
            self._give_up(search, how)
            del self._children[search]
            return
        pause = FIRST_PAUSE_S * 2 ** max(0, child.deaths - 1)
        child.again_at = time.monotonic() + min(LONGEST_PAUSE_S, pause)

    def _begin(self, search: str, child: _Child) -> None:
        folder = folder_of(self.data, search)
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / LOG
        child.printed = log.stat().st_size if log.exists() else 0
        if child.printed > LARGEST_LOG:
            log.unlink()
            child.printed = 0
        child.began, child.code = time.monotonic(), None
        try:
            asked = self.task(
                url=self.url, data=self.data, search=search, log=log, code=self.workloads, limits=self.limits
            )
            child.connection = self.agent.begin(asked)
        except RunnerError as error:
            if not self._stopping.is_set():  # no fault of the search's
                child.again_at = time.monotonic() + LONGEST_PAUSE_S
                _log.warning("the searcher of %s did not start: %s", search, error)

    def _give_up(self, search: str, how: str) -> None:
        try:
            attempt = self.store.take_search(search)
            reason = f"its searcher died {MOST_DEATHS} times in a row; at last it {how}"
            self.store.finish(search, attempt, SearchState.FAILED, reason)
        except NotFound:
            return

    def _last_words(self, search: str, child: _Child) -> str:
        """What it printed last."""
        with suppress(FileNotFoundError), open(folder_of(self.data, search) / LOG, "rb") as file:
            file.seek(max(child.printed, file.seek(0, os.SEEK_END) - LAST_WORDS))
            return file.read().decode("utf-8", "replace").strip()
        return ""


def _of_a_model(search: Search) -> bool:
    command = search.request.get("command")
    return command is None or bool(command.get("model"))


def _lives(child: _Child) -> bool:
    """Hears what a process says of itself; whether it has not ended."""
    assert child.connection is not None
    try:
        while child.connection.poll():
            said: Begun | int = child.connection.recv()
            if isinstance(said, Begun):
                child.pid = said.supervisor
            else:
                child.code = said
    except (EOFError, OSError):
        return False
    return True
