"""The runs below a folder for the pages: a run is read again when its files change."""

import hashlib
import itertools
import math
import os
import threading
import time
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

SPARKS = 48
"""Largest number of points of a sparkline."""

_FILES = (LEDGER, RUN, BEST, ".lock")


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
        self._lock = threading.Lock()
        self._lines: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        """The line of each run in the list, with the signature that it was read at."""

    def ids(self) -> list[str]:
        """Returns the runs, as paths below the root."""
        with self._lock:
            begin = time.monotonic()
            if begin >= self._listed_until:
                self._ids = find_folders(self.root)
                took = time.monotonic() - begin
                self._listed_until = begin + took + max(DISCOVERY_SECONDS, 10 * took)
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
        lines = {}
        for run in self.ids():
            try:
                signature = _signature(self.folder(run))  # before the files: a change in between is then read next time
                line = self._lines.get(run)
                if line is None or line[0] != signature:
                    line = signature, _line(run, self.source(run), signature)
                lines[run] = line
            except NotFound:  # deleted since the folders were listed
                continue
        self._lines = lines
        contents = [line for _, line in lines.values()]
        return sorted(contents, key=lambda line: (line["state"] != RUNNING, -line["changed"], line["run"]))

    def source(self, run: str) -> Source:
        """Returns the files of a run as they are now.

        Raises:
            NotFound: the run does not exist.
        """
        return _read(run, self.folder(run))

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
        version = hashlib.sha256(repr(_signature(self.folder(run))).encode()).hexdigest()[:16]
        if have == version:
            return None
        return {"version": version, "run": run, "document": document(self.source(run))}


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
    runs = []
    for folder, folders, files in itertools.islice(os.walk(root), MOST_FOLDERS):
        relative = os.path.relpath(folder, root)
        regular = {name for name in {*_OF_RUNS, DOCUMENT} & {*files} if not os.path.islink(os.path.join(folder, name))}
        if regular & _OF_RUNS:
            runs.append(relative)
        never = _NEVER | {CHECKPOINTS, DATA} if DOCUMENT in regular else _NEVER
        depth = 0 if relative == "." else relative.count("/") + 1
        folders[:] = [name for name in folders if depth < DEEPEST and name[0] != "." and name not in never]
    return sorted(runs)
