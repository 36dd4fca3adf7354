"""Test parameters of which `make test` tries some and `make test-slow` the others."""

import pytest


def tiered(quick, slow):
    """Returns parameters, one test each: `quick` are always tried; `slow` rarely fail if the quick ones pass."""
    rest = (each if isinstance(each, tuple) else (each,) for each in slow)
    return [*quick, *(pytest.param(*each, marks=pytest.mark.slow) for each in rest)]


def diagonal(rows, columns):
    """Pairs every row with every column. A diagonal is always tried, so that each row and column occurs at least once."""
    rows, columns = list(rows), list(columns)
    over = max(len(rows), len(columns))
    always = {(at % len(rows), at % len(columns)) for at in range(over)}
    places = [(row, column) for row in range(len(rows)) for column in range(len(columns))]
    return tiered(
        [(rows[row], columns[column]) for row, column in places if (row, column) in always],
        [(rows[row], columns[column]) for row, column in places if (row, column) not in always],
    )
