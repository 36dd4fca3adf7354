"""A run's folder to read."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import MissingDependency, StudyError
from . import request, table
from .ledger import Ledger
from .lossy import lossy_of
from .measurement import Trial
from .names import LEDGER, RUN, TABLE, holds_run


class View:
    """A run to read, also while another process works on it: nothing is locked or written.

    Args:
        path: the run's folder.
        make_config: makes a configuration from a mapping of its values.

    Raises:
        StudyError: there is no run, or it cannot be read.
    """

    def __init__(self, path: str | Path, make_config: Callable[[Mapping[str, Any]], Any] = dict) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise StudyError(f"there is no folder '{path}'; give the --out of a run")
        if not holds_run(self.path):
            raise StudyError(f"'{path}' holds no run: neither {RUN} nor {LEDGER} nor {TABLE} is there")
        self.document = request.read(self.path / RUN) if (self.path / RUN).exists() else None
        """The contents of run.yaml; None if it is missing."""
        self.problems: list[str] = []
        """What is missing or damaged."""
        if self.document is None:
            self.problems.append(f"{self.path / RUN} is missing")
        self._trials = self._read(make_config)

    def trials(self) -> list[Trial]:
        """All trials in the order of their numbers, as they were when the view was made."""
        return list(self._trials)

    def _read(self, make_config: Callable[[Mapping[str, Any]], Any]) -> list[Trial]:
        storage = self.document.get("storage") if self.document else None
        source, lossy = storage or self.path / LEDGER, lossy_of(self.document)
        try:
            return Ledger.load(
                source,
                name=self.document["study"] if self.document else None,
                make_config=make_config,
                lossy=lossy,
            ).trials()
        except (StudyError, MissingDependency) as error:
            if not (self.path / TABLE).exists():
                if not storage and not (self.path / LEDGER).exists():
                    return []  # killed before the ledger was made
                raise
            self.problems.append(f"{error}; shown is what {TABLE} says")
        found, problems = table.read(self.path / TABLE)
        self.problems += problems
        return table.trials(found, make_config, lossy)
