"""Selects, sorts and writes the trials of a run: CSV, JSON, Markdown, or cells of a table in a terminal."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.errors import UsageError, unknown
from . import summary
from .columns import FIXED, KNOB, PENDING, cell, fold, header, knob_text, line, value
from .measurement import Status, Trial, to_json

FORMATS = ("table", "csv", "json", "markdown")


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The trials that are shown, their order and their columns."""

    top: int | None = None
    """Largest number of trials; None for all."""
    statuses: tuple[str, ...] = ()
    """Statuses to include (also `pending`); empty for all."""
    sort: str = ""
    """A column, ascending, or descending with `-` before it; empty for the fastest first, then failures."""
    columns: tuple[str, ...] = ()
    """Columns of trials.csv or names of knobs; empty for all."""


def knob_names(trials: Iterable[Trial]) -> list[str]:
    """Returns the knobs of all trials, in order of appearance."""
    return list(dict.fromkeys(name for trial in trials for name in trial.config))


def chosen_columns(trials: Sequence[Trial], names: Iterable[str]) -> list[str]:
    """Returns the full names of columns. A knob may be given without `knob.`, unless a fixed column has the same
    name.

    Raises:
        UsageError: the column does not exist. The message names the nearest.
    """
    valid_names = header(knob_names(trials))
    columns = []
    for name in names:
        column = name if name in valid_names else KNOB + name
        if column not in valid_names:
            short = [*FIXED, *(column.removeprefix(KNOB) for column in valid_names[len(FIXED) :])]
            raise UsageError(unknown("column", name, dict.fromkeys(short)))
        columns.append(column)
    return columns


def select(trials: Sequence[Trial], selection: Selection) -> tuple[list[Trial], int]:
    """Returns the chosen trials in order, and the number of trials that `top` cut off.

    Raises:
        UsageError: a status or column is unknown, or `top` is below 1.
    """
    if selection.top is not None and selection.top < 1:
        raise UsageError(f"top must be at least 1, but got {selection.top}")
    for status in selection.statuses:
        if status not in (*Status, PENDING):
            raise UsageError(unknown("status", status, [*Status, PENDING]))
    selected = [trial for trial in trials if not selection.statuses or value(trial, "status") in selection.statuses]
    if selection.sort:
        (column,) = chosen_columns(trials, [selection.sort.removeprefix("-")])
        selected = _sorted(selected, column, descending=selection.sort.startswith("-"))
    else:
        failed = [trial for trial in selected if not trial.pending and not trial.ok]
        selected = [*summary.leaders(selected), *failed, *(trial for trial in selected if trial.pending)]
    top = selected[: selection.top]
    return top, len(selected) - len(top)


def _sorted(trials: Sequence[Trial], column: str, *, descending: bool) -> list[Trial]:
    """Sorts numbers before texts, and trials without a value last."""
    valued = [trial for trial in trials if value(trial, column) not in (None, "")]
    valueless = [trial for trial in trials if value(trial, column) in (None, "")]

    def key(trial: Trial) -> tuple[bool, Any]:
        cell_value = value(trial, column)
        return isinstance(cell_value, str), cell_value

    return [*sorted(valued, key=key, reverse=descending), *valueless]


def write(trials: Sequence[Trial], columns: Sequence[str], form: str) -> str:
    """Returns the trials' cells in these columns (full names) as `csv`, `json` or `markdown`.

    Raises:
        UsageError: the format is unknown.
    """
    if form == "json":
        records = [{name: to_json(value(trial, name)) for name in columns} for trial in trials]
        return json.dumps(records, indent=2) + "\n"
    # CSV is for programs, Markdown for people.
    format_cell = text if form == "csv" else marked_text
    return write_rows(columns, [[format_cell(trial, name) for name in columns] for trial in trials], form)


def write_rows(names: Sequence[str], rows: Sequence[Sequence[str]], form: str) -> str:
    """Returns rows of cells with a header as `csv` or `markdown`.

    Raises:
        UsageError: the format is unknown.
    """
    if form == "csv":
        return "".join(line(row) for row in (map(fold, names), *rows))
    if form == "markdown":
        lines = [[*map(fold, names)], ["---"] * len(names), *rows]
        return "".join("| " + " | ".join(map(_markdown, row)) + " |\n" for row in lines)
    raise UsageError(unknown("format", form, FORMATS))


def text(trial: Trial, column: str) -> str:
    """Returns a cell as in trials.csv."""
    return cell(value(trial, column), column)


def marked_text(trial: Trial, column: str) -> str:
    """Returns a cell for people, with lossy values marked."""
    return knob_text(trial, column.removeprefix(KNOB)) if column.startswith(KNOB) else text(trial, column)


def _markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
