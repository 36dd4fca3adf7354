"""Folders of runs and trainings: the names of their files, and whether a process works on a run, without touching its lock.

A training's folder contains:

train.yaml          the request, and the configurations with the steps from which they apply
log.jsonl           lines for steps at intervals, evaluations, checkpoints and other events
checkpoints/        the latest ones
data/               the corpus as tokens
logs/               output of ranks, one file per start
stop                while it exists, the training ends at its next step, with a checkpoint
out-of-memory.json  written if ranks of a launcher ran out of memory, with their configuration; removed by the next
                    start
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import StudyError
from ..base.reading import JsonLines, read_inside
from ..base.writing import cannot_write, write_yaml
from .schema import read_mapping

LEDGER, TABLE, BEST, RUN, LOGS = "study.log", "trials.csv", "best.yaml", "run.yaml", "logs"


def holds_run(path: Path) -> bool:
    """True if the folder contains a run, complete or partial."""
    return any((path / name).exists() for name in (RUN, LEDGER, TABLE))


def run_of(path: Path) -> Path:
    """Returns the folder of the run whose best.yaml is named; any other path unchanged."""
    return path.parent if path.name == BEST and path.is_file() and holds_run(path.parent) else path


def fresh_folder(parent: str, name: str) -> Path:
    """Returns the folder `name` in `parent`, or the first of NAME-2 and so on that does not exist."""
    path, number = Path(parent, name), 1
    while path.exists():
        number += 1
        path = Path(parent, f"{name}-{number}")
    return path


RUNNING, FINISHED, NOTHING, STOPPED, PLAN = "running", "finished", "nothing", "stopped", "plan"
"""The states of a run.

`running`: a process holds the lock of the run. `finished`: its search ended by itself, and best.yaml covers all its trials
and has a winner; `nothing`: it has none. `plan`: a best.yaml or plan by itself. `stopped`: any other run.
"""

_FRESH_SECONDS = 180.0
"""Age of the last change up to which a run on another machine counts as running, s."""


def is_running(folder: Path) -> bool:
    """Returns True if a process works on the run in `folder`.

    On this machine the kernel's list of locks is read (proc(5), /proc/locks). A run that another machine writes on a
    shared disk counts as running while its table or ledger change.
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
    changed = max((changed_at[0] for name in (TABLE, LEDGER) if (changed_at := stamp(folder / name))), default=0)
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


DOCUMENT, LOG, CHECKPOINTS = "train.yaml", "log.jsonl", "checkpoints"
DATA, STOP = "data", "stop"
FORMAT = 1
_END = 1 << 20
"""Size of the end of a log that is read for its last steps, bytes."""


def holds_training(path: Path) -> bool:
    """True if the folder contains a training."""
    return (path / DOCUMENT).is_file()


def read_document(path: Path) -> dict[str, Any]:
    """Returns the contents of train.yaml.

    Raises:
        StudyError: it is missing, damaged, or of another version.
    """
    file = path / DOCUMENT
    try:
        document = read_mapping(path, DOCUMENT)
    except FileNotFoundError:
        raise StudyError(f"'{path}' contains no training: there is no {DOCUMENT}") from None
    shapes = {"asked": dict, "strategies": list}
    if any(not isinstance(document.get(k), t) for k, t in shapes.items()):
        raise StudyError(f"'{file}' is damaged: it must contain {' and '.join(shapes)}")
    if document.get("format") != FORMAT:
        raise StudyError(f"'{file}' has format {document.get('format')!r}, but this version reads {FORMAT}")
    if not document["strategies"] or not all(_is_strategy(strategy) for strategy in document["strategies"]):
        raise StudyError(f"'{file}' is damaged: strategies must be a list of steps with their configurations")
    return document


def _is_strategy(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("step"), int)
        and isinstance(value.get("devices"), int)
        and isinstance(value.get("configuration"), dict)
    )


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Writes train.yaml.

    Raises:
        StudyError: it cannot be written; the old file is unchanged.
    """
    try:
        write_yaml(path / DOCUMENT, {"format": FORMAT, **document})
    except OSError as error:
        raise cannot_write(path, error) from error


def highest_step(folder: Path) -> int:
    """Returns the highest step in the end of the log; 0 if there is none."""
    reader = JsonLines(folder, LOG, max(0, log_size(folder) - _END))
    steps = (line.get("step") for line in reader.lines() if line.get("kind") in ("step", "evaluation"))
    return max((step for step in steps if isinstance(step, int)), default=0)


def log_size(folder: Path) -> int:
    """Returns the size of the log, bytes; 0 if there is none."""
    path = folder / LOG
    return path.stat().st_size if path.exists() else 0
