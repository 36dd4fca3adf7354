"""trials.csv: one row per finished trial, valid at any time."""

import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..base.errors import StudyError
from ..base.writing import write_atomic
from .columns import FIXED, INTEGERS, KNOB, TEXTS, header, line, row, unquoted
from .measurement import Trial

if TYPE_CHECKING:
    from pandas import DataFrame

LARGEST_TABLE = 32 << 20
"""Largest table that is sent to a browser or over HTTP, bytes."""


class Table:
    """Writes trials.csv. Each row is formatted once.

    Args:
        path: the file; its folder exists.
        knobs: the names of all knobs, including derived ones, in the order of their columns.
    """

    def __init__(self, path: Path, knobs: Iterable[str]) -> None:
        self.path = path
        self.knobs = tuple(knobs)
        self._rows: dict[int, tuple[Trial, str]] = {}

    def write(self, trials: Iterable[Trial]) -> None:
        """Replaces the file by one with the rows of these trials, without pending ones.

        Raises:
            StudyError: a configuration has a knob without a column.
            OSError: the file cannot be written; the old one is unchanged.
        """
        lines = [line(header(self.knobs))]
        for trial in trials:
            if not trial.pending:
                if self._rows.get(trial.number, (None,))[0] is not trial:
                    self._rows[trial.number] = trial, row(trial, self.knobs)
                lines.append(self._rows[trial.number][1])
        # No fsync: resuming after a power failure writes the table again from the ledger.
        write_atomic(self.path, "".join(lines).encode(), durable=False)


def frame(trials: Sequence[Trial], knobs: Iterable[str]) -> "DataFrame":
    """Returns the finished trials as `read` returns their table."""
    names = tuple(knobs)
    rows = (row(trial, names) for trial in trials if not trial.pending)
    return read(io.StringIO(line(header(names)) + "".join(rows)))


def read(source: str | os.PathLike[str] | IO[Any]) -> "DataFrame":
    """Reads a trials.csv.

    Texts are str, empty where there is none; `devices` is Int64, other measured columns are float64. A knob's column is
    bool, int64 or float64 if all its values are, otherwise object.

    Args:
        source: path of the file, or a buffer with its contents.

    Raises:
        StudyError: it cannot be read, or is another table.
    """
    import pandas

    name = f"'{source}'" if isinstance(source, str | os.PathLike) else "the table"
    types = {column: "str" if column in TEXTS else "Int64" if column in INTEGERS else "float64" for column in FIXED}
    try:
        # Only an empty cell is without a value: a knob may be "None" or "nan".
        table = pandas.read_csv(source, dtype=types | {"trial": "int64"}, keep_default_na=False, na_values=[""])
    except (OSError, ValueError) as error:
        raise StudyError(f"cannot read {name} as a table of trials: {error}") from error
    if missing := [column for column in ("trial", "status", "throughput") if column not in table]:
        raise StudyError(f"{name} is not a table of trials: it has no column {', '.join(missing)}")
    for column in table:
        if column in TEXTS:
            table[column] = table[column].fillna("").map(unquoted)
        elif column.startswith(KNOB) and table[column].dtype.kind not in "biuf":
            table[column] = table[column].astype("object").map(unquoted, na_action="ignore")
    return table
