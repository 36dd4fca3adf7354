"""Configurations as points of a space in which distance means something to a Gaussian process."""

import math
from collections.abc import Sequence

import numpy as np

from ...space import Config
from .encoding import ABSENT, Encoding

DOUBLINGS = 3.0
"""Doublings of a quantity that count as one unit of distance, as much as a flag turned."""


class Features:
    """Maps codes (see `Encoding`) to rows of floats, shape (n, columns).

    Numbers whose values are positive and spread over a factor of four or more (degrees, batch sizes) enter by
    their logarithm, in units of `DOUBLINGS` doublings: laws of speed and memory are mostly powers. Other
    numbers run from 0 to 1 over their range, flags are 0 or 1, and texts are one-hot, at distance 1 from each
    other. A knob that may be absent has a further column that says so.
    """

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        self._tables: list[np.ndarray] = []
        signs: list[float] = []
        for column, knob in enumerate(encoding.knobs):
            table = _table(knob.values, bool(encoding.ordered[column]))
            sign = float(getattr(knob, "monotone_memory", 0)) if table.shape[1] == 1 else 0.0
            signs += [sign] * table.shape[1]
            if encoding.optional[column]:
                table = np.column_stack([table, np.zeros(len(table))])
                absent = np.zeros((1, table.shape[1]))
                absent[0, -1] = 1.0
                table = np.vstack([table, absent])  # the code -1 picks the last row
                signs.append(0.0)
            self._tables.append(table)
        self.memory_sign = np.array(signs)
        """1 where a larger feature needs more memory, -1 where it needs less, 0 where not known; (columns,)."""

    @property
    def columns(self) -> int:
        """How many floats a configuration becomes."""
        return len(self.memory_sign)

    def of(self, codes: np.ndarray) -> np.ndarray:
        """The features of codes (n, knobs): shape (n, columns)."""
        parts = [table[codes[:, column]] for column, table in enumerate(self._tables)]
        return np.concatenate(parts, axis=1) if parts else np.zeros((len(codes), 0))

    def numeric(self, configs: Sequence[Config]) -> np.ndarray:
        """The features of configurations that the encoding knows: shape (n, columns)."""
        return self.of(self.encoding.codes(configs))


def _table(values: Sequence[object], ordered: bool) -> np.ndarray:
    """One row of features a value, shape (values, width)."""
    assert ABSENT == -1
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if not ordered:
        return np.eye(len(values)) / math.sqrt(2.0)
    if len(numbers) < len(values):
        return np.arange(len(values), dtype=float).reshape(-1, 1)  # two values: no order to get wrong
    array = np.array(numbers, dtype=float)
    if array.min() > 0 and array.max() >= 4 * array.min():
        logs = np.log2(array / array.min()) / DOUBLINGS
        return logs.reshape(-1, 1)
    return ((array - array.min()) / max(array.max() - array.min(), 1e-12)).reshape(-1, 1)
