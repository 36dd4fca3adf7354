"""Parameters of a test of which `make test` tries some, and `make test-slow` the others."""

import pytest


def tiered(quick, slow):
    """Parameters, each of one test: those that are tried always, and those that rarely fail where the others hold."""
    rest = (each if isinstance(each, tuple) else (each,) for each in slow)
    return [*quick, *(pytest.param(*each, marks=pytest.mark.slow) for each in rest)]


def diagonal(rows, columns):
    """Every row with every column, of which a diagonal is tried always: each row and each column once at least."""
    rows, columns = list(rows), list(columns)
    over = max(len(rows), len(columns))
    always = {(at % len(rows), at % len(columns)) for at in range(over)}
    places = [(row, column) for row in range(len(rows)) for column in range(len(columns))]
    return tiered(
        [(rows[row], columns[column]) for row, column in places if (row, column) in always],
        [(rows[row], columns[column]) for row, column in places if (row, column) not in always],
    )
