"""Knobs: named choices, and values derived from others; leaves of expressions."""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import SpaceError
from .expression import Expression
from .grammar import check_name
from .operators import UNKNOWN, Column, Interval, outward
from .values import (
    FLAG,
    INTEGER,
    NUMBER,
    NUMERIC,
    TEXT,
    Value,
    coerce,
    from_text,
    kind_of_all,
    listing,
    nearest,
    python_scalar,
)

if TYPE_CHECKING:
    from .rules import Rule

MAX_VALUES = 100_000
"""Largest number of values of one knob."""


class Knob(Expression):
    """A named choice. Spaces make knobs; programs use them in expressions and read their attributes."""

    derived = False
    """True if the value follows from other knobs."""

    def __init__(
        self,
        name: str,
        values: Sequence[Any],
        *,
        default: Any = None,
        when: "Rule | None" = None,
        help: str = "",
        others: Sequence[Any] | None = None,
        monotone_memory: int = 0,
    ) -> None:
        self.name = check_name(name)
        self.names = (self.name,)
        self._subject = f"knob '{name}'"
        declared = self._scalars(values, "values")
        extra = self._scalars(others, "others") if others is not None else None
        if not declared:
            raise SpaceError(f"{self._subject} has no values; give at least one")
        self.kind = kind_of_all([*declared, *(extra or ())], self._subject)
        self.others = None if extra is None else tuple(coerce(value, self.kind, self._subject) for value in extra)
        """Further values that `fix` and `override` accept; None for any of the kind."""
        self.when = when
        """Condition under which the knob exists; None for always."""
        self.help = help
        """Description, in a line."""
        if monotone_memory not in (-1, 0, 1):
            raise SpaceError(f"{self._subject}: monotone_memory is -1, 0 or 1, but got {monotone_memory!r}")
        self.monotone_memory = monotone_memory
        """1: larger values need more memory; -1: less; 0: unknown. For a flag, True is larger than False."""
        self._assign(self._unique(declared))
        self.default: Value = self.check(default) if default is not None else self.values[0]
        """Value before tuning."""

    @property
    def ordered(self) -> bool:
        """True if the values can be ordered; flags and texts cannot."""
        return self.kind in NUMERIC

    @property
    def text(self) -> str:
        return self.name

    def check(self, value: Any) -> Value:
        """Converts `value` to the knob's type.

        Raises:
            SpaceError: not one of the knob's values; the message names the nearest.
        """
        value = coerce(value, self.kind, self._subject)
        if value not in self._codes:
            raise self._unknown(value, self.values)
        return value

    def has(self, value: Value) -> bool:
        """True if it is one of the knob's own values."""
        return value in self._codes

    def code(self, value: Value) -> int:
        """Index of one of the knob's own values."""
        return self._codes[value]

    def parse(self, text: str) -> Value:
        """Value of `text` for this knob, as on a command line; it need not be a declared one.

        Raises:
            SpaceError: `text` is not of the knob's kind.
        """
        return from_text(text, self.kind, self._subject)

    def column(self, codes: np.ndarray) -> np.ndarray:
        """Values at `codes`, any shape: bool, int64, float64, or object for text."""
        return self._array[codes]

    def set_values(self, values: Sequence[Any]) -> None:
        """Replaces the values; a default that is missing becomes the nearest remaining value."""
        chosen = self._unique(self._scalars(values, "values"))
        if self.others is not None:
            accepted = dict.fromkeys((*self.others, *self.values))
            if invalid := [value for value in chosen if value not in accepted]:
                raise self._unknown(invalid[0], [*self.values, *self.others])
            self.others = tuple(accepted)  # replaced values remain available to the next fix or override
        self._assign(chosen)
        if self.default not in self._codes:
            near = nearest(self.default, self.values) if self.ordered else None
            self.default = self.values[0] if near is None else near

    def scalar(self, lookup: Callable[[str], Any]) -> Any:
        return lookup(self.name)

    def columns(self, lookup: Callable[[str], Column]) -> Column:
        return lookup(self.name)

    def bounds(self, lookup: Callable[[str], Interval]) -> Interval:
        return lookup(self.name)

    def hull(self, codes: np.ndarray | slice = slice(None)) -> Interval:
        """Interval of the values at `codes`; unknown for text."""
        if self.kind == TEXT:
            return UNKNOWN
        values = self._array[codes]
        return outward(values.min(), values.max())

    def _scalars(self, values: Any, argument: str) -> list[Value]:
        if isinstance(values, set | frozenset):
            raise SpaceError(f"{self._subject}: {argument} must be a list, which has an order, but got a set")
        if isinstance(values, str | bytes | Expression) or not hasattr(values, "__iter__"):
            raise SpaceError(f"{self._subject}: {argument} must be a list, but got {values!r}")
        if hasattr(values, "__len__") and len(values) > MAX_VALUES:
            raise SpaceError(f"{self._subject}: at most {MAX_VALUES} values, but got {len(values)}; use a larger step")
        return [python_scalar(value, f"{self._subject}: a value") for value in values]

    def _unknown(self, value: Value, valid_values: Sequence[Value]) -> SpaceError:
        near = nearest(value, valid_values)
        hint = f"; the nearest is {near!r}" if near is not None else ""
        return SpaceError(f"{self._subject} has no value {value!r}{hint}. Values: {listing(valid_values)}")

    def _unique(self, plain_values: Sequence[Value]) -> tuple[Value, ...]:
        if not plain_values:
            raise SpaceError(f"{self._subject} has no values; give at least one")
        values = [coerce(value, self.kind, self._subject) for value in plain_values]
        seen: set[Value] = set()
        for value in values:
            if value in seen:
                raise SpaceError(f"{self._subject} lists {value!r} twice")
            seen.add(value)
        return tuple(values)

    def _assign(self, values: tuple[Value, ...]) -> None:
        self.values = values
        """Values to choose from, in the given order."""
        self._codes = {value: code for code, value in enumerate(values)}
        dtypes: dict[str | None, type] = {FLAG: bool, INTEGER: np.int64, TEXT: object}
        self._array: np.ndarray = np.array(values, dtypes.get(self.kind, np.float64))

    def _key(self) -> tuple[Any, ...]:
        return "knob", self.name

    def __repr__(self) -> str:
        when = f", when={self.when.text!r}" if self.when is not None else ""
        return f"Knob({self.name!r}, [{listing(self.values)}], default={self.default!r}{when})"


class DerivedKnob(Knob):
    """A value derived from other knobs."""

    derived = True
    values = ()
    others = default = when = None
    monotone_memory = 0

    def __init__(self, name: str, rule: "Rule", help: str = "") -> None:
        self.name = check_name(name)
        self.names = (self.name,)
        self._subject = f"knob '{name}'"
        self.rule = rule
        """Expression or callable that computes it."""
        self.kind = rule.kind
        self.help = help

    def check(self, value: Any) -> Value:
        """Converts `value` to the knob's type.

        Raises:
            SpaceError: `value` is of another kind.
        """
        return coerce(value, self.kind, self._subject)

    def hull(self, codes: np.ndarray | slice = slice(None)) -> Interval:
        return UNKNOWN

    def __repr__(self) -> str:
        return f"Knob({self.name!r}, derived={self.rule.text!r})"


GRID = 25
"""Default number of values of a range of floats."""


def number_values(name: str, low: Any, high: Any, count: Any, log: bool) -> list[float]:
    """Evenly spaced values of a range of floats, including both ends, to four significant digits.

    Raises:
        SpaceError: the bounds are not ascending, not positive with `log`, or too close for `count` values.
    """
    subject = f"knob '{name}'"
    low, high = (coerce(bound, NUMBER, f"{subject}: {label}") for bound, label in ((low, "low"), (high, "high")))
    count = coerce(count, INTEGER, f"{subject}: count")
    if low >= high:
        raise SpaceError(f"{subject}: low < high must hold, but got low={low}, high={high}")
    if log and low <= 0:
        raise SpaceError(f"{subject}: with log=True low must be above 0, but got {low}")
    if not 2 <= count <= MAX_VALUES:
        raise SpaceError(f"{subject}: count must be from 2 to {MAX_VALUES}, but got {count}")
    grid = np.geomspace(low, high, count) if log else np.linspace(low, high, count)
    values = [low, *(float(f"{value:.4g}") for value in grid[1:-1]), high]
    if any(lower >= upper for lower, upper in itertools.pairwise(values)):
        raise SpaceError(
            f"{subject}: {count} values from {low} to {high} differ by less than four digits; give a smaller count"
        )
    return values


def integer_values(name: str, low: Any, high: Any, step: Any, powers_of_two: bool) -> range | list[int]:
    """Values of an integer knob, including `high`.

    Raises:
        SpaceError: the bounds or the step leave no value.
    """
    subject = f"knob '{name}'"
    low, high, step = (
        coerce(bound, INTEGER, f"{subject}: {label}") for bound, label in ((low, "low"), (high, "high"), (step, "step"))
    )
    if low > high:
        raise SpaceError(f"{subject}: low <= high must hold, but got low={low}, high={high}")
    if step < 1:
        raise SpaceError(f"{subject}: step must be at least 1, but got {step}")
    if not powers_of_two:
        return range(low, high + 1, step)
    if step != 1:
        raise SpaceError(f"{subject}: give either step or powers_of_two, not both")
    if high < 1:
        raise SpaceError(f"{subject}: no power of two lies between {low} and {high}")
    values = [1 << bit for bit in range(high.bit_length()) if low <= 1 << bit <= high]
    if not values:
        raise SpaceError(f"{subject}: no power of two lies between {low} and {high}")
    return values
