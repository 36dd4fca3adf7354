"""The ledger's file: Optuna's journal, extended to survive kill -9 and a full disk.

Imports Optuna, so the ledger imports this module only when one is opened.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend

from ..base._optuna import LOCK_FILE_SUFFIX, RENAME_FILE_SUFFIX, get_lock_file
from ..base.errors import StudyError
from ..base.interrupts import late_interrupts
from ..base.writing import Reserve, open_plain, write_all

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


class Journal(JournalFileBackend):
    """Optuna's journal file with complete records only.

    Outcomes (`together`) are forced to the disk. Other records survive the end of the process at once, and a power
    failure as soon as an outcome follows them. If the start of a trial is lost, the trial is proposed again. Appending
    uses Optuna's own lock, so that its dashboard can write notes meanwhile.

    Args:
        path: the file; created if it does not exist.
        reserve: disk space that `together` may use when the disk is full.
    """

    def __init__(self, path: Path, reserve: Reserve | None = None) -> None:
        # Optuna's lock is a symbolic link to this path. A relative one would dangle, and waiting for it would
        # never end (JournalFileSymlinkLock.acquire).
        super().__init__(str(path.absolute()))
        self._reserve = reserve
        self._together: list[dict[str, Any]] | None = None
        self.trouble: OSError | None = None
        """Why the reserve had to be used; None if it was not."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Collects records within the `with` and writes them in one go at its end, using the reserve if necessary.
        They are on the disk when it returns.

        Raises:
            OSError: they cannot be written; the file is unchanged.
        """
        self._together = []
        try:
            yield
            records = self._together
        finally:
            self._together = None
        try:
            self._append(records, durable=True)
        except OSError as error:
            if not (self._reserve and self._reserve.release()):
                raise
            self._append(records, durable=True)
            self.trouble = error

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends records, all of them or none.

        Raises:
            OSError: they cannot be written; the file is unchanged.
        """
        if self._together is None:
            self._append(logs)
        else:
            self._together += logs

    def recover(self) -> None:
        """Refills the reserve after it was used.

        Raises:
            OSError: there is still no space.
        """
        if self.trouble is not None and self._reserve is not None:
            self._reserve.fill()
            self.trouble = None

    def close(self) -> None:
        """Releases the reserve. May be called twice."""
        if self._reserve is not None:
            self._reserve.release()

    def _append(self, records: list[dict[str, Any]], *, durable: bool = False) -> None:
        data = b"".join(json.dumps(each, separators=(",", ":")).encode() + b"\n" for each in records)
        # An interrupt while Optuna releases its lock would leave the lock inconsistent.
        with late_interrupts(), get_lock_file(self._lock), open_plain(Path(self._file_path), _APPEND) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                write_all(file, data)
                if durable:
                    os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise


def repair(path: Path) -> int:
    """Cuts off an unfinished record left by a killed process or a power failure, and returns the number of bytes cut.

    Only for the process that has the folder's lock. A complete record is never touched.

    Raises:
        OSError: the file cannot be read or written.
    """
    with open_plain(path, os.O_RDWR) as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = _line_start(file, end)
            file.seek(start)
            line = file.read(end - start)
            # After a power failure a file system may fill unwritten parts with zeros.
            if line.endswith(b"\n") and b"\0" not in line:
                break
            end = start
        if end < size:
            file.truncate(end)
    return size - end


def _line_start(file: Any, end: int, chunk: int = 64 * 1024) -> int:
    """Returns the offset of the line whose last byte is at `end - 1`."""
    position = end - 1
    while position > 0:
        step = min(chunk, position)
        file.seek(position - step)
        found = file.read(step).rfind(b"\n")
        if found >= 0:
            return position - step + found + 1
        position -= step
    return 0


def break_stale_lock(path: Path, patience_s: float = 0.3) -> bool:
    """Removes a lock beside the journal that a killed process left. Returns True if there was one.

    Optuna itself would wait 30 s for it. Only for the process that has the folder's lock: a lock that does not change
    within `patience_s` is then stale (Optuna's dashboard keeps it for milliseconds).
    """
    lock = path.with_name(path.name + LOCK_FILE_SUFFIX)
    for half_released in path.parent.glob(f"{lock.name}*{RENAME_FILE_SUFFIX}"):
        half_released.unlink(missing_ok=True)
    found = _identity(lock)
    if found is None:
        return False
    time.sleep(patience_s)
    if _identity(lock) != found:
        return False
    lock.unlink(missing_ok=True)
    return True


def _identity(lock: Path) -> tuple[int, int] | None:
    try:
        stat = lock.lstat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_ctime_ns


def damage(path: Path, error: Exception) -> StudyError:
    """Returns the error for a journal that Optuna cannot read, with its first invalid line."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                whole = isinstance(json.loads(line), dict)
            except ValueError:
                whole = False
            if not whole:
                return StudyError(
                    f"line {number} of '{path}' is not a record of a study: {line[:60]!r}; "
                    "restore the file, delete that line, or start with another --out"
                )
    return StudyError(
        f"'{path}' is not a journal that Optuna can read ({type(error).__name__}: {error}); "
        "restore it or start with another --out"
    )
