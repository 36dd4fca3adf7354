"""The runs under a folder as the pages ask for them: read when their files change, otherwise remembered."""

import itertools
import math
import os
import threading
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import StudyError, unknown
from ...base.reading import path_of
from ...knobs.lossy import lossy_values
from ...results import summary
from ...results.measurement import Trial
from ...results.names import BEST, LEDGER, RUN, TABLE, holds_run
from ..report import Source, document, state as run_state, words
from ..report.document import as_json, rows
from .discover import Folders
from .trainings import Trainings

DOCUMENTS = 8
"""Runs that are remembered whole; of the others only the line in the list is."""

SPARKS = 48
"""Points of a sparkline at most."""

_FILES = (TABLE, RUN, BEST, ".lock")


class NoSuchRun(StudyError):
    """There is no such run, or no longer."""


@dataclass(slots=True)
class _Entry:
    """What is remembered of a run."""

    signature: tuple[Any, ...]
    line: dict[str, Any]
    reads: int
    """Which reading of files this is, counted over all runs; part of the version that pages hold."""
    source: Source | None
    """What was read, until a page takes it."""


@dataclass(slots=True)
class _Whole:
    """A run as its page holds it, and since which reading each row is as it is."""

    reads: int
    source: Source
    document: dict[str, Any]
    rows: dict[int, tuple[tuple[Any, ...], int]]
    columns: list[str]
    begun: int
    """The reading from which on rows were only added or changed, under the same columns."""


class Library:
    """The runs under `root`. May be used from several threads.

    Args:
        root: the folder; nothing outside it is ever read.

    Raises:
        StudyError: there is no such folder.
    """

    def __init__(self, root: str | Path) -> None:
        if not path_of(root).is_dir():
            raise StudyError(f"there is no folder '{root}'; give the folder that holds your runs")
        self.root = Path(root).resolve()
        self._folders = Folders(self.root)
        self.trainings = Trainings(self._folders)
        """The trainings under the same folder."""
        self._entries: dict[str, _Entry] = {}
        self._wholes: OrderedDict[str, _Whole] = OrderedDict()
        self._lock = threading.RLock()
        # A run is read by one thread at a time: two readings never get one number.
        self._reading: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self._counter = itertools.count(1)
        # With the start of this process in the version, a page that outlives it starts anew.
        self._epoch = f"{os.getpid():x}-{time.time_ns():x}"

    def ids(self) -> list[str]:
        """The runs there are, by their paths below the root."""
        found = list(self._folders.found().runs)
        with self._lock:
            for gone in self._entries.keys() - set(found):
                del self._entries[gone]
                self._wholes.pop(gone, None)
        return found

    def folder(self, run: str) -> Path:
        """The folder of a run.

        Raises:
            NoSuchRun: there is no such run; a path is never tried, only looked up.
        """
        if run not in self.ids():
            raise NoSuchRun(unknown("run", run, self.ids()[:20]))
        return self.root / run

    def lines(self) -> list[dict[str, Any]]:
        """One line a run, those that changed last first."""
        out = []
        for run in self.ids():
            try:
                out.append(self._entry(run).line)
            except NoSuchRun:  # deleted since the folders were listed
                continue
        return sorted(out, key=lambda line: (line["state"] != run_state.RUNNING, -line["changed"], line["run"]))

    def source(self, run: str) -> Source:
        """A run's files, as they are now.

        Raises:
            NoSuchRun: there is no such run.
        """
        return self._whole(run).source

    def trial(self, run: str, number: int) -> Trial:
        """A trial of a run.

        Raises:
            StudyError: there is no such run or trial.
        """
        for each in self.source(run).trials:
            if each.number == number:
                return each
        raise StudyError(f"run '{run}' has no trial {number}")

    def changes(self, run: str, have: str = "") -> dict[str, Any] | None:
        """What a page that holds the version `have` of a run must learn; None if nothing is new.

        `version` is what it holds then, `document` everything but the rows, `rows` the columns of all rows, or,
        where `added` is true, only those that are new or other than in `have`.

        Raises:
            NoSuchRun: there is no such run.
        """
        if have == f"{self._epoch}.{self._entry(run, keep=True).reads}":
            return None
        whole = self._whole(run)
        version = f"{self._epoch}.{whole.reads}"
        epoch, _, reads = have.rpartition(".")
        since = int(reads) if epoch == self._epoch and reads.isdigit() else 0
        added = whole.begun <= since <= whole.reads
        chosen = [cells for cells, changed in whole.rows.values() if not added or changed > since]
        columns = {name: [cells[at] for cells in chosen] for at, name in enumerate(whole.columns)}
        return {"version": version, "run": run, "document": whole.document, "added": added, "rows": as_json(columns)}

    # -- reading ---------------------------------------------------------------------------------------------

    def _entry(self, run: str, *, keep: bool = False) -> _Entry:
        """What is known of a run, read anew where its files have changed; `keep` what was read for its page."""
        folder = self.folder(run)
        with self._reading[run]:
            signature = _signature(folder)  # before the files: what changes in between is read again
            known = self._entries.get(run)
            if known is not None and known.signature == signature:
                return known
            source = _read(run, folder)
            line = _line(run, source, signature)
            made = _Entry(signature, line, next(self._counter), source if keep else None)
            with self._lock:
                self._entries[run] = made
            return made

    def _whole(self, run: str) -> _Whole:
        with self._reading[run]:
            entry = self._entry(run, keep=True)
            with self._lock:
                known = self._wholes.get(run)
                if known is not None:
                    self._wholes.move_to_end(run)
            if known is not None and known.reads == entry.reads:
                return known
            source, entry.source = entry.source or _read(run, self.folder(run)), None
            made = _gather(source, entry.reads, known)
            with self._lock:
                self._wholes[run] = made
                while len(self._wholes) > DOCUMENTS:
                    self._wholes.popitem(last=False)
            return made


