"""Searches that are deleted, one by one or after so many days: their rows, and their folders."""

import shutil
from collections.abc import Callable
from contextlib import suppress

from ..base.errors import StudyError, UsageError
from ..base.lock import FolderLock
from ..results import request
from ..results.names import RUN
from .runs import Runs
from .store import Store


def deleted(store: Store, runs: Runs, search: str, forget: Callable[[str], object]) -> None:
    """Deletes a search that has ended, with its folder and its ledger.

    Args:
        store: of the searches.
        runs: their folders.
        search: which.
        forget: deletes the ledger of a name.

    Raises:
        NotFound: there is no such search.
        UsageError: it has not ended, or its searcher is about to.
    """
    folder = runs.folder(search)
    lock = None
    if folder.is_dir():
        try:
            lock = FolderLock(folder)
        except StudyError:
            raise UsageError(f"the searcher of {search} has not ended yet; delete the search in a moment") from None
    try:
        store.delete_search(search)
        if (folder / RUN).is_file():
            with suppress(StudyError):  # a run.yaml that cannot be read names no ledger
                forget(request.read(folder)[0]["study"])
        if lock is not None:
            shutil.rmtree(folder)
    finally:
        if lock is not None:
            lock.release()
