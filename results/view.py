"""A run's folder for reading. Only files inside it are opened, and another storage only if the user names it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.errors import StudyError
from ..base.option import option
from ..base.reading import path_of, read_inside
from ..knobs.lossy import lossy_of
from . import best, request
from .ledger import Ledger
from .measurement import Trial
from .names import BEST, LEDGER, RUN, TABLE, holds_run, run_of
from .records import LARGEST_LEDGER
from .trained import LOG, holds_training


def instead_of_run(path: Path) -> str:
    """Returns the end of a message about a folder without a run: the training or the runs that it contains; empty if it
    contains neither.
    """
    if holds_training(path):
        return f"; it contains a training, whose steps are in '{path / LOG}'"
    below = sorted(file.parent.name for name in (RUN, TABLE) for file in path.glob(f"*/{name}"))
    return f"; there is one in '{path / below[0]}'" if below else ""


class View:
    """A run for reading, also while another process works on it. Nothing is locked or written. A best.yaml outside its run,
    or a plan, is a run of one trial.

    Args:
        path: the run's folder, or a best.yaml.
        make_config: makes a configuration from a mapping of its values.
        storage: storage of the ledger if it is not in the folder; as for `Ledger.load`. A storage named in run.yaml is
            never opened automatically.

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
        self.path = run_of(path_of(path))
        self.problems: list[str] = []
        """Missing or damaged parts."""
        if best.is_plan(self.path):
            plan = best.load(self.path)
            self.document: dict[str, Any] | None = dict(plan.document)
            """The contents of run.yaml; None if it is missing."""
            self._trials = [replace(plan.trial, config=make_config(plan.trial.config))]
            return
        if self.path.is_file():
            raise StudyError(f"'{path}' is a file; give the folder of a run, or its {BEST}")
        if not self.path.is_dir():
            raise StudyError(f"there is no folder '{path}'; give the {option('out')} of a run")
        if not holds_run(self.path):
            raise StudyError(
                f"'{path}' contains no run: it has neither {RUN} nor {LEDGER} nor {TABLE}{instead_of_run(self.path)}"
            )
        self.document = None
        if (self.path / RUN).exists():
            self.document, self.problems = request.read(self.path)
        else:
            self.problems.append(f"{self.path / RUN} is missing")
        self._trials = self._read(make_config, storage)

    def trials(self) -> list[Trial]:
        """Returns all trials by number, as of the creation of the view."""
        return list(self._trials)

    def _read(self, make_config: Callable[[Mapping[str, Any]], Any], storage: str | None) -> list[Trial]:
        name = self.document["study"] if self.document else None
        lossy = lossy_of(self.document)
        if storage is not None:
            ledger = Ledger.load(storage, name=name, make_config=make_config, lossy=lossy)
            self.problems += ledger.problems
            return ledger.trials()
        named_storage = (self.document or {}).get("storage")
        if named_storage:
            raise StudyError(
                f"the trials are in the storage '{named_storage}', which is opened only if you name it with {option('storage')}"
            )
        try:
            data = read_inside(self.path, LEDGER, at_most=LARGEST_LEDGER)
            origin = f"'{self.path / LEDGER}'"
            ledger = Ledger.parse(data, origin=origin, name=name, make_config=make_config, lossy=lossy)
        except FileNotFoundError:
            if (self.path / TABLE).exists():
                raise StudyError(f"there is no ledger at '{self.path / LEDGER}'") from None
            return []  # killed before the ledger was created
        except OSError as error:
            raise StudyError(f"cannot read '{self.path / LEDGER}': {error.strerror or error}") from error
        self.problems += ledger.problems
        return ledger.trials()
