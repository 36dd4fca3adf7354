"""The logs of a search's dry runs on the server: written by workers as they grow, read by offset."""

import os
import re
from pathlib import Path

from ..base.errors import UsageError
from ..base.reading import open_inside

SEARCHES = "searches"
"""Folder of the server's data that holds a folder for each search."""
_SEARCH = re.compile(r"[0-9a-f]{12}")
_NAME = re.compile(r"\d{1,12}(\.[a-z]{1,12})?\.log")
MOST_AT_ONCE = 1 << 20
"""Bytes that are written or read at once."""


def folder_of(data: Path, search: str) -> Path:
    """The folder of a search.

    Raises:
        UsageError: what is given is no search's id.
    """
    if not _SEARCH.fullmatch(search):
        raise UsageError(f"a search is called by 12 hexadecimal digits, but got {search[:40]!r}")
    return data / SEARCHES / search


def write_log(data: Path, search: str, name: str, offset: int, text: bytes) -> int:
    """Writes a part of a log, and returns how long it is then; a part at 0 begins it anew.

    Raises:
        UsageError: no log is called that, or the part is too long or leaves a gap.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"a log is called like 7.log, but got {name[:40]!r}")
    if len(text) > MOST_AT_ONCE:
        raise UsageError(f"a part of a log has at most {MOST_AT_ONCE} bytes, but got {len(text)}")
    logs = folder_of(data, search) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    file = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(file).st_size
        if not 0 <= offset <= size:
            raise UsageError(f"the log {name} has {size} bytes, so that its next part begins there, not at {offset}")
        if offset == 0:
            os.ftruncate(file, 0)
        done = 0
        while done < len(text):
            done += os.pwrite(file, text[done:], offset + done)
        return offset + done
    finally:
        os.close(file)


def read_log(data: Path, search: str, name: str, start: int = 0, count: int = MOST_AT_ONCE) -> tuple[bytes, int]:
    """A part of a log, and how long all of it is so far; nothing where it has not begun.

    Raises:
        UsageError: no log is called that.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"a log is called like 7.log, but got {name[:40]!r}")
    try:
        with open_inside(folder_of(data, search), f"logs/{name}") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(min(start, size))
            return file.read(min(count, MOST_AT_ONCE)), size
    except FileNotFoundError:
        return b"", 0
