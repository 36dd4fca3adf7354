"""trials.csv: one row per finished trial, valid at any time."""

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import StudyError
from ..base.reading import path_of, read_named
from ..base.writing import write_atomic
from ..knobs.lossy import Lossy, lossy_in
from .columns import FIXED, INTEGERS, KNOB, TEXTS, header, line, row, unquoted, value
from .measurement import Measurement, Status, Trial, plain_scalar
from .schema import shortened

if TYPE_CHECKING:
    from pandas import DataFrame, Series

ESSENTIAL = ("trial", "status", "throughput")
"""Columns that a table must have."""

LARGEST_TABLE = 32 << 20
"""Largest table that is read, bytes."""
MOST_COLUMNS, MOST_CELLS = 1_000, 1_000_000
"""Largest number of columns, and of cells, of a table that is read."""

_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_COUNT = re.compile(r"0|[1-9][0-9]{0,17}")
_REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_UNREAL = ("nan", "inf", "-inf")
_STATUSES = frozenset(map(str, Status))


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
    """Returns the finished trials as a table with the columns and types of `read`."""
    finished = [trial for trial in trials if not trial.pending]
    return _frame({name: [plain_scalar(value(trial, name)) for trial in finished] for name in header(knobs)})


def read(path: str | Path) -> "DataFrame":
    """Reads a trials.csv.

    The table has all fixed columns (empty if the file lacks one), then the knobs' and any others. `trial` is int64,
    `devices` Int64, other measured columns float64, texts str; a knob's column is bool, int64 or float64 if all its
    values are, otherwise object with None for a missing knob.

    Raises:
        StudyError: the file cannot be read, or `parse` refuses it.
    """
    path = path_of(path)
    try:
        data = read_named(path, at_most=LARGEST_TABLE)
    except OSError as error:
        raise StudyError(f"cannot read '{path}': {error.strerror or error}") from error
    return _frame(parse(data, path))


def parse(data: bytes, path: str | Path) -> dict[str, list[Any]]:
    """Parses the contents of a trials.csv as `read` does, to plain columns without pandas, ordered by trial. None is an
    empty cell. An unfinished last line is ignored, since another process may be writing it.

    Args:
        data: the file's contents.
        path: its name, for messages.

    Raises:
        StudyError: a column of `trial`, `status` and `throughput` is missing, a row is invalid, or the table is larger
            than `MOST_COLUMNS` and `MOST_CELLS`.
    """
    count, lines = data.partition(b"\n")[0].count(b",") + 1, data.count(b"\n")
    if count > MOST_COLUMNS or count * lines > MOST_CELLS:
        raise StudyError(
            f"'{path}' is too large to be read: {count:,} columns and {lines:,} rows; the most are {MOST_COLUMNS:,} columns "
            f"and {MOST_CELLS:,} cells"
        )
    rows: dict[int, list[Any]] = {}
    try:
        reader = csv.reader(io.StringIO(data[: data.rfind(b"\n") + 1].decode("utf-8-sig"), newline=""), strict=True)
    except UnicodeDecodeError as error:
        raise StudyError(f"'{path}' is not UTF-8 at byte {error.start}") from error
    try:
        names = [unquoted(name) for name in next(reader, [])]
        lacking = [name for name in ESSENTIAL if name not in names]
        if lacking:
            raise ValueError(f"it is not a table of trials: it has no column {', '.join(lacking)}")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(names):
                raise ValueError(f"{len(cells)} cells instead of {len(names)}")
            values_of_row = [_value(name, cell) for name, cell in zip(names, cells)]
            number, status, throughput = (values_of_row[names.index(name)] for name in ESSENTIAL)
            if number in rows:
                raise ValueError(f"trial {number} is repeated")
            if status == Status.OK and (throughput is None or not math.isfinite(throughput)):
                raise ValueError(f"trial {number} is ok, but without a throughput")
            rows[number] = values_of_row
    except (csv.Error, ValueError) as error:
        raise StudyError(f"'{path}', line {max(reader.line_num, 1)}: {error}") from error
    columns: dict[str, list[Any]] = {name: [None] * len(rows) for name in FIXED}
    columns |= {name: [rows[number][place] for number in sorted(rows)] for place, name in enumerate(names)}
    return {name: _knob_values(cells) if name.startswith(KNOB) else cells for name, cells in columns.items()}


