"""Search for the runs below a folder."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

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


def find_folders(root: Path) -> list[str]:
    """Returns the folders below `root` that contain a run: sorted paths relative to it, with `/`; `.` is the folder itself.

    A run has a run.yaml, study.log or trials.csv that is a regular file. Links are not followed; hidden and unreadable
    folders are skipped, and the large ones of a training.
    """
    return sorted(_walk(root))


class Folders:
    """The runs below `root`, searched for at intervals. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._latest: list[str] = []
        self._until = float("-inf")
        self._lock = threading.Lock()

    def latest(self) -> list[str]:
        """Returns the runs of the last search."""
        with self._lock:
            begin = time.monotonic()
            if begin >= self._until:
                self._latest = find_folders(self.root)
                took = time.monotonic() - begin
                self._until = begin + took + max(DISCOVERY_SECONDS, 10 * took)
            return self._latest


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
