"""What searches leave on disk, read for whoever asks: a folder a search, as `redline tune --out` leaves one."""

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
from ..views.dashboard.library import Library, NoSuchRun
from ..views.report.document import as_json
from .logs import SEARCHES, folder_of


class Runs:
    """The folders of searches under a server's data. May be used from several threads.

    Args:
        data: the server's folder.
    """

    def __init__(self, data: Path) -> None:
        self.data = data
        """The server's folder."""
        self.searches = data / SEARCHES
        """Folders of searches."""

    def folder(self, search: str) -> Path:
        """The folder of a search, whether it is there or not.

        Raises:
            NotFound: that is no search's id.
        """
        try:
            return folder_of(self.data, search)
        except UsageError as error:
            raise NotFound(str(error)) from None

    def table(self, search: str) -> bytes:
        """trials.csv as it is now; empty where no trial has ended yet."""
        try:
            return safe_lines(read_inside(self.folder(search), TABLE, at_most=LARGEST_TABLE))
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise StudyError(f"{TABLE} of search {search} cannot be read: {error.strerror or error}") from None

    def rows(self, search: str) -> list[dict[str, Any]]:
        """The trials that have ended, by the columns of trials.csv; what is empty is left out."""
        if not (data := self.table(search)):
            return []
        columns, _ = parse(data, TABLE)
        rows = zip(*columns.values())
        return [as_json({name: each for name, each in zip(columns, row) if each is not None}) for row in rows]

    def trials(self, search: str) -> tuple[list[Trial], View | None]:
        """The trials that have ended, and what else the folder says."""
        if not (self.folder(search) / TABLE).exists():
            return [], None
        view = View(self.folder(search), make_config=Config)
        return view.trials(), view

    def summary(self, search: str) -> dict[str, Any]:
        """What came of it so far, as `redline tune --json` says it."""
        trials, view = self.trials(search)
        found = make_result(trials, (), folder=None, ended="", interrupted=False).to_dict()
        out = {
            name: found[name]
            for name in ("best", "best_exact", "default", "gain", "gain_interval", "why", "trials", "failures")
        }
        return as_json({**out, "problems": _told(view.problems if view else (), self.searches)})

    def export(self, search: str, target: str, trial: int | None, form: str | None) -> Export:
        """A trial's configuration, the winner's where none is named, as a file of a target.

        Raises:
            UsageError: there is no such target, form, trial or winner.
        """
        trials, view = self.trials(search)
        return render(target, chosen_trial(trials, trial), view.document if view else None, form=form)


class SearchLibrary(Library):
    """The runs of searches as the dashboard's pages show them, one by one: the list is the database's, and no folder but that
    of the search in question is looked into, however many there are.

    Args:
        runs: the folders.
    """

    def __init__(self, runs: Runs) -> None:
        super().__init__(runs.searches)
        self._runs = runs

    def ids(self) -> list[str]:
        """None: searches are listed by the service."""
        return []

    def folder(self, run: str) -> Path:
        try:
            folder = self._runs.folder(run)
        except NotFound as error:
            raise NoSuchRun(str(error)) from None
        if not holds_run(folder):
            raise NoSuchRun(f"the search {run} has not begun, or was deleted")
        return folder


def _told(problems: Any, root: Path) -> list[str]:
    """Problems without this machine's paths; that trials are in the database is none."""
    return [each.replace(f"{root}/", "") for each in problems if "in the storage" not in each]
