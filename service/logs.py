"""The logs of a search's dry runs on the server: workers append to them, clients read them by offset."""

import os
import re
from pathlib import Path

from ..base.errors import UsageError
from ..base.reading import open_inside

SEARCHES = "searches"
"""Subfolder of the server's data that contains a folder for each search."""
_SEARCH = re.compile(r"[0-9a-f]{12}")
_NAME = re.compile(r"\d{1,12}(\.[a-z]{1,12})?\.log")
MOST_AT_ONCE = 1 << 20
"""Maximum size of one write or read, bytes."""


def folder_of(data: Path, search: str) -> Path:
    """Returns the folder of a search.

    Raises:
        UsageError: the id is malformed.
    """
    if not _SEARCH.fullmatch(search):
        raise UsageError(f"a search's id has 12 hexadecimal digits, but got {search[:40]!r}")
    return data / SEARCHES / search


def write_log(data: Path, search: str, name: str, offset: int, text: bytes) -> int:
    """Writes a part of a log and returns the log's new size, bytes. A part at offset 0 replaces the log.

    Raises:
        UsageError: the log's name is malformed, or the part is too long or leaves a gap.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"a log's name is like 7.log, but got {name[:40]!r}")
    if len(text) > MOST_AT_ONCE:
        raise UsageError(f"a part of a log has at most {MOST_AT_ONCE} bytes, but got {len(text)}")
    logs = folder_of(data, search) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    file = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(file).st_size
        if not 0 <= offset <= size:
            raise UsageError(
                f"the log {name} has {size} bytes: its next part must begin there, but got offset {offset}"
            )
        if offset == 0:
            os.ftruncate(file, 0)
        done = 0
        while done < len(text):
            done += os.pwrite(file, text[done:], offset + done)
        return offset + done
    finally:
        os.close(file)


def read_log(data: Path, search: str, name: str, start: int = 0, count: int = MOST_AT_ONCE) -> tuple[bytes, int]:
    """Returns a part of a log and the log's size, bytes; an empty part and 0 if it does not exist yet.

    Raises:
        UsageError: the log's name is malformed.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"a log's name is like 7.log, but got {name[:40]!r}")
    try:
        with open_inside(folder_of(data, search), f"logs/{name}") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(min(start, size))
            return file.read(min(count, MOST_AT_ONCE)), size
    except FileNotFoundError:
        return b"", 0
