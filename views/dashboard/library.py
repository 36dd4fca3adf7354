"""Cache of the runs below a folder for the pages: a run is read again when its files change."""

import itertools
import math
import os
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import NotFound, StudyError, unknown
from ...base.reading import path_of
from ...knobs.lossy import lossy_values
from ...results import summary
from ...results.measurement import Trial
from ...results.names import (
    BEST,
    CHECKPOINTS,
    DATA,
    DOCUMENT,
    LEDGER,
    LOGS,
    RUN,
    RUNNING,
    TABLE,
    holds_run,
    is_running,
    stamp,
)
from ..report import Source, document, words
from ..report.page import as_json

DOCUMENTS = 8
"""Largest number of runs whose whole document is cached. For the others only the line in the list is cached."""

SPARKS = 48
"""Largest number of points of a sparkline."""

_FILES = (LEDGER, RUN, BEST, ".lock")


@dataclass(slots=True)
class _Entry:
    """The cached state of a run."""

    signature: tuple[Any, ...]
    line: dict[str, Any]
    reads: int
    """Number of this reading, counted over all runs; part of the version that pages send."""


@dataclass(slots=True)
class _Page:
    """A run as its page shows it, and the reading that it shows."""

    reads: int
    source: Source
    document: dict[str, Any]


class Library:
    """The runs under `root`. Thread-safe.

    Args:
        root: the folder; nothing outside it is read.

    Raises:
        StudyError: the folder does not exist.
    """

    def __init__(self, root: str | Path) -> None:
        if not path_of(root).is_dir():
            raise StudyError(f"there is no folder '{root}'; give the folder that holds your runs")
        self.root = Path(root).resolve()
        self._ids: list[str] = []
        self._listed_until = float("-inf")
        self._entries: dict[str, _Entry] = {}
        self._pages: OrderedDict[str, _Page] = OrderedDict()
        self._lock = threading.RLock()
        # A run is read by one thread at a time, so that no two readings get the same number.
        self._reading: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self._counter = itertools.count(1)
        # The version contains the start of this process, so that a page that is older requests everything again.
        self._epoch = f"{os.getpid():x}-{time.time_ns():x}"

    def ids(self) -> list[str]:
        """Returns the runs, as paths below the root."""
        with self._lock:
            begin = time.monotonic()
            if begin >= self._listed_until:
                self._ids = find_folders(self.root)
                took = time.monotonic() - begin
                self._listed_until = begin + took + max(DISCOVERY_SECONDS, 10 * took)
            for gone in self._entries.keys() - set(self._ids):
                del self._entries[gone]
                self._pages.pop(gone, None)
            return list(self._ids)

    def folder(self, run: str) -> Path:
        """Returns the folder of a run.

        Raises:
            NotFound: the run does not exist; an unknown path is never opened.
        """
        if run not in self.ids():
            raise NotFound(unknown("run", run, self.ids()[:20]))
        return self.root / run

    def lines(self) -> list[dict[str, Any]]:
        """Returns one line for each run, the running ones first and then those that changed last."""
        lines = []
        for run in self.ids():
            try:
                lines.append(self._entry(run).line)
            except NotFound:  # deleted since the folders were listed
                continue
        return sorted(lines, key=lambda line: (line["state"] != RUNNING, -line["changed"], line["run"]))

    def source(self, run: str) -> Source:
        """Returns the files of a run as they are now.

        Raises:
            NotFound: the run does not exist.
        """
        return self._page(run).source

    def trial(self, run: str, number: int) -> Trial:
        """Returns a trial of a run.

        Raises:
            NotFound: the run or trial does not exist.
        """
        for trial in self.source(run).trials:
            if trial.number == number:
                return trial
        raise NotFound(f"run '{run}' has no trial {number}")

    def changes(self, run: str, have: str = "") -> dict[str, Any] | None:
        """Returns the contents of a run's page and their version; None if the version `have` of a page is that.

        Raises:
            NotFound: the run does not exist.
        """
        if have == f"{self._epoch}.{self._entry(run).reads}":
            return None
        page = self._page(run)
        return {"version": f"{self._epoch}.{page.reads}", "run": run, "document": page.document}

    # -- reading ---------------------------------------------------------------------------------------------

    def _entry(self, run: str) -> _Entry:
        """Returns the cached entry of a run, read again if its files have changed."""
        folder = self.folder(run)
        with self._reading[run]:
            signature = _signature(folder)  # before the files: a change in between is then read next time
            entry = self._entries.get(run)
            if entry is None or entry.signature != signature:
                line = _line(run, _read(run, folder), signature)
                entry = _Entry(signature, line, next(self._counter))
                with self._lock:
                    self._entries[run] = entry
            return entry

    def _page(self, run: str) -> _Page:
        with self._reading[run]:
            reads = self._entry(run).reads
            with self._lock:
                page = self._pages.pop(run, None)
            if page is None or page.reads != reads:
                source = _read(run, self.folder(run))
                page = _Page(reads, source, document(source))
            with self._lock:
                self._pages[run] = page
                while len(self._pages) > DOCUMENTS:
                    self._pages.popitem(last=False)
            return page


