"""An estimate as the search sees it: numbers where it has any, unknown elsewhere."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ...errors import UsageError
from ...space import Config

COLUMNS = ("throughput", "peak_memory_mib", "fullest_memory_mib", "probability_fits", "log_throughput_std")
"""What a prior's table may have, one array each."""
UNKNOWN = (math.nan,) * len(COLUMNS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictions:
    """What a prior says of some configurations, one row each."""

    log_throughput: np.ndarray
    """Natural logarithm, NaN where unknown; shape (n,)."""
    log_memory: np.ndarray
    """Natural logarithm of the peak in MiB, NaN where unknown; shape (n,)."""
    log_need: np.ndarray
    """What decides whether it fits: the fullest device's peak, where that is not the one reported; (n,)."""
    fits: np.ndarray
    """Chance of fitting as the prior itself sees it, NaN where unknown; shape (n,)."""
    log_std: np.ndarray
    """Standard deviation of `log_throughput` as the prior itself sees it, NaN where unknown; shape (n,)."""

    def joined(self, other: "Predictions") -> "Predictions":
        """These, then those of `other`."""
        names = [each.name for each in fields(self)]
        return Predictions(
            **{name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in names}
        )


class Prior:
    """Wraps `prior(config) -> Estimate | throughput`, or whatever has `.table(configs)` beside it.

    What is not a positive finite number, and configurations for which the prior raises, are unknown. That is
    said once, not once a configuration.

    Args:
        source: the prior. `None` results count as unknown.
        warn: told once of unusable answers.

    Raises:
        UsageError: the prior is not callable and has no `table`.
    """

    def __init__(self, source: Any, *, warn: Callable[[str], None] | None = None) -> None:
        if not callable(source) and not hasattr(source, "table"):
            raise UsageError(
                f"a prior must be callable as prior(config) -> Estimate or throughput, but got {source!r}"
            )
        self.source = source
        self._warn = warn or (lambda message: warnings.warn(message, RuntimeWarning, stacklevel=2))
        self._said = False

    def predict(self, configs: Sequence[Config]) -> Predictions:
        """Predictions for these configurations."""
        rows: list[tuple[float, ...]] | None = None
        problem = ""
        if hasattr(self.source, "table"):
            try:
                rows = _rows_of(self.source.table(list(configs)), len(configs))
            except Exception as error:  # somebody's own code: asked one by one below, it may do better
                problem = f"its table raised {type(error).__name__}: {error}"
        if rows is None:
            rows = []
            for config in configs:
                try:
                    rows.append(_row_of(self.source(config)) if callable(self.source) else UNKNOWN)
                except Exception as error:  # any configuration it cannot answer for is unknown to it
                    problem = problem or f"it raised {type(error).__name__}: {error} for {dict(config)}"
                    rows.append(UNKNOWN)
        array = np.array(rows, dtype=float).reshape(len(configs), len(UNKNOWN))
        usable = np.isfinite(array[:, :3]) & (array[:, :3] > 0)
        bad = int((~usable[:, 0] & (array[:, 3] != 0)).sum())  # what cannot fit needs no speed
        if bad and not problem:
            problem = "its throughput is not a positive finite number"
        if problem:
            self._say(
                f"the prior says nothing of {bad} of {len(configs)} configurations ({problem}); they count as unknown"
            )
        logs = np.full((len(configs), 3), np.nan)
        logs[usable] = np.log(array[:, :3][usable])
        chance = np.where((array[:, 3] >= 0) & (array[:, 3] <= 1), array[:, 3], np.nan)
        need = np.where(np.isfinite(logs[:, 2]), logs[:, 2], logs[:, 1])
        std = np.where(np.isfinite(array[:, 4]) & (array[:, 4] >= 0), array[:, 4], np.nan)
        return Predictions(
            log_throughput=logs[:, 0], log_memory=logs[:, 1], log_need=need, fits=chance, log_std=std
        )

    def _say(self, message: str) -> None:
        if not self._said:
            self._said = True
            self._warn(message)


def _row_of(answer: Any) -> tuple[float, ...]:
    """One row, in the order of `COLUMNS`; NaN where not given."""
    if answer is None:
        return UNKNOWN
    if isinstance(answer, (int, float, np.number)):
        return (float(answer), *UNKNOWN[1:])
    fits = getattr(answer, "fits", None)
    return (
        _number(getattr(answer, "throughput", None)),
        _number(getattr(answer, "peak_memory_mib", None)),
        _number(getattr(answer, "fullest_memory_mib", None)),
        math.nan if fits is None else float(bool(fits)),
        math.nan,
    )


def _rows_of(table: Any, count: int) -> list[tuple[float, ...]]:
    unknown = np.full(count, np.nan)
    columns = []
    for name in COLUMNS:
        column = getattr(table, name, None)
        columns.append(unknown if column is None else np.asarray(column, dtype=float).reshape(count))
    return list(zip(*(column.tolist() for column in columns)))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
