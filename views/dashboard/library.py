"""Cache of the runs below a folder for the pages: a run is read again when its files change."""

import itertools
import math
import os
import threading
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import NotFound, StudyError, unknown
from ...base.reading import path_of
from ...knobs.lossy import lossy_values
from ...results import state as run_state, summary
from ...results.measurement import Trial
from ...results.names import BEST, LEDGER, RUN, TABLE, holds_run
from ..report import RunFiles, document, words
from ..report.document import as_json, rows
from .discover import Folders
from .trainings import Trainings

DOCUMENTS = 8
"""Runs of which the whole document is cached; of the others only the line in the list is."""

SPARKS = 48
"""Points of a sparkline at most."""

_FILES = (TABLE, RUN, BEST, ".lock")


@dataclass(slots=True)
class _Entry:
    """The cached state of a run."""

    signature: tuple[Any, ...]
    line: dict[str, Any]
    reads: int
    """Number of this reading, counted over all runs; part of the version that pages send."""
    source: RunFiles | None
    """The contents of the files, until a page takes them."""


@dataclass(slots=True)
class _Whole:
    """A run as its page shows it, with the reading in which each row last changed."""

    reads: int
    source: RunFiles
    document: dict[str, Any]
    rows: dict[int, tuple[tuple[Any, ...], int]]
    columns: list[str]
    begun: int
    """The reading since which rows were only added or changed, with the same columns."""


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
        self._folders = Folders(self.root)
        self.trainings = Trainings(self._folders)
        """The trainings under the same folder."""
        self._entries: dict[str, _Entry] = {}
        self._wholes: OrderedDict[str, _Whole] = OrderedDict()
        self._lock = threading.RLock()
        # A run is read by one thread at a time, so that no two readings get the same number.
        self._reading: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self._counter = itertools.count(1)
        # The version contains the start of this process, so that a page that is older requests everything again.
        self._epoch = f"{os.getpid():x}-{time.time_ns():x}"

    def ids(self) -> list[str]:
        """Returns the runs, as paths below the root."""
        found = list(self._folders.found().runs)
        with self._lock:
            for gone in self._entries.keys() - set(found):
                del self._entries[gone]
                self._wholes.pop(gone, None)
        return found

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
        out = []
        for run in self.ids():
            try:
                out.append(self._entry(run).line)
            except NotFound:  # deleted since the folders were listed
                continue
        return sorted(out, key=lambda line: (line["state"] != run_state.RUNNING, -line["changed"], line["run"]))

    def source(self, run: str) -> RunFiles:
        """Returns the files of a run as they are now.

        Raises:
            NotFound: the run does not exist.
        """
        return self._whole(run).source

    def trial(self, run: str, number: int) -> Trial:
        """Returns a trial of a run.

        Raises:
            NotFound: the run or trial does not exist.
        """
        for each in self.source(run).trials:
            if each.number == number:
                return each
        raise NotFound(f"run '{run}' has no trial {number}")

    def changes(self, run: str, have: str = "") -> dict[str, Any] | None:
        """Returns the changes of a run since the version `have` of a page; None if there are none.

        `version` is the new version, `document` everything but the rows. `rows` has the columns of all rows or, if
        `added` is true, only of those that are new or changed since `have`.

        Raises:
            NotFound: the run does not exist.
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
        """Returns the cached entry of a run, read again if its files have changed; `keep` keeps the contents for its
        page.
        """
        folder = self.folder(run)
        with self._reading[run]:
            signature = _signature(folder)  # before the files: a change in between is then read next time
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
            whole = _gather(source, entry.reads, known)
            with self._lock:
                self._wholes[run] = whole
                while len(self._wholes) > DOCUMENTS:
                    self._wholes.popitem(last=False)
            return whole


def _read(run: str, folder: Path) -> RunFiles:
    """Returns the readable contents of a run.

    Raises:
        NotFound: its folder was deleted, moved or emptied since it was found.
    """
    try:
        return RunFiles.read(folder, lenient=True)
    except StudyError as error:
        if holds_run(folder):
            return RunFiles.unreadable(folder, str(error))
        raise NotFound(f"run '{run}' no longer exists: its folder was deleted, moved or renamed") from None


def _signature(folder: Path) -> tuple[Any, ...]:
    """Returns a value that changes when the contents of the run's page may have changed."""
    return run_state.is_running(folder), *(run_state.stamp(folder / name) for name in _FILES)


def _line(run: str, source: RunFiles, signature: tuple[Any, ...]) -> dict[str, Any]:
    trials = source.trials
    winner = summary.best(trials)
    top = winner.throughput if winner else None
    stamps = [each for each in signature[1:4] if each] or [run_state.stamp(source.folder / LEDGER) or (0,)]
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
            "changed": max(each[0] for each in stamps) / 1e9,
            "problems": len(source.problems),
        }
    )


def _climb(trials: list[Trial], top: float) -> list[float | None]:
    """Returns the best so far, cut off at the winner's throughput: a faster first result was not confirmed."""
    return [each if each is None else min(each, top) for each in summary.best_so_far(trials)]


def _thin(series: list[float | None]) -> list[float | None]:
    if len(series) <= SPARKS:
        return series
    return [series[round(at * (len(series) - 1) / (SPARKS - 1))] for at in range(SPARKS)]


def _gather(source: RunFiles, reads: int, before: _Whole | None) -> _Whole:
    columns = rows(source)
    names = list(columns)
    before = before if before is not None and before.columns == names else None
    previous = before.rows if before is not None else {}
    found: dict[int, tuple[tuple[Any, ...], int]] = {}
    for cells in zip(*columns.values()):
        number = cells[names.index("trial")]
        known = previous.get(number)
        found[number] = known if known is not None and known[0] == cells else (cells, reads)
    return _Whole(
        reads=reads,
        source=source,
        document=document(source, with_rows=False),
        rows=found,
        columns=names,
        begun=before.begun if before is not None and previous.keys() <= found.keys() else reads,
    )
