"""The runs and the trainings under a folder."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...results.names import LEDGER, LOGS, RUN, TABLE
from ...results.trained import CHECKPOINTS, DATA, DOCUMENT

DISCOVERY_SECONDS = 1.0
"""How long a list of folders is believed, or ten times as long as it took to make, in a folder that is huge."""

DEEPEST = 12
"""Levels below the folder after which is not looked further."""

MOST_FOLDERS = 50_000
"""Folders that are looked into at most."""

_OF_RUNS = frozenset({RUN, LEDGER, TABLE})
_NEVER = frozenset({"node_modules", "__pycache__", "site-packages", LOGS})


def runs_under(root: Path) -> list[str]:
    """Paths, relative to `root` with `/` and `.` for itself, of the folders that hold a run, sorted.

    A run is told by a run.yaml, study.log or trials.csv that is a regular file. Links are not followed, hidden
    folders not entered, unreadable ones passed over.
    """
    return found_under(root).runs


class Found(NamedTuple):
    """What lies under a folder, as paths like those of `runs_under`."""

    runs: list[str]
    """Folders of searches."""
    trainings: list[str]
    """Folders of trainings, which are told by a train.yaml."""


def found_under(root: Path) -> Found:
    """The runs as `runs_under` has them, and trainings, which are found alike."""
    found = list(_walk(root))
    runs = sorted(path for path, files in found if files & _OF_RUNS)
    return Found(runs, sorted(path for path, files in found if DOCUMENT in files))


class Folders:
    """What lies under `root`, looked for now and then. May be used from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._found = Found([], [])
        self._until = float("-inf")
        self._lock = threading.Lock()

    def found(self) -> Found:
        """What was there the last time that it was looked for."""
        with self._lock:
            begin = time.monotonic()
            if begin >= self._until:
                self._found = found_under(self.root)
                took = time.monotonic() - begin
                self._until = begin + took + max(DISCOVERY_SECONDS, 10 * took)
            return self._found


def _walk(root: Path) -> Iterator[tuple[str, set[str]]]:
    """Folders that hold something, and the names of their files."""
    todo = [("", 0)]
    seen = 0
    while todo and seen < MOST_FOLDERS:
        relative, depth = todo.pop()
        seen += 1
        try:
            entries = list(os.scandir(root / relative))
        except OSError:  # gone in between, or not ours to read
            continue
        files = {each.name for each in entries if each.is_file(follow_symlinks=False)}
        if files & {*_OF_RUNS, DOCUMENT}:
            yield relative or ".", files
        never = _NEVER | {CHECKPOINTS, DATA} if DOCUMENT in files else _NEVER
        if depth < DEEPEST:
            todo += [
                (f"{relative}/{each.name}" if relative else each.name, depth + 1)
                for each in entries
                if each.is_dir(follow_symlinks=False) and not each.name.startswith(".") and each.name not in never
            ]
