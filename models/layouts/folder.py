"""Creates a folder atomically."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...base.errors import UsageError
from ...base.reading import path_of
from ...base.writing import sync_folder
from ..architecture import one_line


@contextmanager
def whole_folder(target: Path | str) -> Iterator[Path]:
    """Yields a new folder beside `target`, which is renamed to `target` at the end of the `with`; an error removes it.

    A killed process leaves a hidden folder, `.NAME.*.writing`.

    Raises:
        UsageError: `target` is a file or a folder that is not empty, or cannot be written.
    """
    from safetensors import SafetensorError

    target = path_of(target).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        problem = "is not empty" if target.is_dir() else "is a file"
        raise UsageError(f"'{target}' {problem}, and a checkpoint is written to a new folder; give another")
    folder = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex[:8]}.writing")
    try:
        folder.mkdir(parents=True)
        yield folder
        for file in folder.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        os.replace(folder, target)
        sync_folder(target.parent)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or one_line(error)
        raise UsageError(f"cannot write '{target}': {reason}; nothing was left there") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