def _read(run: str, folder: Path) -> Source:
    """What can be read of a run.

    Raises:
        NoSuchRun: its folder was deleted, moved or emptied since it was found.
    """
    try:
        return Source.read(folder, lenient=True)
    except StudyError as error:
        if holds_run(folder):
            return Source.unreadable(folder, str(error))
        raise NoSuchRun(f"run '{run}' is no longer there: its folder was deleted, moved or renamed") from None


def _signature(folder: Path) -> tuple[Any, ...]:
    """Changes whenever what a page shows of the run may have changed."""
    found: list[Any] = [run_state.is_running(folder)]
    for name in _FILES:
        try:
            status = os.stat(folder / name, follow_symlinks=False)
        except OSError:
            found.append(None)
        else:
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def _line(run: str, source: Source, signature: tuple[Any, ...]) -> dict[str, Any]:
    trials = source.trials
    winner = summary.best(trials)
    top = winner.throughput if winner else None
    times = [each[0] / 1e9 for each in signature[1:4] if each]
    if not times:
        try:
            times = [os.stat(source.folder / LEDGER, follow_symlinks=False).st_mtime]
        except OSError:
            times = [0.0]
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
            "changed": max(times),
            "problems": len(source.problems),
        }
    )


def _climb(trials: list[Trial], top: float) -> list[float | None]:
    """The best so far, up to the winner's: what was faster once did not hold up, or was not measured again."""
    return [each if each is None else min(each, top) for each in summary.best_so_far(trials)]


def _thin(series: list[float | None]) -> list[float | None]:
    if len(series) <= SPARKS:
        return series
    return [series[round(at * (len(series) - 1) / (SPARKS - 1))] for at in range(SPARKS)]


def _gather(source: Source, reads: int, before: _Whole | None) -> _Whole:
    columns = rows(source)
    names = list(columns)
    before = before if before is not None and before.columns == names else None
    old = before.rows if before is not None else {}
    found: dict[int, tuple[tuple[Any, ...], int]] = {}
    for cells in zip(*columns.values()):
        number = cells[names.index("trial")]
        was = old.get(number)
        found[number] = was if was is not None and was[0] == cells else (cells, reads)
    return _Whole(
        reads=reads,
        source=source,
        document=document(source, with_rows=False),
        rows=found,
        columns=names,
        begun=before.begun if before is not None and old.keys() <= found.keys() else reads,
    )