def trials_of(
    columns: Mapping[str, Sequence[Any]],
    make_config: Callable[[Mapping[str, Any]], Any] = dict,
    lossy: Lossy | None = None,
) -> list[Trial]:
    """Converts the columns of `parse` to trials. Knobs without a value are left out of a configuration. A table does not state
    which values are `lossy`.
    """
    trials = []
    knobs = [(place, name[len(KNOB) :]) for place, name in enumerate(columns) if name.startswith(KNOB)]
    measured = [(place, name) for place, name in enumerate(columns) if name in FIXED]
    chosen = ("trial", "sampler", "predicted_throughput", "predicted_memory_mib")
    number, sampler, throughput, memory = (list(columns).index(name) for name in chosen)
    for cells in zip(*columns.values()):
        config = make_config({name: cells[place] for place, name in knobs if cells[place] is not None})
        trials.append(
            Trial(
                number=cells[number],
                config=config,
                sampler=cells[sampler],
                predicted_throughput=cells[throughput],
                predicted_memory_mib=cells[memory],
                measurement=Measurement.from_dict(
                    {name: cells[place] for place, name in measured if cells[place] is not None}
                ),
                lossy=lossy_in(config, lossy or {}),
            )
        )
    return trials


def _value(name: str, text: str) -> Any:
    """Converts a cell; cells of knobs remain texts.

    Raises:
        ValueError: it is invalid.
    """
    if name == "status":
        if text not in _STATUSES:
            raise ValueError(f"status {shortened(text)} is none of {', '.join(Status)}")
        return text
    if name in TEXTS:
        return unquoted(text)
    if name not in FIXED:
        return (text if name.startswith(KNOB) else unquoted(text)) or None
    if not text and name != "trial":
        return None
    if name in INTEGERS:
        if not _COUNT.fullmatch(text):
            raise ValueError(f"{name} {shortened(text)} is not a whole number")
        return int(text)
    if text not in _UNREAL and not _REAL.fullmatch(text):
        raise ValueError(f"{name} {shortened(text)} is not a number")
    return float(text)


def _knob_values(texts: Sequence[str | None]) -> list[Any]:
    """Converts the cells of a knob to booleans or numbers if all of them are."""
    filled = [text for text in texts if text is not None]
    kinds: tuple[tuple[Callable[[str], Any], Callable[[str], Any]], ...] = (
        (lambda text: text in ("true", "false"), lambda text: text == "true"),
        (_whole, int),
        (_real, lambda text: int(text) if _whole(text) else float(text)),
    )
    make = next((make for fits, make in kinds if all(map(fits, filled))), unquoted)
    return [None if text is None else make(text) for text in texts]


def _whole(text: str) -> bool:
    # Longer integers may not fit a float, which a column with a fraction converts them to.
    return len(text) < 300 and _INTEGER.fullmatch(text) is not None


def _real(text: str) -> bool:
    return _REAL.fullmatch(text) is not None and math.isfinite(float(text))


def _frame(table: Mapping[str, list[Any]]) -> "DataFrame":
    import pandas

    return pandas.DataFrame({name: _series(name, cells) for name, cells in table.items()})


def _series(name: str, cells: list[Any]) -> "Series":
    import pandas

    if name in TEXTS:
        return pandas.Series(["" if cell is None else str(cell) for cell in cells], dtype="str")
    if name == "trial":
        return pandas.Series(cells, dtype="int64")
    if name in INTEGERS:
        return pandas.Series(cells, dtype="Int64")
    if name in FIXED:
        return pandas.Series(cells, dtype="float64")
    kinds = {type(cell) for cell in cells}
    if kinds == {bool}:
        return pandas.Series(cells, dtype="bool")
    if kinds == {int} and all(abs(cell) < 2**63 for cell in cells):
        return pandas.Series(cells, dtype="int64")
    if kinds and kinds <= {int, float}:
        return pandas.Series(cells, dtype="float64")
    return pandas.Series(cells, dtype="object")
