"""Writing into a run's folder by atomic replacement."""

import contextlib
import enum
import errno
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import yaml

from .errors import StudyError
from .option import option
from .reading import path_of

MIB = 1024 * 1024
MIN_FREE_MIB = 16
"""Least free disk space to start a run, MiB."""


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replaces the file at `path` by `data` in one step: a reader sees either the old file or the new one.

    Args:
        path: the file; its folder exists.
        data: the new contents.
        durable: True if the contents must survive a power cut. Costs two fsyncs, of the file and of its folder.

    Raises:
        OSError: the file cannot be written; the old file is unchanged.
    """
    # A fixed temporary name: a killed process leaves at most one file behind, which the next write overwrites.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            write_all(file, data)
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            sync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):  # the caller needs the error above
            temporary.unlink()
        raise


def sync_folder(path: Path) -> None:
    """Makes the file names in a folder survive a power cut (fsync).

    Raises:
        OSError: the fsync failed.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not support it
            raise
    finally:
        os.close(fd)


def open_plain(path: Path, flags: int) -> BinaryIO:
    """Opens a file of a run's folder for unbuffered writing, never through a link (O_NOFOLLOW).

    Raises:
        OSError: the file cannot be opened, is a link, or is not regular.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(
                error.errno, f"{path.name} is a symbolic link, and links are not followed", str(path)
            ) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file", str(path))
    return os.fdopen(fd, "r+b" if flags & os.O_RDWR else "wb", buffering=0)


def write_all(file: BinaryIO, data: bytes) -> None:
    """Writes all of `data` to an unbuffered file.

    Raises:
        OSError: the write failed.
    """
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[file.write(remaining) :]


def make_folder(path: Path) -> bool:
    """Creates a run's folder with its parents; returns True if it is new.

    Raises:
        StudyError: the path is a file, the folder cannot be created, or its disk has less than `MIN_FREE_MIB` free.
            Nothing is created in these cases.
    """
    path = path_of(path)
    if path.exists() and not path.is_dir():
        raise StudyError(f"'{path}' is a file, but a run needs a folder; give another {option('out')}")
    existing = next(ancestor for ancestor in (path, *path.absolute().parents) if ancestor.exists())
    try:
        free = free_mib(existing)
        if free < MIN_FREE_MIB:
            raise StudyError(
                f"only {free:.1f} MiB are free on the disk of '{path}', and a run needs {MIN_FREE_MIB} MiB "
                f"to start; free some space or give another {option('out')}"
            )
        new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        return new
    except OSError as error:
        raise cannot_write(path, error) from error


def free_mib(path: Path) -> float:
    """Free space on the disk of a file or folder, MiB."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize / MIB


def cannot_write(path: Path, error: OSError) -> StudyError:
    """Returns the error for a folder that cannot be written, with the system's message."""
    return StudyError(
        f"cannot write to '{path}': {error.strerror or error}; make it writable or give another {option('out')}"
    )


def as_data(value: Any) -> Any:
    """Returns `value` in the types of YAML and JSON: dict, list, str, int, float, bool, None.

    Raises:
        TypeError: it contains a value of another type.
    """
    if isinstance(value, enum.Enum):
        return as_data(value.value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): as_data(element) for key, element in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(as_data(element) for element in value)
    if isinstance(value, Sequence):
        return [as_data(element) for element in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return as_data(value.tolist())
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written as YAML")


def write_yaml(path: Path, document: Mapping[str, Any]) -> None:
    """Writes `document` as YAML, atomically and durably, with its keys in order.

    Raises:
        OSError: the file cannot be written; the old file is unchanged.
    """
    content = yaml.safe_dump(as_data(document), sort_keys=False, allow_unicode=True, width=110)
    write_atomic(path, content.encode("utf-8", "backslashreplace"))
