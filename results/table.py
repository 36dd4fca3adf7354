"""trials.csv: one row per finished trial, valid at any time."""

import bisect
import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import StudyError
from ..base.reading import path_of, read_named
from ..base.writing import append, write_atomic
from ..knobs.lossy import Lossy, lossy_in
from .columns import FIXED, INTEGERS, KNOB, LATER, TEXTS, header, line, row, unquoted, values
from .measurement import Measurement, Status, Trial

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


REWRITTEN = 1 << 16
"""Size up to which the file is replaced as a whole, bytes. A new last row is appended to a longer file, so that the
cost of a trial does not grow with their number.
"""


class Table:
    """Writes trials.csv. Each row is formatted once.

    Args:
        path: the file; its folder exists.
        knobs: the names of all knobs, including derived ones, in the order of their columns.
    """

    def __init__(self, path: Path, knobs: Iterable[str]) -> None:
        self.path = path
        self.knobs = tuple(knobs)
        self._header = line(header(self.knobs)).encode()
        self._numbers: list[int] = []
        self._rows: list[bytes] = []
        self._size: int | None = None
        """Size of the file after the last write, bytes; None if it must be replaced."""
        self._new: list[bytes] = []
        """Last rows added since then."""

    def put(self, trial: Trial) -> None:
        """Adds a finished trial, or replaces its row. A pending trial is ignored.

        Raises:
            StudyError: the configuration has a knob without a column.
        """
        if trial.pending:
            return
        data = row(trial, self.knobs).encode()
        place = bisect.bisect_left(self._numbers, trial.number)
        if place == len(self._rows):
            self._new.append(data)
        else:  # a row in the middle
            self._size = None
        if trial.number in self:
            self._rows[place] = data
        else:
            self._numbers.insert(place, trial.number)
            self._rows.insert(place, data)

    def __contains__(self, number: int) -> bool:
        """True if the trial of that number has a row."""
        place = bisect.bisect_left(self._numbers, number)
        return place < len(self._numbers) and self._numbers[place] == number

    def write(self) -> None:
        """Replaces the file, or appends to it (see `REWRITTEN`).

        Raises:
            OSError: it cannot be written; the old file is unchanged except for a part of the last row.
        """
        new, self._new = b"".join(self._new), []
        size, self._size = self._size, None
        # No fsync: resuming after a power failure writes the table again from the ledger.
        if size is not None and size > REWRITTEN and append(self.path, new, expected_size=size):
            self._size = size + len(new)
        else:
            data = b"".join([self._header, *self._rows])
            write_atomic(self.path, data, durable=False)
            self._size = len(data)


def frame(trials: Sequence[Trial], knobs: Iterable[str]) -> "DataFrame":
    """Returns the finished trials as a table with the columns and types of `read`."""
    names = header(knobs)
    cells = [
        values(trial, [name[len(KNOB) :] for name in names[len(FIXED) :]]) for trial in trials if not trial.pending
    ]
    return _frame({name: [cells_of_trial[i] for cells_of_trial in cells] for i, name in enumerate(names)})


def read(path: str | Path) -> "tuple[DataFrame, list[str]]":
    """Reads a trials.csv, even a damaged one. Also returns a list of its problems.

    The table has all fixed columns (empty if the file lacks one), then the knobs' and any others. `trial` is int64,
    `devices` Int64, other measured columns float64, texts str; a knob's column is bool, int64 or float64 if all its
    values are, otherwise object with None for a missing knob. Rows that are cut off or invalid are left out and
    listed.

    Raises:
        StudyError: the file does not exist, or it lacks a column of `trial`, `status` and `throughput`.
    """
    path = path_of(path)
    try:
        data = read_named(path, at_most=LARGEST_TABLE)
    except OSError as error:
        raise StudyError(f"cannot read '{path}': {error.strerror or error}") from error
    columns, problems = parse(data, path)
    return _frame(columns), problems


def parse(data: bytes, path: str | Path) -> tuple[dict[str, list[Any]], list[str]]:
    """Parses the contents of a trials.csv as `read` does, to plain columns without pandas; None is an empty cell.

    Args:
        data: the file's contents.
        path: its name, for messages.

    Raises:
        StudyError: a column of `trial`, `status` and `throughput` is missing, or the table is larger than
            `MOST_COLUMNS` and `MOST_CELLS`.
    """
    problems: list[str] = []
    count, rows = data.partition(b"\n")[0].count(b",") + 1, data.count(b"\n")
    if count > MOST_COLUMNS or count * rows > MOST_CELLS:
        raise StudyError(
            f"'{path}' is too large to be read: {count:,} columns and {rows:,} rows; the most are {MOST_COLUMNS:,} columns "
            f"and {MOST_CELLS:,} cells"
        )
    try:
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problems.append(f"{path}: not UTF-8 at byte {error.start}; undecodable bytes are shown as \ufffd")
        content = data.decode("utf-8-sig", errors="replace")
    # Each row is one line, so a damaged one does not affect the next.
    *lines, cut_off = content.split("\n")
    names = _columns(path, lines[0] if lines else cut_off, problems)
    by_trial: dict[int, list[str]] = {}
    checked = [
        (place, name) for place, name in enumerate(names) if name in FIXED and (name == "status" or name not in TEXTS)
    ]
    trial = names.index("trial")
    for number, row_text in enumerate(lines[1:], start=2):
        if row_text.strip():
            cells, fault = _cells(row_text, len(names), checked)
            if fault is None and int(cells[trial]) in by_trial:
                problems.append(f"{path}, line {number}: trial {cells[trial]} is repeated; the later row counts")
            if fault is None:
                by_trial[int(cells[trial])] = cells
            else:
                problems.append(f"{path}, line {number}: {fault}; the row is left out")
    if not lines:
        problems.append(f"{path}: cut off in its first line; there are no rows")
    elif cut_off:
        problems.append(f"{path}, line {len(lines) + 1}: cut off; the row is left out")
    missing = [name for name in FIXED if name not in names and name not in LATER]
    if missing:
        problems.append(f"{path}: no column {', '.join(missing)}; left empty")
    sorted_rows = [by_trial[number] for number in sorted(by_trial)]
    table: dict[str, list[Any]] = {}
    for name in (*FIXED, *(column for column in names if column not in FIXED)):
        place = names.index(name) if name in names else None
        texts = [""] * len(sorted_rows) if place is None else [row_cells[place] for row_cells in sorted_rows]
        table[name] = _values(name, texts)
    return table, problems


