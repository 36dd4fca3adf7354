"""Interface of priors: numbers where a prior has any, NaN elsewhere."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base.errors import UsageError
from ...space import Config
from .candidates import Candidates
from .encoding import Encoding

COLUMNS = (
    "throughput",
    "peak_memory_mib",
    "fullest_memory_mib",
    "probability_fits",
    "log_throughput_std",
    "log_throughput_risk",
)
"""Optional arrays of a prior's table; in addition `log_throughput_effects` and `log_memory_effects`, of shape (n,
factors) each.
"""
EFFECTS = ("log_throughput_effects", "log_memory_effects")
UNKNOWN = (math.nan,) * len(COLUMNS)
REMEMBERED = 65_536
"""Largest number of answers that are kept for a space too large to be listed; for a listed space, the number
requested in one table.
"""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of a prior for some configurations."""

    numbers: np.ndarray
    """One row per configuration: the six of `COLUMNS`, then the effects on throughput, then those on memory; shape
    (n, 6 + factors).
    """
    factors: int = 0
    """Number of effects on throughput."""

    @property
    def log_throughput(self) -> np.ndarray:
        """Natural logarithm, NaN if unknown; shape (n,)."""
        return self.numbers[:, 0]

    @property
    def log_memory(self) -> np.ndarray:
        """Natural logarithm of the peak in MiB, NaN if unknown; shape (n,)."""
        return self.numbers[:, 1]

    @property
    def log_need(self) -> np.ndarray:
        """The memory that decides whether a configuration fits: the fullest device's peak if it differs from the
        reported one; (n,).
        """
        return self.numbers[:, 2]

    @property
    def fits(self) -> np.ndarray:
        """Probability to fit according to the prior, NaN if unknown; shape (n,)."""
        return self.numbers[:, 3]

    @property
    def log_std(self) -> np.ndarray:
        """Standard deviation of `log_throughput` according to the prior, NaN if unknown; shape (n,)."""
        return self.numbers[:, 4]

    @property
    def risk(self) -> np.ndarray:
        """Expected loss of `log_throughput` by events that may slow a trial, such as a stall of the network; 0 if unknown;
        shape (n,). It affects only the order of preference, as most trials are not slowed.
        """
        return np.nan_to_num(self.numbers[:, 5])

    @property
    def effects(self) -> np.ndarray:
        """Change of `log_throughput` per standard deviation of each uncertain factor of the prior. A trial informs
        about such a factor for all configurations. Shape (n, factors); no columns if the prior states none.
        """
        return self.numbers[:, len(COLUMNS) : len(COLUMNS) + self.factors]

    @property
    def memory_effects(self) -> np.ndarray:
        """The same for `log_memory` and `log_need`."""
        return self.numbers[:, len(COLUMNS) + self.factors :]

    def rows(self, order: np.ndarray) -> "Predictions":
        """Returns the given rows, in this order."""
        return Predictions(self.numbers[order], self.factors)

    def joined(self, appended: "Predictions") -> "Predictions":
        """Returns these predictions, then those of `appended`."""
        return Predictions(np.concatenate([self.numbers, appended.numbers]), self.factors)


class ShapePrior(ABC):
    """A prior for an unknown model, which predicts ratios but not the scale.

    It predicts only ratios of memory as well, so it rules nothing out. It is as likely as not to be useless, since the
    knobs may have another meaning.
    """

    weight = 0.5
    """Prior probability that it is useful, given that an estimate would be."""

    @abstractmethod
    def table(self, configs: Sequence[Config]) -> Any:
        """Predictions of many configurations, as `Prior` reads them."""


class Prior:
    """Wraps `prior(config) -> Estimate | throughput`, which may also have `.table(configs)`.

    Values that are not positive finite numbers, and configurations for which the prior raises, are unknown. It warns
    once, not for each configuration.

    Args:
        source: the prior. `None` results count as unknown.
        warn: receives one warning about unusable answers.

    Raises:
        UsageError: the prior is not callable and has no `table`.
    """

    def __init__(self, source: Any, *, warn: Callable[[str], None] | None = None) -> None:
        if not callable(source) and not hasattr(source, "table"):
            raise UsageError(f"a prior must be callable as prior(config) -> Estimate or throughput, but got {source!r}")
        self.source = source
        self._warn = warn or (lambda message: warnings.warn(message, RuntimeWarning, stacklevel=2))
        self._warned = False
        self._factors: tuple[int, int] | None = None
        """Number of factors of throughput and of memory in the first table; None before."""

    @property
    def tabular(self) -> bool:
        """True if the prior predicts many configurations at once."""
        return hasattr(self.source, "table")

    def unasked(self) -> Predictions:
        """Predictions for no configuration."""
        speed, memory = self._factors or (0, 0)
        return Predictions(np.empty((0, len(COLUMNS) + speed + memory)), speed)

    def predict(self, configs: Sequence[Config]) -> Predictions:
        """Predictions for these configurations."""
        problem = ""
        if self.tabular:
            try:
                return self.table(configs)
            except Exception as error:  # user code: it may succeed one by one below
                problem = f"its table raised {type(error).__name__}: {error}"
        rows = []
        for config in configs:
            try:
                rows.append(_row_of(self.source(config)) if callable(self.source) else UNKNOWN)
            except Exception as error:  # user code: a configuration that it fails for is unknown
                problem = problem or f"it raised {type(error).__name__}: {error} for {dict(config)}"
                rows.append(UNKNOWN)
        array = np.array(rows, dtype=float).reshape(len(configs), len(UNKNOWN))
        # Single predictions have no factors.
        effects = [np.zeros((len(configs), width)) for width in self._factors or (0, 0)]
        return self._predictions(array, effects, problem)

    def table(self, configs: Sequence[Config]) -> Predictions:
        """Predictions for these configurations by one call, whose exceptions are not caught."""
        table = self.source.table(list(configs))
        effects = [_effects_of(table, name, len(configs)) for name in EFFECTS]
        return self._predictions(_rows_of(table, len(configs)), effects, "")

    def _predictions(self, array: np.ndarray, effects: list[np.ndarray], problem: str) -> Predictions:
        usable = np.isfinite(array[:, :3]) & (array[:, :3] > 0)
        bad = int((~usable[:, 0] & (array[:, 3] != 0)).sum())  # configurations that cannot fit need no speed
        if bad and not problem:
            problem = "its throughput is not a positive finite number"
        if problem:
            self._say(
                f"the prior predicts nothing for {bad} of {len(array)} configurations ({problem}); they count as unknown"
            )
        logs = np.full((len(array), 3), np.nan)
        logs[usable] = np.log(array[:, :3][usable])
        chance = np.where((array[:, 3] >= 0) & (array[:, 3] <= 1), array[:, 3], np.nan)
        need = np.where(np.isfinite(logs[:, 2]), logs[:, 2], logs[:, 1])
        std = np.where(np.isfinite(array[:, 4]) & (array[:, 4] >= 0), array[:, 4], np.nan)
        widths = effects[0].shape[1], effects[1].shape[1]
        if self._factors is None:
            self._factors = widths
        if widths != self._factors:  # earlier single predictions have no factors
            effects = [np.zeros((len(array), width)) for width in self._factors]
        return Predictions(np.column_stack([logs[:, :2], need, chance, std, array[:, 5], *effects]), self._factors[0])

    def _say(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(message)


def _row_of(answer: Any) -> tuple[float, ...]:
    """One row, in the order of `COLUMNS`; NaN if not given."""
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
        *(math.nan, math.nan),
    )