def _read(run: str, folder: Path) -> Source:
    """Returns the readable contents of a run.

    Raises:
        NotFound: its folder was deleted, moved or emptied since it was found.
    """
    try:
        return Source.read(folder)
    except StudyError as error:
        if holds_run(folder):
            return Source(folder=folder, problems=[str(error)])
        raise NotFound(f"run '{run}' no longer exists: its folder was deleted, moved or renamed") from None


def _signature(folder: Path) -> tuple[Any, ...]:
    """Returns a value that changes when the contents of the run's page may have changed."""
    return is_running(folder), *(stamp(folder / name) for name in _FILES)


def _line(run: str, source: Source, signature: tuple[Any, ...]) -> dict[str, Any]:
    trials = source.trials
    winner = summary.best(trials)
    top = winner.throughput if winner else None
    stamps = [changed for changed in signature[1:4] if changed] or [(0,)]
    gain = summary.gain(trials)
    return as_json(
        {
            "run": run,
            "name": source.name,
            "state": source.state,
            "simulated": source.simulated,
            "emulated": source.emulated,
            "lossy": lossy_values(winner.config, winner.lossy) if winner else "",
            "devices": words.devices(source.request),
            "began": words.began(source.request),
            "trials": len(trials),
            "counts": {str(status): count for status, count in summary.counts(trials).items()},
            "best": top,
            "unit": winner.measured.unit if winner else "",
            "gain": gain and gain.ratio,
            "gain_half_width": gain and gain.half_width,
            "gain_shown": gain is not None and gain.shown,
            "spark": _thin(_climb(trials, math.inf if top is None else top)),
            "changed": max(changed[0] for changed in stamps) / 1e9,
            "problems": len(source.problems),
        }
    )


def _climb(trials: list[Trial], top: float) -> list[float | None]:
    """Returns the best so far, cut off at the winner's throughput: a faster first result was not confirmed."""
    return [throughput if throughput is None else min(throughput, top) for throughput in summary.best_so_far(trials)]


def _thin(series: list[float | None]) -> list[float | None]:
    if len(series) <= SPARKS:
        return series
    return [series[round(index * (len(series) - 1) / (SPARKS - 1))] for index in range(SPARKS)]


DISCOVERY_SECONDS = 1.0
"""Seconds for which a list of folders is reused, or ten times the duration of the search if that is longer."""

DEEPEST = 12
"""Depth below the root to which folders are searched."""

MOST_FOLDERS = 50_000
"""Folders that are searched at most."""

_OF_RUNS = frozenset({RUN, LEDGER, TABLE})
_NEVER = frozenset({"node_modules", "__pycache__", "site-packages", LOGS})


def find_folders(root: Path) -> list[str]:
    """Returns the folders below `root` that contain a run: sorted paths relative to it, with `/`; `.` is the folder itself.

    A run has a run.yaml, study.log or trials.csv that is a regular file. Links are not followed; hidden and unreadable
    folders are skipped, and the large ones of a training.
    """
    return sorted(_walk(root))


def _walk(root: Path) -> Iterator[str]:
    """Yields the folders that contain a run."""
    todo = [("", 0)]
    seen = 0
    while todo and seen < MOST_FOLDERS:
        relative, depth = todo.pop()
        seen += 1
        try:
            entries = list(os.scandir(root / relative))
        except OSError:  # removed in the meantime, or not readable
            continue
        files = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
        if files & _OF_RUNS:
            yield relative or "."
        never = _NEVER | {CHECKPOINTS, DATA} if DOCUMENT in files else _NEVER
        if depth < DEEPEST:
            todo += [
                (f"{relative}/{entry.name}" if relative else entry.name, depth + 1)
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and entry.name not in never
            ]