def safe_lines(data: bytes) -> bytes:
    """Returns the table without cells that a spreadsheet would run as formulas (see `columns.line`): another program may
    have written it. Lines that are not valid CSV are left out.
    """
    safe_rows = []
    for row_text in data.decode("utf-8-sig", errors="replace").splitlines():
        try:
            safe_rows.append(line(map(unquoted, next(csv.reader([row_text], strict=True), []))))
        except csv.Error:
            continue
    return "".join(safe_rows).encode()


def drop_invalid(columns: dict[str, list[Any]], problems: list[str]) -> dict[str, list[Any]]:
    """Removes non-finite numbers, and `ok` rows without a throughput, from the columns of `parse`. Removed rows are
    added to `problems`.
    """
    columns = {
        name: [None if isinstance(value, float) and not math.isfinite(value) else value for value in cells]
        for name, cells in columns.items()
    }
    without = {
        row
        for row, (status, speed) in enumerate(zip(columns["status"], columns["throughput"]))
        if status == "ok" and speed is None
    }
    if not without:
        return columns
    numbers = [str(columns["trial"][row]) for row in sorted(without)]
    problems.append(
        f"trial{'s' if len(numbers) > 1 else ''} {', '.join(numbers[:10])}{' and more' * (len(numbers) > 10)}: "
        "ok, but without a throughput; left out"
    )
    return {name: [value for row, value in enumerate(cells) if row not in without] for name, cells in columns.items()}


def trials(
    table: "DataFrame", make_config: Callable[[Mapping[str, Any]], Any] = dict, lossy: Lossy | None = None
) -> list[Trial]:
    """Converts a table to trials. Knobs without a value are left out of a configuration. The table does not state
    which values are `lossy`.
    """
    columns = table.astype(object).where(table.notna(), None).to_dict("list")
    return trials_of(columns, make_config, lossy)


def trials_of(
    columns: Mapping[str, Sequence[Any]],
    make_config: Callable[[Mapping[str, Any]], Any] = dict,
    lossy: Lossy | None = None,
) -> list[Trial]:
    """Converts the columns of `parse` to trials, as `trials` does."""
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


def _columns(path: str | Path, header_line: str, problems: list[str]) -> list[str]:
    try:
        names = [unquoted(column) for column in next(csv.reader([header_line.removesuffix("\r")], strict=True), [])]
    except csv.Error:
        names = []
    lacking = [name for name in ESSENTIAL if name not in names]
    if lacking:
        start = f"starts with {header_line[:80]!r}" if header_line.strip() else "is empty"
        raise StudyError(f"'{path}' is not a table of trials: it has no column {', '.join(lacking)}; the file {start}")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        problems.append(f"{path}: column {', '.join(repeated)} is repeated; the first one counts")
    return names


def _cells(text: str, count: int, checked: Sequence[tuple[int, str]]) -> tuple[list[str], str | None]:
    """Returns the cells of one line and its error. `checked` contains the positions of the status and of numbers."""
    try:
        cells = next(csv.reader([text.removesuffix("\r")], strict=True))
    except csv.Error as error:
        return [], f"not CSV ({error})"
    if len(cells) != count:
        return cells, f"{len(cells)} cells instead of {count}"
    for place, name in checked:
        value = cells[place]
        if name == "status":
            if value not in _STATUSES:
                return cells, f"status '{_shortened(value)}' is none of {', '.join(Status)}"
        elif value == "" and name != "trial":
            continue
        elif name in INTEGERS:
            if not _COUNT.fullmatch(value):
                return cells, f"{name} '{_shortened(value)}' is not a whole number"
        elif value not in _UNREAL and not _REAL.fullmatch(value):
            return cells, f"{name} '{_shortened(value)}' is not a number"
    return cells, None


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def _values(name: str, texts: Sequence[str]) -> list[Any]:
    if name in TEXTS:
        return [unquoted(cell) for cell in texts]
    if name in INTEGERS:
        return [int(cell) if cell else None for cell in texts]
    if name in FIXED:
        return [float(cell) if cell else None for cell in texts]
    if not name.startswith(KNOB):
        return [unquoted(cell) or None for cell in texts]
    filled = [cell for cell in texts if cell]
    kinds: tuple[tuple[Callable[[str], Any], Callable[[str], Any]], ...] = (
        (lambda cell: cell in ("true", "false"), lambda cell: cell == "true"),
        (_whole, int),
        (_real, lambda cell: int(cell) if _whole(cell) else float(cell)),
    )
    for fits, make in kinds:
        if all(fits(cell) for cell in filled):
            return [make(cell) if cell else None for cell in texts]
    return [unquoted(cell) or None for cell in texts]


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
