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
def whole_folder(out: Path | str) -> Iterator[Path]:
    """Yields a new folder beside `out`, which is renamed to `out` at the end of the `with`; an error removes it.
    Leftovers of killed processes for the same `out` are removed too.

    Raises:
        UsageError: `out` is a file or a folder that is not empty, or cannot be written.
    """
    from safetensors import SafetensorError
    from torch.distributed.checkpoint import CheckpointException

    out = path_of(out).absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "holds something already" if out.is_dir() else "is a file"
        raise UsageError(f"'{out}' {what}, and a checkpoint is written to a new folder; give another")
    prefix = f".{out.name[:100]}."
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out.parent, prefix)
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=WRITING, dir=out.parent))
    except OSError as error:
        raise UsageError(f"cannot write to '{out.parent}': {error.strerror or error}; give another folder") from error
    lock = None
    try:
        with suppress(StudyError):  # without locks in the file system, nothing is removed
            lock = FolderLock(folder, OWNER)
        yield folder
        folder.chmod(0o777 & ~_mask())
        for each in sorted(folder.rglob("*")):
            if each.is_file():
                with each.open("rb") as file:
                    os.fsync(file.fileno())
        (folder / OWNER).unlink(missing_ok=True)
        os.replace(folder, out)
        sync_folder(out.parent)
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        if isinstance(error, RedlineError) or not (reason := _refusal(error)):
            raise
        raise UsageError(f"cannot write '{out}': {reason}; nothing was left there") from error
    finally:
        if lock is not None:
            lock.release()
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path, prefix: str) -> None:
    """Removes unfinished folders whose writers are gone, detected by the lock of each folder."""
    for each in parent.iterdir():
        is_temporary = each.name.startswith(prefix) and each.name.endswith(WRITING) and not each.is_symlink()
        if is_temporary and (each / OWNER).is_file():
            with suppress(StudyError):  # its writer is running
                lock = FolderLock(each, OWNER)
                remove(each)
                lock.release()


def _refusal(error: BaseException) -> str:
    """The system's error message within an error of safetensors or torch; empty if there is none."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or each in seen:
            continue
        if isinstance(each, OSError):
            return each.strerror or str(each)
        if (number := _OS_ERROR.search(str(each))) and type(each).__name__ == "SafetensorError":
            return os.strerror(int(number[1]))
        seen.append(each)
        waiting += [each.__cause__, each.__context__, *(cause for cause, _ in getattr(each, "failures", {}).values())]
    return ""


def _mask() -> int:
    """This process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
