"""Creates a folder atomically."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...base.errors import RedlineError, StudyError, UsageError
from ...base.lock import FolderLock
from ...base.reading import path_of
from ...base.scratch import OWNER, remove
from ...base.writing import sync_folder

_OS_ERROR = re.compile(r"(?:os error|code:) (\d+)")
"""Rust's form of the system's error number."""


WRITING = ".writing"
"""Suffix of the name of an unfinished folder."""


@contextmanager
def whole_folder(target: Path | str) -> Iterator[Path]:
    """Yields a new folder beside `target`, which is renamed to `target` at the end of the `with`; an error removes it.
    Leftovers of killed processes for the same `target` are removed too.

    Raises:
        UsageError: `target` is a file or a folder that is not empty, or cannot be written.
    """
    from safetensors import SafetensorError
    from torch.distributed.checkpoint import CheckpointException

    target = path_of(target).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        problem = "is not empty" if target.is_dir() else "is a file"
        raise UsageError(f"'{target}' {problem}, and a checkpoint is written to a new folder; give another")
    prefix = f".{target.name[:100]}."
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent, prefix)
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=WRITING, dir=target.parent))
    except OSError as error:
        raise UsageError(
            f"cannot write to '{target.parent}': {error.strerror or error}; give another folder"
        ) from error
    lock = None
    try:
        with suppress(StudyError):  # without locks in the file system, nothing is removed
            lock = FolderLock(folder, OWNER)
        yield folder
        folder.chmod(0o777 & ~_mask())
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        (folder / OWNER).unlink(missing_ok=True)
        os.replace(folder, target)
        sync_folder(target.parent)
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        if isinstance(error, RedlineError) or not (reason := _refusal(error)):
            raise
        raise UsageError(f"cannot write '{target}': {reason}; nothing was left there") from error
    finally:
        if lock is not None:
            lock.release()
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path, prefix: str) -> None:
    """Removes unfinished folders whose writers are gone, detected by the lock of each folder."""
    for folder in parent.iterdir():
        is_temporary = folder.name.startswith(prefix) and folder.name.endswith(WRITING) and not folder.is_symlink()
        if is_temporary and (folder / OWNER).is_file():
            with suppress(StudyError):  # its writer is running
                lock = FolderLock(folder, OWNER)
                remove(folder)
                lock.release()


def _refusal(error: BaseException) -> str | None:
    """The system's error message within an error of safetensors or torch; None if there is none."""
    visited: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        cause = pending.pop()
        if cause is None or cause in visited:
            continue
        if isinstance(cause, OSError):
            return cause.strerror or str(cause)
        if (number := _OS_ERROR.search(str(cause))) and type(cause).__name__ == "SafetensorError":
            return os.strerror(int(number[1]))
        visited.append(cause)
        pending += [
            cause.__cause__,
            cause.__context__,
            *(nested for nested, _ in getattr(cause, "failures", {}).values()),
        ]
    return None


def _mask() -> int:
    """This process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
