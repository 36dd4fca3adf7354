"""Reading files that strangers named: only regular ones, only inside a folder, through no symbolic link."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO


class Outside(OSError):
    """A path leads out of its folder, through a link, or to something that is no regular file."""


@contextlib.contextmanager
def open_inside(folder: Path, relative: str) -> Iterator[BinaryIO]:
    """Opens the file `relative` of `folder` for reading, unbuffered by anything but Python.

    Each step of the path is opened from the one before and refuses links (openat(2), O_NOFOLLOW), so that
    nothing changes between the check and the use. A pipe or device is refused rather than waited for.

    Args:
        folder: what the path must stay inside; may itself be reached through links.
        relative: path from there, with `/`.

    Raises:
        Outside: the path is absolute, contains `..`, meets a link, or is no regular file.
        OSError: it is not there or cannot be read.
    """
    parts = PurePosixPath(relative).parts
    if not parts or "\0" in relative or relative.startswith("/") or ".." in parts:
        raise Outside(f"'{relative}' is not inside the folder")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for number, part in enumerate(parts, start=1):
            try:
                below = os.open(part, flags | (os.O_DIRECTORY if number < len(parts) else 0), dir_fd=at)
            except OSError as error:
                if _is_link(part, at):
                    raise Outside(f"'{relative}' is a symbolic link or lies behind one") from error
                raise
            os.close(at)
            at = below
        if not stat.S_ISREG(os.fstat(at).st_mode):
            raise Outside(f"'{relative}' is not a regular file")
        file = os.fdopen(at, "rb")
        at = -1
    finally:
        if at >= 0:
            os.close(at)
    with file:
        yield file


def read_inside(folder: Path, relative: str, *, at_most: int) -> bytes:
    """The bytes of a file inside `folder`.

    Args:
        folder: as for `open_inside`.
        relative: as for `open_inside`.
        at_most: bytes after which reading it is refused.

    Raises:
        Outside: as for `open_inside`.
        OSError: it cannot be read, or is larger.
    """
    with open_inside(folder, relative) as file:
        data = file.read(at_most + 1)
    if len(data) > at_most:
        raise OSError(f"'{relative}' is larger than {at_most >> 20} MiB")
    return data


def tail_inside(folder: Path, relative: str, *, at_most: int) -> tuple[str, int]:
    """The end of a text file inside `folder`, from a line's start, and the size of the whole, bytes.

    Raises:
        Outside: as for `open_inside`.
        OSError: it cannot be read.
    """
    with open_inside(folder, relative) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - at_most))
        data = file.read(at_most)
    if size > at_most:
        data = data[data.find(b"\n") + 1 :]
    return data.decode("utf-8", "replace"), size


def _is_link(name: str, at: int) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(name, dir_fd=at).st_mode)
    except OSError:
        return False
