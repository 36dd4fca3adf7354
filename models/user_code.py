"""Reports errors in user code without a traceback."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..base.errors import RedlineError, WorkloadError

_HERE = str(Path(__file__).parent)


@contextmanager
def user_code_errors(subject: str) -> Iterator[None]:
    """Converts any error of the code within to a WorkloadError: `SUBJECT failed: FILE:LINE: Type: message`.

    redline's own errors pass unchanged, because their messages are complete.
    """
    try:
        yield
    except RedlineError:
        raise
    except Exception as error:
        raise WorkloadError(f"{subject} failed: {located(error)}") from error


def located(error: BaseException) -> str:
    """`FILE:LINE: Type: message` of an error; the line is the last one outside installed packages."""
    message = " ".join(traceback.format_exception_only(error)[-1].split())[:400]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in frames
        if not frame.filename.startswith((_HERE, "<")) and "site-packages" not in frame.filename
    ]
    return f"{lines[-1]}: {message}" if lines else message
