"""Reads the folders of searches. Each has the form of a `redline tune --out` folder."""

from pathlib import Path
from typing import Any

from ..base.errors import NotFound, StudyError, UsageError
from ..base.reading import read_inside
from ..frameworks import chosen_trial, render
from ..frameworks.target import Export
from ..results import View
from ..results.measurement import Trial
from ..results.names import TABLE, holds_run
from ..results.table import LARGEST_TABLE, parse, safe_lines
from ..space import Config
from ..tuner.result import make_result
from ..views.dashboard.library import Library
from ..views.report.document import as_json
from .logs import SEARCHES, folder_of


class Runs:
    """The folders of searches in a server's data. Thread-safe."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.searches = data / SEARCHES
        """Folder that contains the searches' folders."""

    def folder(self, search: str) -> Path:
        """Returns the folder of a search, which need not exist.

        Raises:
            NotFound: the id is malformed.
        """
        try:
            return folder_of(self.data, search)
        except UsageError as error:
            raise NotFound(str(error)) from None

    def table(self, search: str) -> bytes:
        """Returns the current trials.csv; empty if no trial has ended yet."""
        try:
            return safe_lines(read_inside(self.folder(search), TABLE, at_most=LARGEST_TABLE))
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise StudyError(f"{TABLE} of search {search} cannot be read: {error.strerror or error}") from None

    def rows(self, search: str) -> list[dict[str, Any]]:
        """Returns the trials that have ended, by the columns of trials.csv, without empty values."""
        if not (data := self.table(search)):
            return []
        columns, _ = parse(data, TABLE)
        rows = zip(*columns.values())
        return [as_json({name: each for name, each in zip(columns, row) if each is not None}) for row in rows]

    def trials(self, search: str) -> tuple[list[Trial], View | None]:
        """Returns the trials that have ended, and the view of the folder; None if it does not exist yet."""
        if not (self.folder(search) / TABLE).exists():
            return [], None
        view = View(self.folder(search), make_config=Config)
        return view.trials(), view

    def summary(self, search: str) -> dict[str, Any]:
        """Returns the results so far, in the form of `redline tune --json`."""
        trials, view = self.trials(search)
        found = make_result(trials, (), folder=None, ended="", interrupted=False).to_dict()
        out = {
            name: found[name]
            for name in ("best", "best_exact", "default", "gain", "gain_interval", "why", "trials", "failures")
        }
        # Without this machine's paths, and without that of a run whose trials are in the database.
        problems = [each for each in (view.problems if view else ()) if "in the storage" not in each]
        return as_json({**out, "problems": [each.replace(f"{self.searches}/", "") for each in problems]})

    def export(self, search: str, target: str, trial: int | None, form: str | None) -> Export:
        """Returns a trial's configuration, by default the winner's, as a file of an export target.

        Raises:
            UsageError: the target, form, trial or winner does not exist.
        """
        trials, view = self.trials(search)
        return render(target, chosen_trial(trials, trial), view.document if view else None, form=form)


class SearchLibrary(Library):
    """Gives the dashboard's pages access to the runs of searches, one at a time. It lists none, since the service
    lists searches from the database; only the folder of the requested search is read.
    """

    def __init__(self, runs: Runs) -> None:
        super().__init__(runs.searches)
        self._runs = runs

    def ids(self) -> list[str]:
        """Returns an empty list: the service lists searches."""
        return []

    def folder(self, run: str) -> Path:
        folder = self._runs.folder(run)
        if not holds_run(folder):
            raise NotFound(f"the search {run} has not begun, or was deleted")
        return folder
