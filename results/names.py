"""Names of the files in a run's folder."""

from pathlib import Path

LEDGER, TABLE, BEST, RUN, LOGS = "study.log", "trials.csv", "best.yaml", "run.yaml", "logs"


def holds_run(path: Path) -> bool:
    """True if the folder contains a run, complete or partial."""
    return any((path / name).exists() for name in (RUN, LEDGER, TABLE))
