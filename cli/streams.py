"""Standard output and error that cannot be written as usual: closed, without a reader, or in an encoding without a character."""

import codecs
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

_SPELLED = {"±": "+-", "×": "x", "…": "...", "–": "-", "—": "-", "µ": "u", "→": "->", "≥": ">=", "≤": "<="}
"""Replacements of characters in redline's own output for encodings without them, such as ASCII."""


class ReaderGone(Exception):
    """The reader of standard output, such as `head`, has closed it."""


class Output:
    """Standard output whose reader may end first.

    It then raises `ReaderGone` instead of BrokenPipeError, for which rich ends the process with code 1. After
    `outlive_reader` the output continues on standard error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.continues = False
        """True if the output continues on standard error."""

    def write(self, output: str) -> int:
        with self._reader_may_be_gone():
            self._stream.write(output)
        return len(output)

    def flush(self) -> None:
        with self._reader_may_be_gone():
            self._stream.flush()

    @contextlib.contextmanager
    def _reader_may_be_gone(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError as error:
            if not self.continues:
                _discard(self._stream.fileno())
                raise ReaderGone from error
            os.dup2(2, self._stream.fileno())
            try:
                self._stream.flush()  # the rest of the output is still in its buffer
            except BrokenPipeError:  # both went to the same reader
                _discard(self._stream.fileno(), 2)
                self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Makes standard output and error usable while a command runs."""
    _open_closed()
    stdout = sys.stdout
    codecs.register_error("redline", _spelled)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure") and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="redline")
    sys.stdout = cast(TextIO, Output(stdout))
    try:
        yield
    finally:
        sys.stdout = stdout


def outlive_reader() -> None:
    """Lets the output of a long run continue on standard error when its reader ends."""
    if isinstance(sys.stdout, Output):
        sys.stdout.continues = True


def _discard(*numbers: int) -> None:
    """Lets descriptors discard what is written to them."""
    null = os.open(os.devnull, os.O_WRONLY)
    for number in numbers:
        os.dup2(null, number)
    os.close(null)


def _open_closed() -> None:
    """Opens the standard descriptors that are closed, so that no other file gets their numbers: output goes to standard
    error, if that is open.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
            os.set_inheritable(number, True)
            if number == 1:
                with contextlib.suppress(OSError):
                    os.dup2(2, 1)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)


def _spelled(error: UnicodeError) -> tuple[str, int]:
    """Replaces characters that an encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_SPELLED.get(char, "?") for char in lacking), error.end
