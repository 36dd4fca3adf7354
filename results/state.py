"""Detection of running processes on a run without touching its lock."""

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.reading import read_inside
from .names import LEDGER, TABLE

RUNNING, FINISHED, NOTHING, STOPPED, TABLE_ONLY = "running", "finished", "nothing", "stopped", "table"
"""The states of a run.

`running`: a process holds the lock of the run. `finished`: its search ended by itself, and best.yaml covers all its trials
and has a winner; `nothing`: it has none. `table`: there is only a table. `stopped`: any other run.
"""

_FRESH_SECONDS = 180.0
"""Age of the last change up to which a run on another machine counts as running, s."""


def is_running(folder: Path, written: tuple[str, ...] = (TABLE, LEDGER)) -> bool:
    """Returns True if a process works on the run in `folder`, or on another folder that is locked in the same way.

    On this machine the kernel's list of locks is read (proc(5), /proc/locks). A run that another machine writes on a
    shared disk counts as running while its files `written` change.
    """
    try:
        lock_file = os.stat(folder / ".lock", follow_symlinks=False)
    except OSError:
        return False
    try:
        holder = json.loads(read_inside(folder, ".lock", at_most=4096))
    except (OSError, ValueError):
        holder = None
    host = holder.get("host") if isinstance(holder, dict) else None
    if host is None or host == socket.gethostname():
        return _locked(lock_file)
    changed = max((changed_at[0] for name in written if (changed_at := stamp(folder / name))), default=0)
    return time.time() - changed / 1e9 < _FRESH_SECONDS


def state_of(running: bool, best: Mapping[str, Any] | None) -> str:
    """Returns the state of a run.

    Args:
        running: a process works on it.
        best: the contents of best.yaml; None without one, or if it does not cover all trials.
    """
    if running:
        return RUNNING
    if best is None or best.get("stopped"):
        return STOPPED
    return FINISHED if best.get("best") is not None else NOTHING


def _locked(file: os.stat_result) -> bool:
    here = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    try:
        held = Path("/proc/locks").read_text()
    except OSError:
        return False
    # 1: FLOCK  ADVISORY  WRITE 4711 fe:00:12345 0 EOF
    lines = (line.split() for line in held.splitlines())
    return any(len(line) > 5 and line[1] == "FLOCK" and line[5] == here for line in lines)


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Returns a value that changes with the file, its time of change in ns first; None without a file."""
    try:
        about = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino
