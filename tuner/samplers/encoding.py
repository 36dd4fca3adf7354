"""Encodes configurations as rows of small integers, and as points whose distances suit a Gaussian process; trials as arrays."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...base.errors import SpaceError
from ...results import Measurement, Status, Trial
from ...space import Config, Space

MAX_LISTED = 200_000
"""Largest space that is stored as a list of codes; a larger one is sampled."""
ABSENT = -1
"""Code of a conditional knob that the configuration does not have: below its lowest value."""


class Encoding:
    """Encodes a configuration as a row of `int32`, one column per free knob: the index of its value in `knob.values`.

    It uses indices rather than values, because the values of ordered knobs mostly grow geometrically (1, 2, 4, 8,
    ...), and the step from 1 to 2 matters as much as the one from 16 to 32.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.knobs = tuple(space.free)
        self.names = tuple(knob.name for knob in self.knobs)
        self.sizes = np.array([len(knob.values) for knob in self.knobs], dtype=np.int32)
        self.optional = np.array([knob.when is not None for knob in self.knobs], dtype=bool)
        # With two values the order does not matter. Without a flag, its feature is absent as well.
        self.ordered = np.array([knob.ordered for knob in self.knobs], dtype=bool) | (self.sizes == 2)
        self._index = [{value: i for i, value in enumerate(knob.values)} for knob in self.knobs]
        self._rows: dict[Config, int | None] = {}

    def encode(self, config: Config) -> np.ndarray | None:
        """Returns the code of `config`; None if a value is not in the space."""
        code = np.full(len(self.knobs), ABSENT, dtype=np.int32)
        for column, (name, index) in enumerate(zip(self.names, self._index)):
            if name in config:
                position = index.get(config[name])
                if position is None:
                    return None
                code[column] = position
            elif not self.optional[column]:
                return None
        return code

    def codes(self, configs: Iterable[Config]) -> np.ndarray:
        """Codes of configurations of the space, shape (n, knobs).

        Raises:
            ValueError: a value is not in the space.
        """
        rows = []
        for config in configs:
            code = self.encode(config)
            if code is None:
                raise ValueError(f"{dict(config)} is not a configuration of this space")
            rows.append(code)
        return stack(rows, len(self.knobs))

    def valid(self, codes: Iterable[np.ndarray]) -> list[Config]:
        """Configurations of the valid codes."""
        if self.listed is not None:
            rows = (self._row_of_code.get(code.astype(np.int32, copy=False).tobytes()) for code in codes)
            return self.space.take([row for row in rows if row is not None])
        return [config for config in map(self.decode, codes) if config is not None]

    def decode(self, code: np.ndarray) -> Config | None:
        """Returns the configuration of a code; None if it is not valid."""
        values = {knob.name: knob.values[i] for knob, i in zip(self.knobs, code.tolist()) if i != ABSENT}
        try:
            config = self.space.config(values)
        except SpaceError:
            return None
        # A missing knob gets its default, which may differ from the given code.
        present = {name for name, i in zip(self.names, code.tolist()) if i != ABSENT}
        return config if present == {name for name in self.names if name in config} else None

    def distances(self, codes: np.ndarray, code: np.ndarray) -> np.ndarray:
        """Distance of each of `codes` (n, knobs) from `code` (knobs,): shape (n,), 0 to the number of knobs.

        An ordered knob adds the share of its range between the two values. Any other knob adds 1 if they differ, and
        so does a conditional knob that only one of them has.
        """
        gaps = np.abs(codes - code).astype(np.float64)
        steps = gaps / np.maximum(self.sizes - 1, 1)
        differ = (gaps > 0).astype(np.float64)
        lone = (codes == ABSENT) != (code == ABSENT)
        return np.where(self.ordered & ~lone, steps, differ).sum(axis=1)

    def neighbours(self, code: np.ndarray) -> np.ndarray:
        """Codes that differ from `code` in one present knob: shape (m, knobs); not all are valid."""
        rows = []
        for column in np.flatnonzero(code != ABSENT):
            for value in range(self.sizes[column]):
                if value != code[column]:
                    row = code.copy()
                    row[column] = value
                    rows.append(row)
        return np.array(rows, dtype=np.int32).reshape(len(rows), len(self.knobs))

    @cached_property
    def listed(self) -> np.ndarray | None:
        """Codes of the whole space, row i being that of `space.at(i)`: shape (len(space), knobs).

        None if the space is too large to be listed.
        """
        if not self.space.enumerable or self.space.size > MAX_LISTED:
            return None
        columns = self.space.columns()
        codes = np.empty((self.space.size, len(self.knobs)), dtype=np.int32)
        for column, name in enumerate(self.names):
            codes[:, column] = columns[name]
        return codes

    def rows(self, configs: Iterable[Config]) -> list[int | None]:
        """Rows of configurations in `listed`; None for one that is not in the space. Each is looked up once."""
        configs = list(configs)
        new = [config for config in dict.fromkeys(configs) if config not in self._rows]
        codes = [self.encode(config) for config in new]
        rows = [None if code is None else self._row_of_code.get(code.tobytes()) for code in codes]
        # Codes do not contain derived knobs.
        real = iter(self.space.take([row for row in rows if row is not None]))
        for config, row in zip(new, rows):
            self._rows[config] = row if row is not None and next(real) == config else None
        return [self._rows[config] for config in configs]

    @cached_property
    def _row_of_code(self) -> dict[bytes, int]:
        return {} if self.listed is None else {code.tobytes(): row for row, code in enumerate(self.listed)}


def stack(codes: Sequence[np.ndarray], knobs: int) -> np.ndarray:
    """Stacks codes to an array of shape (len(codes), knobs), also if there are none."""
    return np.array(codes, dtype=np.int32).reshape(len(codes), knobs)


DOUBLINGS = 3.0
"""Number of doublings of a quantity that count as one unit of distance, like a changed flag."""


class Features:
    """Maps codes (see `Encoding`) to rows of floats, shape (n, columns).

    Positive numbers that spread over a factor of four or more (degrees, batch sizes) are mapped to their logarithm, in
    units of `DOUBLINGS` doublings, because speed and memory mostly follow power laws. Other numbers are scaled to 0 to
    1, flags are 0 or 1, and texts are one-hot, at distance 1 from each other. A conditional knob has a further column
    that marks its absence.
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
        """1 if a larger feature needs more memory, -1 if it needs less, 0 if unknown; (columns,)."""

    def of(self, codes: np.ndarray) -> np.ndarray:
        """Features of codes (n, knobs): shape (n, columns)."""
        columns = [table[codes[:, column]] for column, table in enumerate(self._tables)]
        return np.concatenate(columns, axis=1) if columns else np.zeros((len(codes), 0))


def _table(values: Sequence[object], ordered: bool) -> np.ndarray:
    """Features of each value, shape (values, width)."""
    assert ABSENT == -1
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if not ordered:
        return np.eye(len(values)) / math.sqrt(2.0)
    if len(numbers) < len(values):
        return np.arange(len(values), dtype=float).reshape(-1, 1)  # with two values the order does not matter
    array = np.array(numbers, dtype=float)
    if array.min() > 0 and array.max() >= 4 * array.min():
        logs = np.log2(array / array.min()) / DOUBLINGS
        return logs.reshape(-1, 1)
    return ((array - array.min()) / max(array.max() - array.min(), 1e-12)).reshape(-1, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """Trials as arrays, one row each. Trials whose configuration is not in the space are left out."""

    codes: np.ndarray
    """Encoded configurations, `int32` of shape (n, knobs)."""
    objective: np.ndarray
    """Value to maximise, shape (n,): the log of the throughput; NaN for failed and pending trials."""
    violation: np.ndarray
    """Constraint violation, shape (n,): above 0 for failed trials, below 0 for successful ones, NaN for pending ones."""

    @property
    def ok(self) -> np.ndarray:
        """Mask of successful trials, shape (n,)."""
        return np.isfinite(self.objective)

    @property
    def failed(self) -> np.ndarray:
        """Mask of failed trials, shape (n,)."""
        return self.violation > 0

    @property
    def pending(self) -> np.ndarray:
        """Mask of pending trials, shape (n,)."""
        return np.isnan(self.violation)

    @property
    def poor(self) -> float:
        """Lower quartile of the objectives: the value that models get for a failure.

        The lowest value would be safer, but the fastest configurations are mostly next to those that run out of
        memory, and a model that sees a cliff avoids its edge.
        """
        return float(np.nanquantile(self.objective, 0.25))


def observe(encoding: Encoding, trials: Sequence[Trial]) -> Observations:
    """Converts trials to arrays.

    If every throughput is positive the objective is its logarithm: a factor of two has the same value everywhere, and
    the noise of a throughput grows with it. Callables may return zero or less; then throughputs are used as they are.
    """
    codes, throughputs, violations = [], [], []
    for trial in trials:
        code = encoding.encode(trial.config)
        if code is not None:
            codes.append(code)
            throughputs.append(_throughput(trial.measurement))
            violations.append(_violation(trial.measurement))
    throughput = np.array(throughputs, dtype=np.float64)
    worked = throughput[np.isfinite(throughput)]
    return Observations(
        codes=stack(codes, len(encoding.knobs)),
        objective=np.log(throughput) if (worked > 0).all() else throughput,
        violation=np.array(violations, dtype=np.float64),
    )


def _throughput(measurement: Measurement | None) -> float:
    """Throughput of a successful trial; NaN of any other, and of `ok` without a finite number."""
    if measurement is None or not measurement.ok or measurement.throughput is None:
        return math.nan
    return float(measurement.throughput) if math.isfinite(measurement.throughput) else math.nan


def _violation(measurement: Measurement | None) -> float:
    """log2 of peak memory over the limit if both are known, so that a model sees how close trials are to the limit.

    A need of twice the limit counts as much as a failure of unknown degree.
    """
    if measurement is None:
        return math.nan
    peak, limit = measurement.peak_memory_mib, measurement.memory_limit_mib
    ratio = math.log2(peak / limit) if peak and limit and peak > 0 and limit > 0 else None
    if not math.isnan(_throughput(measurement)):
        return -1.0 if ratio is None else min(max(ratio, -3.0), -0.05)
    if measurement.status is not Status.OOM or ratio is None:
        return 1.0
    return min(max(ratio, 0.25), 3.0)
