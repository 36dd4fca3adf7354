"""Reads the folders of searches. Each has the form of a `redline tune --out` folder."""

import os
import re
from pathlib import Path
from typing import Any

from ..base.errors import NotFound, StudyError
from ..base.reading import open_inside, read_inside
from ..frameworks import chosen_trial, render
from ..frameworks.export_input import Export
from ..results import View
from ..results.measurement import Trial
from ..results.names import TABLE, holds_run
from ..results.table import LARGEST_TABLE
from ..space import Config
from ..tuner.result import make_result
from ..views.dashboard.library import Library
from ..views.report.page import as_json

SEARCHES = "searches"
"""Subfolder of the server's data that contains a folder for each search."""
LARGEST_PART = 1 << 20
"""Largest part of a log that is read at once, bytes."""
_SEARCH = re.compile(r"[0-9a-f]{12}")


def folder_of(data: Path, search: str) -> Path:
    """Returns the folder of a search, which need not exist.

    Raises:
        NotFound: the id is malformed.
    """
    if not _SEARCH.fullmatch(search):
        raise NotFound(f"a search's id has 12 hexadecimal digits, but got {search[:40]!r}")
    return data / SEARCHES / search


class Runs:
    """The folders of searches in a server's data. Thread-safe."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.searches = data / SEARCHES
        """Folder that contains the searches' folders."""

    def folder(self, search: str) -> Path:
        """Returns the folder of a search, as `folder_of`."""
        return folder_of(self.data, search)

    def log(self, search: str, trial: int, begin: int = 0, count: int = LARGEST_PART) -> tuple[bytes, int]:
        """Returns a part of a trial's log and the log's size, bytes; an empty part and 0 if it does not exist yet."""
        try:
            with open_inside(self.folder(search), f"logs/{trial}.log") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(min(begin, size))
                return file.read(min(count, LARGEST_PART)), size
        except FileNotFoundError:
            return b"", 0

    def table(self, search: str) -> bytes:
        """Returns the current trials.csv; empty if no trial has ended yet."""
        try:
            return read_inside(self.folder(search), TABLE, at_most=LARGEST_TABLE)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise StudyError(f"{TABLE} of search {search} cannot be read: {error.strerror or error}") from None

    def trials(self, search: str) -> tuple[list[Trial], View | None]:
        """Returns the trials that have ended, and the view of the folder; None if it does not exist yet."""
        if not (self.folder(search) / TABLE).exists():
            return [], None
        view = View(self.folder(search), make_config=Config)
        return view.trials(), view

    def summary(self, search: str) -> dict[str, Any]:
        """Returns the results so far, in the form of `redline tune --json`."""
        trials, view = self.trials(search)
        result = make_result(trials, (), folder=None, ended="", interrupted=False).to_dict()
        names = ("best", "best_exact", "default", "gain", "gain_interval", "why", "trials", "failures")
        # Without this machine's paths.
        problems = [problem.replace(f"{self.searches}/", "") for problem in (view.problems if view else ())]
        return as_json({**{name: result[name] for name in names}, "problems": problems})

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
