"""Search for the runs and trainings below a folder."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...results.names import LEDGER, LOGS, RUN, TABLE
from ...results.trained import CHECKPOINTS, DATA, DOCUMENT

DISCOVERY_SECONDS = 1.0
"""Seconds for which a list of folders is reused, or ten times the duration of the search if that is longer."""

DEEPEST = 12
"""Depth below the root to which folders are searched."""

MOST_FOLDERS = 50_000
"""Folders that are searched at most."""

_OF_RUNS = frozenset({RUN, LEDGER, TABLE})
_NEVER = frozenset({"node_modules", "__pycache__", "site-packages", LOGS})


class FoundFolders(NamedTuple):
    """The runs and trainings below a folder: sorted paths relative to it, with `/`; `.` is the folder itself."""

    runs: list[str]
    """Folders of searches."""
    trainings: list[str]
    """Folders with a train.yaml."""


def find_folders(root: Path) -> FoundFolders:
    """Returns the folders below `root` that contain a run or a training.

    A run has a run.yaml, study.log or trials.csv that is a regular file. Links are not followed; hidden and unreadable
    folders are skipped.
    """
    folders = list(_walk(root))
    runs = sorted(path for path, files in folders if files & _OF_RUNS)
    return FoundFolders(runs, sorted(path for path, files in folders if DOCUMENT in files))


class Folders:
    """The runs and trainings below `root`, searched for at intervals. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._latest = FoundFolders([], [])
        self._until = float("-inf")
        self._lock = threading.Lock()

    def latest(self) -> FoundFolders:
        """Returns the runs and trainings of the last search."""
        with self._lock:
            begin = time.monotonic()
            if begin >= self._until:
                self._latest = find_folders(self.root)
                took = time.monotonic() - begin
                self._until = begin + took + max(DISCOVERY_SECONDS, 10 * took)
            return self._latest


def _walk(root: Path) -> Iterator[tuple[str, set[str]]]:
    """Yields the folders that contain a run or training, with the names of their files."""
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
        if files & {*_OF_RUNS, DOCUMENT}:
            yield relative or ".", files
        never = _NEVER | {CHECKPOINTS, DATA} if DOCUMENT in files else _NEVER
        if depth < DEEPEST:
            todo += [
                (f"{relative}/{entry.name}" if relative else entry.name, depth + 1)
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and entry.name not in never
            ]
