"""A folder that appears whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...base.errors import UsageError
from ...base.reading import path_of


@contextmanager
def whole_folder(out: Path | str) -> Iterator[Path]:
    """A new folder beside `out`, which takes its place at the end of the `with`; an error removes it.

    Raises:
        UsageError: `out` is a file or a folder with something in it, or cannot be written.
    """
    out = path_of(out).absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "holds something already" if out.is_dir() else "is a file"
        raise UsageError(f"'{out}' {what}, and a checkpoint is written to a new folder; give another")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name[:100]}.", dir=out.parent))
    except OSError as error:
        raise UsageError(f"cannot write to '{out.parent}': {error.strerror or error}; give another folder") from error
    try:
        yield made
        made.chmod(0o777 & ~_mask())
        for each in sorted(made.rglob("*")):
            if each.is_file():
                with each.open("rb") as file:
                    os.fsync(file.fileno())
        os.replace(made, out)
    except OSError as error:
        raise UsageError(f"cannot write '{out}': {error.strerror or error}; nothing was left there") from error
    finally:
        if made.exists():
            shutil.rmtree(made, ignore_errors=True)


def _mask() -> int:
    """This process's mask of permissions, which can be read only by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
