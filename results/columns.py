"""The columns of trials.csv and the format of their values."""

import csv
import io
import math
import re
from collections.abc import Iterable
from typing import Any

from ..base.errors import StudyError
from .measurement import Trial, plain_scalar

FIXED = (
    "trial", "status", "reason", "throughput", "unit", "samples_per_second", "tokens_per_second",
    "step_ms", "step_ms_spread", "peak_memory_mib", "memory_limit_mib", "tflops_per_device", "mfu",
    "predicted_throughput", "predicted_memory_mib", "devices", "sampler", "loss", "expert_load", "expert_dropped",
    "started", "seconds_total", "seconds_overhead", "seconds_build", "seconds_warmup", "seconds_measure",
    "emulated_ranks", "seconds_modelled", "log",
)  # fmt: skip
"""The columns before the knobs, in order. `started` is Unix time, s."""

TEXTS = frozenset({"status", "reason", "unit", "sampler", "emulated_ranks", "log"})
"""The fixed columns that contain text."""

INTEGERS = frozenset({"trial", "devices"})
"""The fixed columns that contain whole numbers; the rest are real."""

PENDING = "pending"
"""Status shown for a trial that has not ended."""
KNOB = "knob."
"""Prefix of the name of a knob's column."""

MAX_TEXT = 2000
"""Length at which a text is cut, characters. The trial's log and the ledger contain all of it."""

_BREAKS = re.compile("[\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029]+")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufeff]")
_FORMULA = re.compile("'*[=+\\-@\t]")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|-inf")
_DIGITS = {"loss": 9}  # as many as float32 has: losses of two runs are compared


def header(knobs: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of all columns of a study with these knobs."""
    return (*FIXED, *(KNOB + name for name in knobs))


def value(trial: Trial, column: str) -> Any:
    """Returns a trial's value in a column; None if it has none."""
    if column.startswith(KNOB):
        return trial.config.get(column.removeprefix(KNOB))
    if column == "trial":
        return trial.number
    if column in ("sampler", "predicted_throughput", "predicted_memory_mib"):
        return getattr(trial, column)
    if column == "status":
        return PENDING if trial.pending else str(trial.measured.status)
    return None if trial.pending else getattr(trial.measurement, column)


def line(cells: Iterable[str]) -> str:
    """Returns one line of CSV with its line end. Cells are quoted if necessary. A cell that a spreadsheet would run
    as a formula gets an apostrophe in front, which `unquoted` removes.
    """
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(map(_quoted, cells))
    return buffer.getvalue()


def _quoted(text: str) -> str:
    # Source: OWASP, CSV injection. A negative number is not a formula.
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def unquoted(text: str) -> str:
    """Returns the cell before it was passed to `line`."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def row(trial: Trial, knobs: Iterable[str]) -> str:
    """Returns the line of a finished trial.

    Raises:
        StudyError: the configuration has a knob without a column.
    """
    knobs = tuple(knobs)
    extra = [name for name in trial.config if name not in knobs]
    if extra:
        raise StudyError(
            f"trial {trial.number} has the knob '{extra[0]}', which has no column in trials.csv; "
            f"its columns were fixed for {', '.join(knobs)}"
        )
    return line(cell(plain_scalar(value(trial, name)), name) for name in header(knobs))


def cell(value: Any, name: str = "") -> str:
    """Returns a value as text: empty for None, `true` or `false` for a boolean, one line for a text.

    Knobs are written exactly. Measured numbers have 7 significant digits, the loss 9, `started` milliseconds.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return fold(value)
    if isinstance(value, int) or name.startswith(KNOB):
        return repr(value)
    if name == "started" and math.isfinite(value):
        return f"{value:.3f}"
    return number(value, _DIGITS.get(name, 7))


def knob_text(trial: Trial, name: str) -> str:
    """Returns a knob's value for people, marked if it is lossy."""
    shown_value = cell(trial.config.get(name), KNOB)
    return f"{shown_value} (lossy)" if name in trial.lossy else shown_value


def number(value: float, digits: int = 7) -> str:
    """Returns a real number with that many significant digits, without an exponent unless it is tiny or huge."""
    if not math.isfinite(value):
        return str(float(value))
    digits_text = f"{value:.{digits}g}"
    if "e" in digits_text and 1 <= abs(value) < 1e15:
        return f"{value:.0f}"
    return digits_text


def speed(throughput: float, unit: str) -> str:
    """Returns a throughput for people: `12,345 tokens/s`. If its unit is the reciprocal of a quantity, returns the
    quantity.
    """
    if unit.startswith("1/") and throughput:
        throughput, unit = 1 / throughput, unit.removeprefix("1/")
    digits = f"{throughput:,.0f}" if throughput >= 1000 else number(throughput, 4)
    return f"{digits} {unit}".strip()


def printable(text: str) -> str:
    """Escapes control characters other than tabs and line breaks, so that none reaches a terminal."""
    return _CONTROLS.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def fold(printed: str) -> str:
    """Returns a text on one line: line breaks become a space, other control characters are escaped."""
    printed = printable(_BREAKS.sub(" ", printed))
    return printed if len(printed) <= MAX_TEXT else printed[: MAX_TEXT - 1] + "…"
