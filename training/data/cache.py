"""Folders that are made once, whichever of several processes and hosts comes first, and are whole or not there."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...base.writing import cannot_write, make_folder

ABOUT = "about.json"
"""In each such folder: what it was made of and what it holds, written last."""
ABANDONED_S = 3600.0
"""Time without a change after which the unfinished folder of another host counts as left behind, s."""


def made_once(cache: Path, wanted: Mapping[str, Any], make: Callable[[Path], Mapping[str, Any]]) -> Path:
    """The folder of what is wanted: found, or made while others that want it wait.

    It is made under another name and then renamed, so that a process that is killed leaves nothing that counts. They wait
    by flock(2), which a process that is gone does not hold. Where a file system has no locks, several make it, and the first
    that is done wins.

    Args:
        cache: the folder it will be in.
        wanted: all that it follows from, as plain data.
        make: fills an empty folder, and says what it holds as plain data; `files` there are its files' sizes in bytes.

    Raises:
        StudyError: the cache cannot be written.
    """
    key = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache / key
    if _whole(folder):
        return folder
    make_folder(cache)
    try:
        with _lock(cache / f".{key}.lock"):
            if not _whole(folder):
                shutil.rmtree(folder, ignore_errors=True)  # it was altered
                _sweep(cache, key)
                _make(folder, wanted, make)
    except OSError as error:
        raise cannot_write(cache, error) from error
    return folder


def read_about(folder: Path) -> dict[str, Any]:
    """What such a folder holds."""
    return dict(json.loads((folder / ABOUT).read_bytes()))


def _whole(folder: Path) -> bool:
    """Whether it is there, each file with its size."""
    try:
        sizes = read_about(folder)["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make(folder: Path, wanted: Mapping[str, Any], make: Callable[[Path], Mapping[str, Any]]) -> None:
    unfinished = folder.with_name(f".{folder.name}.{_host()}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        holds = make(unfinished)
        files = {}
        for each in sorted(unfinished.iterdir()):
            files[each.name] = each.stat().st_size
            _sync(each)
        about = {**holds, "wanted": wanted, "files": files}
        (unfinished / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
        _sync(unfinished / ABOUT)
        try:
            os.rename(unfinished, folder)
        except OSError:
            if not _whole(folder):  # without locks another may have been quicker
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _sweep(cache: Path, key: str) -> None:
    """Removes what killed processes left: of this host at once, since none of it holds the lock, of others by age."""
    for each in cache.glob(f".{key}.*.*"):
        mine = each.name.rpartition(".")[0] == f".{key}.{_host()}"
        with suppress(OSError):
            newest = max((part.stat().st_mtime for part in (each, *each.iterdir())), default=0.0)
            if (mine and not _running(each.name)) or time.time() - newest > ABANDONED_S:
                shutil.rmtree(each, ignore_errors=True)


def _running(name: str) -> bool:
    """Whether the process of this host whose number a name ends with is there."""
    number = name.rpartition(".")[2]
    return number.isdigit() and Path(f"/proc/{number}").exists() and int(number) != os.getpid()


def _host() -> str:
    return re.sub(r"[^\w-]", "_", socket.gethostname())
