"""What searches leave on disk, read for whoever asks: a folder a search, as `redline tune --out` leaves one."""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import NotFound, StudyError
from ..reading import open_inside, read_inside
from ..results import View
from ..results.export import chosen_trial, render
from ..results.export.target import Export
from ..results.measurement import Trial
from ..results.names import LOGS, TABLE
from ..results.report.document import as_json
from ..results.table import LARGEST_TABLE, parse, safe_lines
from ..space import Config
from ..tuner.result import make_result

SEARCHES = "searches"
"""Folder of the server's data in which the folders of searches are."""
LOG_NAME = re.compile(r"\d{1,12}(\.[a-z]{1,12})?\.log", re.ASCII)
"""What a log is called."""
LARGEST_LOG = 64 << 20
"""Bytes of a log that are kept."""
_ID = re.compile("[0-9a-f]{12}")
_REMEMBERED = 10_000


class Runs:
    """The folders of searches under a server's data. May be used from several threads.

    Args:
        data: the server's folder.
    """

    def __init__(self, data: Path) -> None:
        self.root = data / SEARCHES
        """Where they are."""
        self._counts: dict[str, tuple[tuple[int, int], int]] = {}
        self._lock = threading.Lock()

    def folder(self, search: str) -> Path:
        """The folder of a search, whether it is there or not.

        Raises:
            NotFound: that is no search's id.
        """
        if not _ID.fullmatch(search):
            raise NotFound(f"there is no search '{search[:40]}': an id has 12 hexadecimal digits")
        return self.root / search

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

    def count(self, search: str) -> int:
        """How many trials have ended."""
        try:
            status = os.stat(self.folder(search) / TABLE, follow_symlinks=False)
        except OSError:
            return 0
        signature = (status.st_mtime_ns, status.st_size)
        with self._lock:
            known = self._counts.get(search)
        if known is not None and known[0] == signature:
            return known[1]
        count = len(self.rows(search))
        with self._lock:
            if len(self._counts) >= _REMEMBERED:
                self._counts.clear()
            self._counts[search] = signature, count
        return count

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
        out = {name: found[name] for name in ("best", "best_exact", "default", "gain", "why", "trials")}
        return as_json({**out, "problems": _told(view.problems if view else (), self.root)})

    def export(self, search: str, target: str, trial: int | None, form: str | None) -> Export:
        """A trial's configuration, the winner's where none is named, as a file of a target.

        Raises:
            UsageError: there is no such target, form, trial or winner.
        """
        trials, view = self.trials(search)
        return render(target, chosen_trial(trials, trial), view.document if view else None, form=form)

    @contextmanager
    def log(self, search: str, trial: int) -> Iterator[BinaryIO]:
        """A trial's log, open for reading.

        Raises:
            NotFound: it has none, or none yet.
        """
        try:
            with open_inside(self.folder(search), f"{LOGS}/{trial}.log") as file:
                yield file
        except OSError:
            raise NotFound(f"search {search} has no log of trial {trial}, or none yet") from None

    def keep(self, search: str, name: str, offset: int, data: bytes) -> int:
        """Writes a piece of a log where it belongs; how many bytes there are now.

        Pieces may come twice; one that begins beyond the end is not written, and the answer says from where to send.

        Raises:
            NotFound: a log is not called so.
        """
        if not LOG_NAME.fullmatch(name):
            raise NotFound(f"no log is called '{name[:40]}'; a log is called like 7.log")
        folder = self.folder(search) / LOGS
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(folder / name, flags, 0o644), "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if offset <= size and offset < LARGEST_LOG:
                file.seek(offset)
                file.write(data[: LARGEST_LOG - offset])
                size = max(size, file.tell())
        return size


def _told(problems: Any, root: Path) -> list[str]:
    """Problems without this machine's paths; that trials are in the database is none."""
    return [each.replace(f"{root}/", "") for each in problems if "in the storage" not in each]
