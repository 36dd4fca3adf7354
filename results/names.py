"""The files of a run's folder, by name."""

from pathlib import Path

LEDGER, TABLE, BEST, RUN, LOGS = "study.log", "trials.csv", "best.yaml", "run.yaml", "logs"


def holds_run(path: Path) -> bool:
    """Whether the folder holds (what is left of) a run."""
    return any((path / name).exists() for name in (RUN, LEDGER, TABLE))
