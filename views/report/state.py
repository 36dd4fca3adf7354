"""Whether somebody is working on a run, found out without touching its lock."""

import json
import os
import socket
import time
from pathlib import Path

from ...base.reading import read_inside
from ...results.names import LEDGER, TABLE

RUNNING, FINISHED, NOTHING, STOPPED, TABLE_ONLY = "running", "finished", "nothing", "stopped", "table"
"""A process holds the run's lock; best.yaml tells of all its trials, with a winner or without one; neither; there is
only a table."""

_FRESH_SECONDS = 180.0


def is_running(folder: Path, written: tuple[str, ...] = (TABLE, LEDGER)) -> bool:
    """Whether a process works on the run in `folder`, or on whatever else is locked like one.

    On this machine the kernel's list of locks tells (proc(5), /proc/locks). A run that another machine writes
    on a shared disk counts as running while its files `written` change.
    """
    try:
        found = os.stat(folder / ".lock", follow_symlinks=False)
    except OSError:
        return False
    try:
        who = json.loads(read_inside(folder, ".lock", at_most=4096))
    except (OSError, ValueError):
        who = None
    host = who.get("host") if isinstance(who, dict) else None
    if host is None or host == socket.gethostname():
        return _locked(found)
    return time.time() - _changed(folder, written) < _FRESH_SECONDS


def _locked(file: os.stat_result) -> bool:
    here = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    try:
        held = Path("/proc/locks").read_text()
    except OSError:
        return False
    # 1: FLOCK  ADVISORY  WRITE 4711 fe:00:12345 0 EOF
    lines = (line.split() for line in held.splitlines())
    return any(len(line) > 5 and line[1] == "FLOCK" and line[5] == here for line in lines)


def _changed(folder: Path, written: tuple[str, ...]) -> float:
    times = [0.0]
    for name in written:
        try:
            times.append(os.stat(folder / name, follow_symlinks=False).st_mtime)
        except OSError:
            continue
    return max(times)
