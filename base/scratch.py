"""Folders in the temporary directory that go with the process that made them."""

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from .errors import StudyError
from .lock import FolderLock

PREFIX = "redline-"
OWNER = ".owner"
"""The file in it that its owner holds. What has none, whatever its name, is somebody else's."""
YOUNG_S = 2.0
"""Age below which a folder that nobody holds is left alone: its owner may be about to, s."""


class Scratch:
    """A folder of one's own, `redline-KIND-...`, until `close` or the end of a `with`.

    It is locked as long as its owner lives, by which `sweep` knows those whose owners were killed.
    """

    def __init__(self, kind: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
        self._lock: FolderLock | None = None
        with suppress(StudyError):  # of a file system without locks nothing is swept either
            self._lock = FolderLock(self.path, OWNER)

    def close(self) -> None:
        """Removes it. May be called twice."""
        remove(self.path)
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc: object) -> None:
        self.close()


def remove(folder: Path) -> None:
    """Removes such a folder, the mark of its owner last: whoever is killed meanwhile leaves what `sweep` knows."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in [each for each in entries if each.name != OWNER]:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Removes the folders of this user whose owners are gone, however they ended."""
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [each for each in entries if each.name.startswith(PREFIX)]
    for entry in found:
        with suppress(OSError, StudyError):  # its owner lives, or another process sweeps as well
            if not entry.is_dir(follow_symlinks=False):
                continue
            about = os.lstat(os.path.join(entry.path, OWNER))
            if about.st_uid != os.geteuid() or time.time() - about.st_mtime < YOUNG_S:
                continue
            lock = FolderLock(Path(entry.path), OWNER)
            remove(Path(entry.path))
            lock.release()
