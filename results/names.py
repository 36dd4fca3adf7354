"""Names of the files in a run's folder, and of new folders."""

from pathlib import Path

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
