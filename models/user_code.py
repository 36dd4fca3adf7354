"""Reports errors in user code without a traceback."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..base.errors import RedlineError, WorkloadError

_HERE = str(Path(__file__).parent)


@contextmanager
def user_code_errors(what: str) -> Iterator[None]:
    """Converts any error of the code within to a WorkloadError: `WHAT failed: FILE:LINE: Type: message`.

    redline's own errors pass unchanged, because their messages are complete.
    """
    try:
        yield
    except RedlineError:
        raise
    except Exception as error:
        raise WorkloadError(f"{what} failed: {where(error)}") from error


def where(error: BaseException) -> str:
    """`FILE:LINE: Type: message` of an error; the line is the last one outside installed packages."""
    last = " ".join(traceback.format_exception_only(error)[-1].split())[:400]
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f"{each.filename}:{each.lineno}"
        for each in frames
        if not each.filename.startswith((_HERE, "<")) and "site-packages" not in each.filename
    ]
    return f"{own[-1]}: {last}" if own else last
