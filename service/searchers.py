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
from pathlib import Path

from ..base.errors import AttemptOver, NotFound, RunnerError, StorageUnavailable
from ..runners.host import HostAgent
from ..runners.job import AgentTask
from ..runners.protocol import Call
from .child_processes import FIRST_PAUSE_S, LIVED_S, LONGEST_PAUSE_S
from .limits import SearcherLimits
from .logs import folder_of
from .records import Contender, Search, SearchState, Share, Worker
from .request import NO_CODE, is_code
from .scheduling import share_slots, why_no_slot
from .searcher_task import IMPORTS, OF_MODELS, SearchTask, driver_of
from .serve_options import MOST
from .store import Store

UNABLE_S = 10.0
"""A search that cannot run for this long gives up its slot, s. The delay allows a worker to restart."""
DECIDE_S = 1.0
"""Interval between decisions while no slot is free, and maximum age of a cached reason, s."""
_log = logging.getLogger("redline.searchers")


class SearcherSlots:
    """Assigns searcher slots. Thread-safe."""

    def __init__(self, store: Store, most: int = MOST, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        """Number of slots."""
        self._store = store
        self._monotonic = monotonic
        self._decided = float("-inf")
        self._unable: dict[str, float] = {}
        self._reasons: tuple[float, dict[str, str]] = (float("-inf"), {})
        self._lock = threading.Lock()

    def share(self) -> tuple[set[str], list[str], list[str]]:
        """Makes one decision and updates the store.

        Returns:
            The searches that have a slot, those that get one now, in order, and those that gave theirs up.
        """
        contenders, now = self._store.contenders(), self._monotonic()
        running = {each.search for each in contenders if each.runs}
        free = len(running) < self.most and len(running) < len(contenders)
        if not free and now - self._decided < DECIDE_S:
            return running, [], []
        self._decided = now
        workers, shares = self._workers_and_shares()
        begin, cannot = share_slots(contenders, self._store.running(), workers, shares, self.most)
        held = {each.search for each in contenders if each.held}
        self._unable = {each: self._unable.get(each, now) for each in cannot}
        released = []
        for search, since in self._unable.items():
            if (search in held or now - since >= UNABLE_S) and self._store.put_back(search, cannot[search]):
                _log.info("the search %s gives up its slot: %s", search, cannot[search])
                released.append(search)
        return running - {*released}, begin, released

    def why(self, searches: Iterable[str] = ()) -> dict[str, str]:
        """Returns the reasons why queued searches have no slot, by id. They are cached for a second unless one of
        `searches` is missing.
        """
        with self._lock:
            asked, found = self._reasons
            if self._monotonic() - asked > DECIDE_S or any(each not in found for each in searches):
                contenders: list[Contender] = self._store.contenders()
                if any(not each.runs for each in contenders):
                    workers, shares = self._workers_and_shares()
                    found = why_no_slot(contenders, self._store.running(), workers, shares, self.most)
                else:
                    found = {}
                self._reasons = self._monotonic(), found
            return found

    def _workers_and_shares(self) -> tuple[list[Worker], list[Share]]:
        return self._store.workers(), self._store.shares()


LOOK_S = 0.2
"""Interval between checks of the searchers, s."""
MOST_DEATHS = 8
"""Number of deaths in a row after which a search fails."""
LAST_WORDS = 2000
"""Number of characters of a searcher's last output in an error."""
LOG, LARGEST_LOG = "searcher.log", 4 << 20
"""Name of the file with the searchers' output in a search's folder, and the size in bytes at which it is restarted."""
ALSO_DEAD_S = 0.2
"""How long to wait for the agent's death to be noticed after a searcher's, s."""


@dataclass
class _Child:
    """The searcher process of a search."""

    of_a_model: bool
    """True if it needs the imports of `OF_MODELS`."""
    call: Call | None = None
    """The call that runs the process; None while it does not run."""
    agent: HostAgent | None = None
    """The agent that began the process; a later one may have replaced it when the process's death is noticed."""
    pid: int | None = None
    """None until the process has sent it."""
    code: int | None = None
    """Exit code that the process sent; None for one that was killed."""
    printed: int = 0
    """Offset in the log at which its output begins."""
    began: float = 0.0
    deaths: int = 0
    again_at: float = 0.0
    """When to restart it, on the monotonic clock."""

    def is_alive(self) -> bool:
        """Reads the process's messages. Returns False if it has ended."""
        assert self.call is not None
        with suppress(TimeoutError):
            while (note := self.call.note(0)) is not None:
                self.pid = note.supervisor
        if self.call.replied:
            self.code = self.call.result()
        return not self.call.caller.look()

    def hang_up(self) -> None:
        """Closes the connection, which ends the process."""
        if self.call is not None:
            self.call.caller.close()
        self.call = self.pid = None


@dataclass
class Searchers:
    """Runs a searcher process for each running search, and starts queued searches while there are free slots."""

    store: Store
    url: str
    data: Path
    """The server's data folder."""
    slots: SearcherSlots
    allow_code: bool = True
    """True if searches of submitted code may run."""
    workloads: bool = True
    """True if searchers may run workload files, as this process's user."""
    limits: SearcherLimits = field(default_factory=SearcherLimits)
    task: Callable[..., AgentTask] = SearchTask
    """Makes the task of a search; called as `SearchTask`."""
    imports: tuple[str, ...] = IMPORTS
    """Modules that the agent imports at its start, besides the database's driver."""
    of_models: tuple[str, ...] = OF_MODELS
    """Modules that it imports as well unless all searches are of commands."""
    started: InitVar[HostAgent | None] = None
    """An agent that was started beforehand. It is closed with this object."""
    agent: HostAgent = field(init=False)
    """The host agent that the searchers are forked from."""
    failure: str = field(default="", init=False)
    """Why searchers are not managed at the moment; empty if there is no error."""
    _children: dict[str, _Child] = field(default_factory=dict, init=False)
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def __post_init__(self, started: HostAgent | None) -> None:
        self.agent = started or HostAgent((*self.imports, *driver_of(self.url)))

    def start(self) -> None:
        """Manages the searchers from now on, in a thread."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="searchers")
        self._thread.start()

    def is_alive(self) -> bool:
        """True while the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Ends the processes. Their searches keep their state and continue with the next server."""
        self._stopping.set()
        self.agent.close()
        if self._thread is not None:
            self._thread.join()
        self.agent.close()  # the thread may have replaced the agent meanwhile
        for child in self._children.values():
            child.hang_up()
        self._children.clear()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.look()
                self.failure = ""
            except StorageUnavailable as error:
                _log.warning("searchers are not managed at the moment: %s", error)
                self.failure = str(error)
            except Exception as error:  # the next round may succeed, and without this thread no search would start
                _log.exception("searchers are not managed at the moment")
                self.failure = f"{type(error).__name__}: {error}"
            self._stopping.wait(DECIDE_S if self.failure else LOOK_S)

    def look(self) -> None:
        """Checks all searchers once: restarts, starts and ends processes."""
        now = time.monotonic()
        running, begin, released = self.slots.share()
        for name, child in list(self._children.items()):
            self._look_at(name, child, now)
        for name in released:
            self._end(name)
        # Running searches without a process are those of an earlier server.
        for name in [*running, *begin[: max(0, self.slots.most - len(self._children))]]:
            if name not in self._children and (search := self._to_run(name)) is not None:
                self._children[name] = _Child(of_a_model=_of_a_model(search))
        if self.agent.ended() and not self._stopping.is_set():
            self.agent.close()
            self.agent = HostAgent((*self.imports, *driver_of(self.url)))
        children = self._children.values()
        if not children or any(child.of_a_model for child in children):
            self.agent.also_import(self.of_models)  # without searches this happens ahead of time
        for name, child in self._children.items():
            if child.call is None and now >= child.again_at and not self._stopping.is_set():
                self._begin(name, child)

    def _end(self, search: str) -> None:
        """Ends the process of a search that gave up its slot, by closing its connection."""
        child = self._children.pop(search, None)
        if child is not None:
            child.hang_up()

    def _look_at(self, search: str, child: _Child, now: float) -> None:
        if child.call is None or child.is_alive():
            return
        child.hang_up()
        if self._to_run(search) is None:
            del self._children[search]
            return
        how = "was killed" if child.code is None else f"ended with {child.code}"
        output = self._last_words(search, child)
        if child.code is None and child.agent is not None and child.agent.ended(ALSO_DEAD_S):
            how = "was killed together with its host agent"
        else:
            child.deaths = 1 if now - child.began > LIVED_S else child.deaths + 1
        self._died(search, child, f"{how}: {output}" if output else how)

    def _to_run(self, search: str) -> Search | None:
        """Returns a search that needs a process; None if it ended, was deleted, or is held. One that may not run here
        fails.
        """
        try:
            found = self.store.search(search)
        except NotFound:
            return None
        if found.state.ended or found.held:
            return None
        if is_code(found.request) and not self.allow_code:
            self._fail(search, NO_CODE)
            return None
        return found

    def _died(self, search: str, child: _Child, how: str) -> None:
        """Schedules a restart of a searcher, unless it has died too often."""
        _log.warning("the searcher of %s %s", search, how)
        if child.deaths >= MOST_DEATHS:
            self._fail(search, f"its searcher died {MOST_DEATHS} times in a row; the last one {how}")
            del self._children[search]
            return
        pause = FIRST_PAUSE_S * 2 ** max(0, child.deaths - 1)
        child.again_at = time.monotonic() + min(LONGEST_PAUSE_S, pause)

    def _begin(self, search: str, child: _Child) -> None:
        try:
            log = self._log_of(search, child)
            child.began, child.code = time.monotonic(), None
            task = self.task(
                url=self.url, data=self.data, search=search, log=log, code=self.workloads, limits=self.limits
            )
            child.agent = self.agent
            child.call = child.agent.begin(task)
        except (RunnerError, OSError) as error:
            if not self._stopping.is_set():  # not the search's fault, so not counted as a death
                child.again_at = time.monotonic() + LONGEST_PAUSE_S
                _log.warning("the searcher of %s did not start: %s", search, error)

    def _log_of(self, search: str, child: _Child) -> Path:
        """Returns the file for a searcher's output, emptied if it is too large."""
        folder = folder_of(self.data, search)
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / LOG
        child.printed = log.stat().st_size if log.exists() else 0
        if child.printed > LARGEST_LOG:
            log.unlink()
            child.printed = 0
        return log

    def _fail(self, search: str, reason: str) -> None:
        """Ends a search as failed, unless it has ended, was deleted or is held."""
        with suppress(NotFound, AttemptOver):
            self.store.finish(search, self.store.take_search(search), SearchState.FAILED, reason)

    def _last_words(self, search: str, child: _Child) -> str:
        """Returns the end of the process's output."""
        with suppress(FileNotFoundError), open(folder_of(self.data, search) / LOG, "rb") as file:
            file.seek(max(child.printed, file.seek(0, os.SEEK_END) - LAST_WORDS))
            return file.read().decode("utf-8", "replace").strip()
        return ""


def _of_a_model(search: Search) -> bool:
    command = search.request.get("command")
    return command is None or bool(command.get("model"))
