"""A run's folder to read: only files inside it, and a storage elsewhere only where the user names it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..base.errors import StudyError
from ..base.reading import path_of, read_inside
from ..knobs.lossy import lossy_of
from . import best, request, table
from .ledger import Ledger
from .measurement import Trial
from .names import LEDGER, RUN, TABLE, holds_run
from .records import LARGEST_LEDGER


class View:
    """A run to read, also while another process works on it: nothing is locked or written.

    Trials are those of the ledger; where it cannot be read, those of trials.csv with the re-measurements of best.yaml.

    Args:
        path: the run's folder.
        make_config: makes a configuration from a mapping of its values.
        storage: where the ledger is, if not in the folder: as for `Ledger.load`. What run.yaml names is never opened
            by itself.

    Raises:
        StudyError: there is no run, or it cannot be read.
        MissingDependency: the storage needs a package that is not installed.
    """

    def __init__(
        self,
        path: str | Path,
        make_config: Callable[[Mapping[str, Any]], Any] = dict,
        *,
        storage: str | None = None,
    ) -> None:
        self.path = path_of(path)
        if not self.path.is_dir():
            raise StudyError(f"there is no folder '{path}'; give the --out of a run")
        if not holds_run(self.path):
            raise StudyError(f"'{path}' holds no run: neither {RUN} nor {LEDGER} nor {TABLE} is there")
        self.document: dict[str, Any] | None = None
        """The contents of run.yaml; None if it is missing."""
        self.problems: list[str] = []
        """What is missing or damaged."""
        if (self.path / RUN).exists():
            self.document, self.problems = request.read(self.path)
        else:
            self.problems.append(f"{self.path / RUN} is missing")
        self._trials = self._read(make_config, storage)

    def trials(self) -> list[Trial]:
        """All trials in the order of their numbers, as they were when the view was made."""
        return list(self._trials)

    def _read(self, make_config: Callable[[Mapping[str, Any]], Any], storage: str | None) -> list[Trial]:
        name = self.document["study"] if self.document else None
        lossy = lossy_of(self.document)
        if storage is not None:
            ledger = Ledger.load(storage, name=name, make_config=make_config, lossy=lossy)
            self.problems += ledger.problems
            return ledger.trials()
        elsewhere = (self.document or {}).get("storage")
        try:
            if elsewhere:
                raise StudyError(
                    f"the trials are in the storage '{elsewhere}', which is opened only where you name it, by --storage"
                )
            data = read_inside(self.path, LEDGER, at_most=LARGEST_LEDGER)
            where = f"'{self.path / LEDGER}'"
            ledger = Ledger.parse(data, where=where, name=name, make_config=make_config, lossy=lossy)
        except (OSError, StudyError) as error:
            said = str(error)
            if isinstance(error, FileNotFoundError):
                said = f"there is no ledger at '{self.path / LEDGER}'"
            elif isinstance(error, OSError):
                said = f"cannot read '{self.path / LEDGER}': {error.strerror or error}"
            if not (self.path / TABLE).exists():
                if isinstance(error, FileNotFoundError):
                    return []  # killed before the ledger was made
                raise StudyError(said) from error
            self.problems.append(f"{said}; shown is what {TABLE} says")
        else:
            self.problems += ledger.problems
            return ledger.trials()
        try:
            data = read_inside(self.path, TABLE, at_most=table.LARGEST_TABLE)
        except OSError as error:
            raise StudyError(f"cannot read '{self.path / TABLE}': {error.strerror or error}") from error
        columns, problems = table.parse(data, self.path / TABLE)
        self.problems += problems
        trials = table.trials_of(table.sane(columns, self.problems), make_config, lossy)
        judged = best.confirmed(trials, best.read(self.path, self.problems))
        return trials if judged is None else judged
