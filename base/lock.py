"""Lock that gives one process a run's folder. The kernel releases it when the process ends."""

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path

from .errors import StudyError
from .option import option
from .writing import cannot_write


class FolderLock:
    """Locks a file in the folder by flock(2) until `release`, or until the process ends.

    A fork would share the lock and keep it after its parent was killed; forks made by Python release it.

    Raises:
        StudyError: another process holds the lock (the message names it), or the folder cannot be written.
    """

    def __init__(self, folder: Path, name: str = ".lock", *, instead: str | None = None) -> None:
        self.path = folder / name
        self._fd = -1
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise cannot_write(folder, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _owner(fd)
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                advice = instead or f"wait for it, end it, or give another {option('out')}"
                raise StudyError(f"'{folder}' is in use by {owner}; {advice}") from None
            raise StudyError(
                f"the file system of '{folder}' cannot lock files ({error.strerror}); give an {option('out')} on a local disk"
            ) from error
        self._fd = fd
        try:
            os.ftruncate(fd, 0)
            details = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            }
            os.pwrite(fd, json.dumps(details).encode() + b"\n", 0)
        except OSError as error:
            self.release()
            raise cannot_write(folder, error) from error
        this = weakref.ref(self)

        def release_in_child() -> None:
            if (lock := this()) is not None:
                lock.release()

        os.register_at_fork(after_in_child=release_in_child)

    def release(self) -> None:
        """Releases the folder. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)  # not LOCK_UN: in a fork that would take the lock from the parent


def owner_host(text: str) -> str | None:
    """Returns the host of a lock's owner, given the content of its file; None if it is not in the file."""
    try:
        host = json.loads(text)["host"]
    except (ValueError, KeyError, TypeError):
        return None
    return host if isinstance(host, str) else None


def _owner(fd: int) -> str:
    try:
        owner = json.loads(os.pread(fd, 4096, 0))
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # the owner is writing it
        return "another process"
