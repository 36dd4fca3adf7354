"""The running searches of a server: a thread gives searches devices, starts their processes, and reads what they report.

A search has a process (`searcher`), which outlives the server: the next one finds it by its number and the time of its
start, both in the database, and reads its file of events on from where the last one stopped. A process that has died
without an outcome is started again, with the same devices.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..base.errors import NotFound, StorageUnavailable, UsageError
from .cluster import STARTING, Cluster, lives, process_of
from .records import Contender, ProcessId, Search, SearchState
from .request import NO_CODE, TARGETS, is_code
from .runs import folder_of
from .scheduling import Decision, Kind, decide
from .searcher import EVENTS, HELD_SIGNALS, OUTCOME, SearchTask
from .serve_options import ServeOptions
from .store import Store
from .store.part import DAY_S
from .store.running import Report

COMMAND = (sys.executable, "-P", "-m", "redline.service.searcher")
"""Starts the process of a search."""
LOOK_S = 0.2
"""Interval between looks at the running searches, s."""
DECIDE_S = 1.0
"""Largest interval between decisions, s."""
CHARGE_S = 5.0
"""Interval at which use of devices is charged, s."""
DELETE_S = 3600.0
"""Interval at which old searches are deleted, s."""
MOST_DEATHS = 8
"""Number of deaths in a row, each within `LIVED_S`, after which a search fails."""
LIVED_S = 60.0
"""A process that lived longer has died once, s."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Time until a process is started again: after the first death, and at most, s."""
INTERRUPTED_S = 60.0
"""Time for the process of a cancelled search to end its trials, s."""
MOST_EARLIER = 4
"""Earlier searches that a search begins with."""
MOST_LOOKED_AT = 100
"""Latest finished searches that are considered for that."""
MOST_READ = 4 << 20
"""Bytes of a file of events that are read at once."""
LONGEST_KIND = 40
"""Characters of the kind of an event."""
LAST_WORDS = 2000
"""Bytes of the end of a process's output in an error."""
LOG, LARGEST_LOG = "searcher.log", 4 << 20
"""File of the output of a search's processes, and the size in bytes at which it is emptied."""
_log = logging.getLogger("redline.searchers")


@dataclass
class _Process:
    """What this server remembers of a search that has devices."""

    deaths: int = 0
    """Deaths in a row."""
    began: float = 0.0
    """Start of the latest process, on the monotonic clock."""
    again_at: float = 0.0
    """When the next process may start, on the monotonic clock."""
    paused: bool = False
    """True if it was told to pause."""
    interrupted: float | None = None
    """When it was interrupted, on the monotonic clock."""


