"""The runs under a folder."""

import os
from collections.abc import Iterator
from pathlib import Path

from ..names import LEDGER, LOGS, RUN, TABLE

DEEPEST = 12
"""Levels below the folder after which is not looked further."""

MOST_FOLDERS = 50_000
"""Folders that are looked into at most."""

_NEVER = frozenset({"node_modules", "__pycache__", "site-packages", LOGS})


def runs_under(root: Path) -> list[str]:
    """Paths, relative to `root` with `/` and `.` for itself, of the folders that hold a run, sorted.

    A run is told by a run.yaml, study.log or trials.csv that is a regular file. Links are not followed, hidden
    folders not entered, unreadable ones passed over.
    """
    return sorted(_walk(root))


def _walk(root: Path) -> Iterator[str]:
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
        if files & {RUN, LEDGER, TABLE}:
            yield relative or "."
        if depth < DEEPEST:
            todo += [
                (f"{relative}/{each.name}" if relative else each.name, depth + 1)
                for each in entries
                if each.is_dir(follow_symlinks=False) and not each.name.startswith(".") and each.name not in _NEVER
            ]
