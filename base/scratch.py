"""Temporary folders that are removed with the process that created them."""

import os
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from .errors import StudyError
from .lock import FolderLock, owner_host

PREFIX = "redline-"
OWNER = ".owner"
"""The file in a folder that its owner locks. A folder without it belongs to another program, whatever its name."""
YOUNG_S = 2.0
"""Age below which an unlocked folder is kept, because its owner may be about to lock it, s."""


class Scratch:
    """A private temporary folder, `redline-KIND-...`, that exists until `close` or the end of a `with`.

    Its owner holds a lock on it, so that `sweep` can recognise the folders of killed owners.
    """

    def __init__(self, kind: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
        self._lock: FolderLock | None = None
        with suppress(StudyError):  # `sweep` needs the lock too, so it skips file systems without locks
            self._lock = FolderLock(self.path, OWNER)

    def close(self) -> None:
        """Removes the folder. May be called twice."""
        remove(self.path)
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc: object) -> None:
        self.close()


def remove(folder: Path) -> None:
    """Removes such a folder, the owner file last, so that `sweep` recognises the rest if the process is killed
    meanwhile.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in [entry for entry in entries if entry.name != OWNER]:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Removes this user's folders whose owners on this host have ended."""
    with os.scandir(tempfile.gettempdir()) as entries:
        folders = [entry for entry in entries if entry.name.startswith(PREFIX)]
    for entry in folders:
        with suppress(OSError, StudyError):  # its owner is alive, or another process is sweeping
            if not entry.is_dir(follow_symlinks=False):
                continue
            about = os.lstat(os.path.join(entry.path, OWNER))
            if about.st_uid != os.geteuid() or time.time() - about.st_mtime < YOUNG_S:
                continue
            with open(os.path.join(entry.path, OWNER), encoding="utf-8") as file:
                if owner_host(file.read()) not in (None, socket.gethostname()):
                    continue  # a shared folder, whose locks may hold on one machine only
            lock = FolderLock(Path(entry.path), OWNER)
            remove(Path(entry.path))
            lock.release()