class Searchers:
    """Runs the searches of a store on a cluster.

    Args:
        store: contains the searches.
        cluster: has the devices.
        options: of the server.
    """

    def __init__(self, store: Store, cluster: Cluster, options: ServeOptions) -> None:
        self._store, self._cluster, self._options = store, cluster, options
        self.failure: str | None = None
        """Why searches are not managed at the moment; None if they are."""
        self._processes: dict[str, _Process] = {}
        self._overtaken_since: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        self._decided = self._charged = self._deleted = float("-inf")
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="searchers")

    def start(self) -> None:
        """Manages the searches from now on, in a thread."""
        self._thread.start()

    def is_alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Makes a decision soon."""
        self._changed.set()

    @property
    def reasons(self) -> dict[str, str]:
        """Why queued searches wait, by id, as of the last decision."""
        return self._reasons

    def devices(self) -> list[tuple[Kind, int]]:
        """Returns the kinds of devices, each with the number that searches have."""
        contenders = self._store.contenders()
        return [
            (kind, sum(contender.uses for contender in contenders if contender.kind == kind.name))
            for kind in self._cluster.kinds
        ]

    def close(self) -> None:
        """Ends the thread and the processes. Their searches continue with the next server."""
        self._closing.set()
        self._thread.join()
        with contextlib.suppress(StorageUnavailable):
            for contender in self._store.contenders():
                if contender.process is not None and lives(contender.process):
                    self._signal(contender.process, signal.SIGKILL)
                    if not contender.state.ended:
                        self._store.stop_process(contender.search)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.look()
                self.failure = None
            except StorageUnavailable as error:
                _log.warning("searches are not managed at the moment: %s", error)
                self.failure = str(error)
            except Exception as error:  # the next round may succeed, and without this thread no search would start
                _log.exception("searches are not managed at the moment")
                self.failure = f"{type(error).__name__}: {error}"
            self._closing.wait(DECIDE_S if self.failure else LOOK_S)

    def look(self) -> None:
        """Looks at all searches once: reads reports, starts and ends processes, decides."""
        contenders = self._store.contenders()
        running = [contender for contender in contenders if contender.uses]
        for contender in running:
            try:
                self._look_at(contender)
            except StorageUnavailable:
                raise
            except Exception as error:  # of this search, which must not keep the others from being managed
                _log.exception("the search %s is ended", contender.search)
                self._signal(contender.process, signal.SIGKILL)
                reason = f"the server cannot manage it: {type(error).__name__}: {error}"
                self._take_devices(contender, SearchState.FAILED, _storable(reason))
        self._charge(running)
        self._delete_old()
        if self._changed.is_set() or time.monotonic() - self._decided >= DECIDE_S:
            self._changed.clear()
            self._decide()
            self._decided = time.monotonic()

    def _charge(self, running: Sequence[Contender]) -> None:
        now = time.monotonic()
        since = now - self._charged
        if since < CHARGE_S:
            return
        self._charged = now
        if since < 3 * CHARGE_S:  # not the time without a server or a database
            self._store.charge({contender.search: since for contender in running})

    def _delete_old(self) -> None:
        """Deletes searches that ended long ago, and their folders, every hour."""
        days, now = self._options.keep_searches, time.monotonic()
        if days is None or now - self._deleted < DELETE_S:
            return
        self._deleted = now
        for search in self._store.ended_before(self._store.clock() - days * DAY_S):
            try:
                self._store.delete_search(search, folder_of(self._options.folder, search))
            except (NotFound, UsageError, OSError) as error:
                _log.warning("the search %s is not deleted, next try in an hour: %s", search, error)

    def _decide(self) -> None:
        contenders, now = self._store.contenders(), self._store.clock()
        if self._cluster.failure is not None:
            self._reasons = {
                contender.search: self._cluster.failure
                for contender in contenders
                if contender.state is SearchState.QUEUED
            }
            return
        decision: Decision = decide(
            contenders,
            self._store.shares(),
            self._cluster.kinds,
            now,
            most=self._options.searches,
            slice_s=self._options.slice_s,
            overtaken_since=self._overtaken_since,
            pausing=(search for search, process in self._processes.items() if process.paused),
        )
        self._overtaken_since = {search: self._overtaken_since.get(search, now) for search in decision.overtaken}
        self._reasons = decision.reasons
        for start in decision.start:
            self._store.give_devices(start.search, start.kind, start.uses)
        by_id = {contender.search: contender for contender in contenders}
        for search, reason in decision.pause.items():
            self._pause(by_id[search], reason)

    def _pause(self, contender: Contender, reason: str) -> None:
        process = self._processes.setdefault(contender.search, _Process())
        if process.paused:
            return
        process.paused = True
        self._store.add_event(contender.search, "pausing", {"reason": reason})
        self._signal(contender.process, signal.SIGTERM)

    def _signal(self, process: ProcessId | None, number: signal.Signals) -> None:
        if process is not None and lives(process):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(process.pid, number)

    def _take_devices(self, contender: Contender, state: SearchState, reason: str = "", **more: Any) -> None:
        """Takes the devices of a search, see `Store.take_devices`. What is remembered of its process does not count for the next
        one, which may get devices at once.
        """
        self._processes.pop(contender.search, None)
        self._store.take_devices(contender.search, state, reason, **more)

    def _look_at(self, contender: Contender) -> None:
        """Reads the reports of a search with devices, and starts, interrupts or ends its process."""
        remembered = self._processes.setdefault(contender.search, _Process())
        alive = contender.process is not None and lives(contender.process)
        # After the look, so that nothing it wrote before its death is missed.
        outcome, end, complete = self._read(contender)
        if not complete:
            return
        if alive:
            if contender.state.ended:
                self._interrupt(contender, remembered)
            return
        if contender.state.ended or outcome is not None:
            self._conclude(contender, remembered, outcome, end)
        elif remembered.paused:
            self._take_devices(contender, SearchState.QUEUED, "paused")
        elif contender.process is not None and remembered.again_at <= 0:
            self._died(contender, remembered)
        elif not self._has_devices(contender):
            lost = self._cluster.failure or f"the cluster has lost devices of {contender.kind}"
            if lost != STARTING:
                self._take_devices(contender, SearchState.QUEUED, lost)
        elif time.monotonic() >= remembered.again_at:
            self._begin(contender, remembered)

    def _interrupt(self, contender: Contender, remembered: _Process) -> None:
        """Ends the process of a cancelled search: it has a while to end its trials."""
        now = time.monotonic()
        if remembered.interrupted is None:
            remembered.interrupted = now
            self._signal(contender.process, signal.SIGINT)
        elif now - remembered.interrupted > INTERRUPTED_S:
            self._signal(contender.process, signal.SIGKILL)

    def _read(self, contender: Contender) -> tuple[dict[str, Any] | None, int, bool]:
        """Records the new events of a search. Returns its outcome if that is the last one, the end of what was read, bytes, and
        whether that is all.
        """
        path = folder_of(self._options.folder, contender.search) / EVENTS
        try:
            with path.open("rb") as file:
                file.seek(contender.read)
                chunk = file.read(MOST_READ)
        except FileNotFoundError:
            return None, 0, True
        complete = len(chunk) < MOST_READ
        # A line that is longer than a chunk is no event.
        lines = chunk[: chunk.rfind(b"\n") + 1] if complete or b"\n" in chunk else chunk
        end = read = contender.read + len(lines)
        reports = list(_reports(lines.splitlines()))
        outcome = None
        if complete and reports and reports[-1].kind == OUTCOME:
            # Read again until it is acted on: this server may be killed before.
            outcome = reports.pop().data
            end -= len(lines) - lines.rfind(b"\n", 0, -1) - 1
        if end > contender.read:
            recorded = [report for report in reports if report.kind != OUTCOME]
            self._store.add_reports(contender.search, contender.read, end, recorded, _waits_for(reports))
        return outcome, read, complete

    def _conclude(self, contender: Contender, remembered: _Process, outcome: dict[str, Any] | None, end: int) -> None:
        """Takes the devices of a search whose process has ended.

        Args:
            contender: the search.
            remembered: of its process.
            outcome: its last event, see `searcher.OUTCOME`; None if it has none.
            end: of that event in the file, bytes.
        """
        if outcome is None:
            self._take_devices(contender, SearchState.CANCELLED)
            return
        state, reason = SearchState(outcome["state"]), _storable(str(outcome["reason"]))
        if outcome.get("again") and not contender.state.ended and self._has_devices(contender):
            self._store.skip_reports(contender.search, end)
            self._restart(contender, remembered, reason)
            return
        if state is SearchState.FAILED and not self._has_devices(contender):
            state = SearchState.QUEUED  # for lack of devices that the cluster had
        self._take_devices(contender, state, reason, best=outcome.get("best"), read=end)

    def _has_devices(self, contender: Contender) -> bool:
        """True if the cluster has the devices of a search, which were given to it."""
        return any(kind.name == contender.kind and kind.total >= contender.uses for kind in self._cluster.kinds)

    def _died(self, contender: Contender, remembered: _Process) -> None:
        last_words = self._last_words(contender.search)
        self._restart(contender, remembered, "its process was killed" + (f": {last_words}" if last_words else ""))

    def _restart(self, contender: Contender, remembered: _Process, how: str) -> None:
        """Has a process started again after a while, unless it has died too often."""
        _log.warning("the process of the search %s ended: %s", contender.search, how)
        now = time.monotonic()
        remembered.deaths = 1 if now - remembered.began > LIVED_S else remembered.deaths + 1
        if remembered.deaths >= MOST_DEATHS:
            reason = f"its process ended {MOST_DEATHS} times in a row; the last time: {how}"
            self._take_devices(contender, SearchState.FAILED, reason)
            return
        self._store.add_event(contender.search, "restarting", {"reason": how})
        remembered.again_at = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (remembered.deaths - 1))

    def _begin(self, contender: Contender, remembered: _Process) -> None:
        """Starts a process. It gets its task when the database names it, so that no two processes run a search."""
        try:
            search = self._store.search(contender.search)
        except NotFound:
            return
        if is_code(search.request) and not self._options.allow_code:
            self._take_devices(contender, SearchState.FAILED, NO_CODE)
            return
        folder = folder_of(self._options.folder, contender.search)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            path = folder / LOG
            with open(path, "wb" if path.exists() and path.stat().st_size > LARGEST_LOG else "ab") as log:
                child = _started(log)
        except OSError as error:  # the disk is full, or the host has too many processes: not the search's fault
            _log.warning("the search %s does not start: %s", contender.search, error)
            remembered.again_at = time.monotonic() + LONGEST_PAUSE_S
            return
        assert child.stdin is not None
        remembered.began, remembered.again_at, remembered.paused = time.monotonic(), 0.0, False
        with child.stdin as task_input:
            process = process_of(child.pid)
            if process is not None:
                self._store.set_process(contender.search, process)
                with contextlib.suppress(BrokenPipeError):  # it died at once, which the next look detects
                    task_input.write(self._task(search, contender, folder).to_json().encode())

    def _task(self, search: Search, contender: Contender, folder: Path) -> SearchTask:
        return SearchTask(
            search=search.id,
            folder=str(folder),
            request=search.request,
            kind=contender.kind,
            concurrency=max(1, contender.uses // contender.devices),
            seconds=self._seconds_left(search),
            address=self._cluster.address,
            memory_mib=self._options.memory_mib,
            earlier=tuple(str(earlier) for earlier in self._earlier(search)),
        )

    def _seconds_left(self, search: Search) -> float | None:
        """Returns the time that a search has left, s; at least one, in which it ends in an orderly way."""
        from ..tuner.budget import parse_duration

        seconds = parse_duration(search.request.get("time"), "time")
        return None if seconds is None else max(1.0, seconds - search.used_s)

    def _earlier(self, search: Search) -> list[Path]:
        """Returns the folders of the latest searches of the same model that ended before this one first ran."""
        target = [search.request.get(name) for name in TARGETS]
        candidates = self._store.searches(state=SearchState.DONE, limit=MOST_LOOKED_AT)
        same = [
            folder_of(self._options.folder, earlier.id)
            for earlier in candidates
            if [earlier.request.get(name) for name in TARGETS] == target
            and earlier.best
            and (earlier.ended or 0.0) <= (search.started or 0.0)
        ]
        return [folder for folder in same if folder.is_dir()][:MOST_EARLIER]

    def _last_words(self, search: str) -> str:
        """Returns the end of the output of a search's processes."""
        with contextlib.suppress(FileNotFoundError), open(folder_of(self._options.folder, search) / LOG, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_WORDS))
            return file.read().decode("utf-8", "replace").strip()
        return ""


def _started(log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts the process of a search, to which signals come once it has handlers for them: Python loses a `KeyboardInterrupt`
    that is raised in a destructor or a callback, of which imports call many.
    """
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    try:
        return subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def _reports(lines: Iterable[bytes]) -> Iterable[Report]:
    """Yields the events in lines of a file. What is none is skipped: a killed process leaves a line incomplete, and code of
    users can write to the file.
    """
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            event = json.loads(line, parse_constant=_refuse)
            data, kind = dict(event["data"]), str(event["kind"])[:LONGEST_KIND]
            if kind != "finished" or isinstance(data["done"], int):
                yield Report(time=float(event["time"]), kind=kind, data=data)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _storable(text: str) -> str:
    """Returns a text that every database can store."""
    return text.replace("\0", "").encode("utf-8", "backslashreplace").decode()


def _waits_for(reports: Sequence[Report]) -> str | None:
    """Returns what a search waits for after these events: empty for nothing, None if they do not say."""
    for report in reversed(reports):
        if report.kind in ("waiting", "started", "plan", "finished"):
            return _storable(str(report.data.get("what", ""))) if report.kind == "waiting" else ""
    return None