def _rows_of(table: Any, count: int) -> np.ndarray:
    """The columns of `COLUMNS`, shape (count, 6); NaN if not given."""
    unknown = np.full(count, np.nan)
    columns = [getattr(table, name, None) for name in COLUMNS]
    return np.column_stack(
        [unknown if column is None else np.asarray(column, dtype=float).reshape(count) for column in columns]
    )


def _effects_of(table: Any, name: str, count: int) -> np.ndarray:
    effects = getattr(table, name, None)
    if effects is None:
        return np.zeros((count, 0))
    effects = np.asarray(effects, dtype=float)
    if effects.ndim != 2 or len(effects) != count:
        raise ValueError(f"{name} must have shape ({count}, factors), but has {effects.shape}")
    return np.nan_to_num(effects, posinf=0.0, neginf=0.0)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


class Answers:
    """Cached predictions of a prior."""

    def __init__(self, prior: Prior, encoding: Encoding) -> None:
        self._prior, self._encoding = prior, encoding
        self._kept: dict[Config, tuple[float, ...]] = {}
        """Predictions of configurations without a row in a listed space."""
        self._table: np.ndarray | None = None
        """Predictions of a listed space, one row per configuration; valid where `_asked` is set."""
        self._asked = np.zeros(0 if encoding.listed is None else len(encoding.listed), dtype=bool)
        # A table takes almost as long for one configuration as for thousands.
        self._at_once = prior.tabular and 0 < len(self._asked) <= REMEMBERED

    def knows(self, config: Config) -> bool:
        """True if the configuration was predicted."""
        rows = self._rows([config])
        return config in self._kept if rows is None else bool(self._asked[rows[0]])

    def of(self, configs: Sequence[Config]) -> Predictions:
        """The predictions for these configurations."""
        if not configs:
            return self._prior.unasked()
        if (rows := self._rows(configs)) is not None:
            return self._of_rows(rows)
        new = [config for config in dict.fromkeys(configs) if config not in self._kept]
        if len(new) + len(self._kept) > REMEMBERED:
            self._kept = {config: self._kept[config] for config in configs if config in self._kept}
        if new:
            self._kept.update(zip(new, map(tuple, self._prior.predict(new).numbers.tolist())))
        return Predictions(np.array([self._kept[config] for config in configs]), self._prior.unasked().factors)

    def of_candidates(self, candidates: Candidates) -> Predictions:
        """The predictions for all candidates."""
        if candidates.rows is None:
            return self.of(candidates.configs(np.arange(len(candidates))))
        return self._of_rows(candidates.rows)

    def of_all(self) -> Predictions | None:
        """Predictions for a whole listed space; None if the prior does not make them at once."""
        if self._at_once:
            self._at_once = False
            try:
                predictions = self._prior.table(list(self._encoding.space))
            except Exception:  # user code: `predict` requests less, and reports the exception
                return None
            self._keep(np.arange(len(self._asked)), predictions)
        return self._of_rows(np.arange(len(self._asked))) if len(self._asked) and self._asked.all() else None

    def _rows(self, configs: Sequence[Config]) -> np.ndarray | None:
        """Row of each configuration in a listed space; None if one has no row."""
        if self._encoding.listed is None:
            return None
        rows = self._encoding.rows(configs)
        return None if None in rows else np.array(rows, dtype=int)

    def _of_rows(self, rows: np.ndarray) -> Predictions:
        if not self._asked[rows].all():
            self.of_all()
        if len(new := np.unique(rows[~self._asked[rows]])):
            self._keep(new, self._prior.predict(self._encoding.space.take(new.tolist())))
        if self._table is None:
            return self._prior.unasked()
        return Predictions(self._table[rows], self._prior.unasked().factors)

    def _keep(self, rows: np.ndarray, predictions: Predictions) -> None:
        if self._table is None:
            self._table = np.full((len(self._asked), predictions.numbers.shape[1]), np.nan)
        self._table[rows] = predictions.numbers
        self._asked[rows] = True
