"""A folder that appears whole or not at all."""

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
"""How Rust says which error the system gave."""


WRITING = ".writing"
"""What the name of a folder ends in that is not whole yet."""


@contextmanager
def whole_folder(out: Path | str) -> Iterator[Path]:
    """A new folder beside `out`, which takes its place at the end of the `with`; an error removes it. What processes that were
    killed have left of the same is removed too.

    Raises:
        UsageError: `out` is a file or a folder with something in it, or cannot be written.
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
        made = Path(tempfile.mkdtemp(prefix=prefix, suffix=WRITING, dir=out.parent))
    except OSError as error:
        raise UsageError(f"cannot write to '{out.parent}': {error.strerror or error}; give another folder") from error
    lock = None
    try:
        with suppress(StudyError):  # where a file system has no locks nothing is swept either
            lock = FolderLock(made, OWNER)
        yield made
        made.chmod(0o777 & ~_mask())
        for each in sorted(made.rglob("*")):
            if each.is_file():
                with each.open("rb") as file:
                    os.fsync(file.fileno())
        (made / OWNER).unlink(missing_ok=True)
        os.replace(made, out)
        sync_folder(out.parent)
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        if isinstance(error, RedlineError) or not (reason := _refusal(error)):
            raise
        raise UsageError(f"cannot write '{out}': {reason}; nothing was left there") from error
    finally:
        if lock is not None:
            lock.release()
        if made.exists():
            shutil.rmtree(made, ignore_errors=True)


def _sweep(parent: Path, prefix: str) -> None:
    """Removes folders that are not whole and whose writers are gone, by the lock that each of these holds."""
    for each in parent.iterdir():
        ours = each.name.startswith(prefix) and each.name.endswith(WRITING) and not each.is_symlink()
        if ours and (each / OWNER).is_file():
            with suppress(StudyError):  # its writer lives
                lock = FolderLock(each, OWNER)
                remove(each)
                lock.release()


def _refusal(error: BaseException) -> str:
    """What the system said where it refused to write, behind what safetensors and torch make of it; empty where it did not."""
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
    """This process's mask of permissions, which can be read only by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
