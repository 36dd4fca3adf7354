"""Semantics of each operator of an expression: on scalars, on numpy columns, and on intervals.

The three agree. Integers are exact: a result that does not fit 64 bits has no value rather than a wrong one, as do a
division by zero, a negative power of an integer, and a result that is not finite.

Scalars use `UNDEFINED` for "no value"; columns have a mask that is true where there is none (None: nowhere). An
interval `(low, high)` contains every value that the operator can return; conditions count as 0 and 1, so that `high ==
0` means "never true" and `low == 1` "never false".
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Final

import numpy as np

from .values import FLAG, INTEGER, INTEGER_LIMIT, NUMBER, NUMERIC, TEXT, Value, article

Column = tuple[np.ndarray, np.ndarray | None]
Interval = tuple[Any, Any]
UNKNOWN: Final[Interval] = (-math.inf, math.inf)
_EXACT = 2.0**53  # integers up to here are exact as floats


class _Undefined:
    """The only value for "no value"; as a condition it is false."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "UNDEFINED"

    def __reduce__(self) -> str:
        return "UNDEFINED"


UNDEFINED: Final = _Undefined()


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator: its sign, its precedence (as in Python), and its three implementations."""

    sign: str
    precedence: int
    family: str
    """`arithmetic`, `order`, `equality`, `membership` or `logic`: the kinds of operands it takes."""
    scalar: Callable[..., Any] | None
    """None for `&` and `|`, which may also decide if one side has no value: see expression.py."""
    vector: Callable[..., Column] | None
    """None as for `scalar`."""
    bounds: Callable[..., Interval]
    integer_bounds: Callable[..., Interval] | None = None
    """Tighter bounds if all operands are integers or flags."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_sign, (self.sign,)

    def kind(self, kinds: tuple[str | None, ...]) -> str | None:
        """Kind of the result; None if an operand's kind is only known at run time."""
        if self.family != "arithmetic":
            return FLAG
        if self.sign == "/" or NUMBER in kinds:
            return NUMBER
        return None if None in kinds else INTEGER

    def refusal(self, kinds: tuple[str | None, ...], texts: tuple[str, ...]) -> str | None:
        """Reason why operands of these kinds do not fit, or None if they do."""
        typed = [(kind, operand) for kind, operand in zip(kinds, texts) if kind is not None]
        if self.family == "logic":
            for kind, operand in typed:
                if kind != FLAG:
                    return (
                        f"'{self.sign}' joins conditions, but {operand} is {article(kind)}; put comparisons in "
                        "parentheses, as in (tp > 1) & (pp < 4)"
                    )
        elif self.family == "equality":
            groups = {NUMBER if kind in NUMERIC else kind: (kind, operand) for kind, operand in typed}
            if len(groups) > 1:
                (kind_a, a), (kind_b, b) = groups.values()
                return f"{a} is {article(kind_a)} and {b} is {article(kind_b)}: they are never equal"
        elif self.family != "membership":  # its values were converted to the operand's kind before
            for kind, operand in typed:
                if kind == TEXT:
                    return f"'{self.sign}' needs numbers, but {operand} is text"
        return None


def _by_sign(sign: str) -> Operator:
    return OPERATORS[sign]


def union(*masks: np.ndarray | None) -> np.ndarray | None:
    """True where any of the masks is; None means nowhere."""
    combined = None
    for mask in masks:
        if mask is not None:
            combined = mask if combined is None else combined | mask
    return combined


# -- numbers -------------------------------------------------------------------------------------------------


def _same_type(*values: int | float) -> list[Any]:
    """Converts numbers to one type, like numpy: all integers, or all floats."""
    for value in values:
        if isinstance(value, float):
            return [float(value) for value in values]
    return [int(value) for value in values]


def _numbers(sign: str, columns: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """Converts columns to one type: all int64, or all float64."""
    for column in columns:
        if column.dtype == object:
            raise TypeError(f"'{sign}' needs numbers, but got {column.ravel()[0]!r}")
    dtype = np.float64 if any(column.dtype.kind == "f" for column in columns) else np.int64
    return [column.astype(dtype, copy=False) for column in columns]


def _exactly(exact: Callable[..., Any]) -> Callable[..., Any]:
    """Scalar implementation of `exact`, a function of numbers of one type."""

    def scalar(*values: int | float) -> Any:
        try:
            result = exact(*_same_type(*values))
        except (ArithmeticError, ValueError):
            return UNDEFINED
        if isinstance(result, float):
            return result + 0.0 if math.isfinite(result) else UNDEFINED
        return result if abs(result) <= INTEGER_LIMIT else UNDEFINED

    return scalar


def _finite(column: np.ndarray) -> Column:
    bad = ~np.isfinite(column)
    return column + 0.0, bad if bad.any() else None


def _largest(column: np.ndarray) -> int:
    return int(np.abs(column).max(initial=0))


def _one_by_one(scalar: Callable[..., Any], a: np.ndarray, b: np.ndarray) -> Column:
    """Applies the scalar implementation to every element: slow and exact, for cases that numpy would round or wrap."""
    dtype = a.dtype
    a, b = np.broadcast_arrays(a, b)
    results = [scalar(x, y) for x, y in zip(a.ravel().tolist(), b.ravel().tolist())]
    bad = np.fromiter((result is UNDEFINED for result in results), bool, len(results)).reshape(a.shape)
    values = np.fromiter((0 if result is UNDEFINED else result for result in results), dtype, len(results))
    return values.reshape(a.shape), bad if bad.any() else None


def _arithmetic(
    sign: str,
    precedence: int,
    exact: Callable[..., Any],
    ufunc: Callable[..., np.ndarray],
    bounds: Callable[..., Interval],
    reach: Callable[[int, int], int] | None = None,
) -> Operator:
    """An operator that numpy also computes if it cannot wrap: if its `reach`, given the largest magnitudes of two
    integers, fits 64 bits; without `reach` it never wraps.
    """
    scalar = _exactly(exact)

    def vector(*columns: np.ndarray) -> Column:
        numbers = _numbers(sign, columns)
        if numbers[0].dtype.kind == "f":
            return _finite(ufunc(*numbers))
        if reach is None or reach(*map(_largest, numbers)) <= INTEGER_LIMIT:
            return ufunc(*numbers), None
        return _one_by_one(scalar, *numbers)

    return Operator(sign, precedence, "arithmetic", scalar, vector, bounds)


def _division(
    sign: str, exact: Callable[[Any, Any], Any], ufunc: np.ufunc, *bounds: Callable[..., Interval]
) -> Operator:
    def vector(*columns: np.ndarray) -> Column:
        a, b = _numbers(sign, columns)
        zero = b == 0
        bad = zero if zero.any() else None
        quotient = ufunc(a, b if bad is None else np.where(zero, b.dtype.type(1), b))
        if quotient.dtype.kind == "f":
            quotient, infinite = _finite(quotient)
            bad = union(bad, infinite)
        return quotient, bad

    return Operator(sign, 8, "arithmetic", _exactly(exact), vector, *bounds)


def _power(a: Any, b: Any) -> Any:
    if isinstance(a, float):
        return math.pow(a, b)
    return math.inf if b < 0 or (abs(a) > 1 and b > 63) else a**b


def _power_columns(*columns: np.ndarray) -> Column:
    a, b = _numbers("**", columns)
    if a.dtype.kind == "i" and b.size and b.min() >= 0:
        reach, most = _largest(a), _largest(b)
        if reach <= 1 or (most <= 63 and reach**most <= INTEGER_LIMIT):
            return np.power(a, b), None
    return _one_by_one(_exactly(_power), a, b)


# -- conditions ----------------------------------------------------------------------------------------------


def same(a: Value, b: Value) -> bool:
    """Equality of two plain values; a number equals the same number of the other kind."""
    if a is None or b is None or isinstance(a, str) or isinstance(b, str):
        return type(a) is type(b) and a == b
    a, b = _same_type(a, b)
    return a == b


def _equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype == object or b.dtype == object:
        return np.asarray(np.equal(a.astype(object), b.astype(object)), bool)
    if a.dtype != b.dtype:
        a, b = _numbers("==", (a, b))
    return a == b


def _order(sign: str, exact: Callable[[Any, Any], bool], ufunc: np.ufunc) -> Operator:
    def bounds(a: Interval, b: Interval) -> Interval:
        sides = ufunc(a[1], b[0]), ufunc(a[0], b[1])
        return _flags(*(sides if sign[0] == "<" else sides[::-1]))

    return Operator(
        sign,
        COMPARISON,
        "order",
        lambda a, b: exact(*_same_type(a, b)),
        lambda *columns: (ufunc(*_numbers(sign, columns)), None),
        bounds,
    )


# -- intervals -----------------------------------------------------------------------------------------------


def outward(low: Any, high: Any) -> Interval:
    """Widens an interval by one step if floats cannot represent every integer; unknown if it is NaN."""
    return _away(low, -np.inf), _away(high, np.inf)


def _away(end: Any, far: float) -> Any:
    if isinstance(end, int | float) and abs(end) < _EXACT:
        return float(end)
    end = np.asarray(end, np.float64)
    if not np.abs(end).max(initial=0) < _EXACT:  # or NaN
        moved = np.where(np.abs(end) >= _EXACT, np.nextafter(end, far), end)
        end = np.where(np.isnan(end), far, moved)
    return end


def _corners(function: Callable[[Any, Any], Any], a: Interval, b: Interval) -> Interval:
    """Hull over the corners: the range of a function that is monotone in each argument."""
    values = [function(x, y) for x in a for y in b]
    low = high = values[0]
    for value in values[1:]:
        low, high = np.minimum(low, value), np.maximum(high, value)
    return outward(low, high)


def _only_where(valid: Any, interval: Interval) -> Interval:
    return np.where(valid, interval[0], -np.inf), np.where(valid, interval[1], np.inf)


def _excludes_zero(b: Interval) -> Any:
    return (np.asarray(b[0]) > 0) | (np.asarray(b[1]) < 0)


def _divide_bounds(a: Interval, b: Interval) -> Interval:
    return _only_where(_excludes_zero(b), _corners(np.true_divide, a, b))


def _floor_bounds(a: Interval, b: Interval, slack: float = 1.0) -> Interval:
    low, high = _divide_bounds(a, b)  # Python's float // is not the floor of the rounded quotient
    return outward(np.floor(low) - slack, np.floor(high) + slack)


def _modulo_bounds(a: Interval, b: Interval, gap: float = 0.0) -> Interval:
    positive = np.asarray(b[0]) > 0
    high = np.asarray(b[1]) - gap
    high = np.where(np.asarray(a[0]) >= 0, np.minimum(high, a[1]), high)
    low, high = _only_where(positive, outward(np.zeros_like(high), high))
    settled = (np.asarray(a[0]) == a[1]) & (np.asarray(b[0]) == b[1]) & _excludes_zero(b)
    exact = np.remainder(a[0], b[0])
    return np.where(settled, exact, low), np.where(settled, exact, high)


def _power_bounds(a: Interval, b: Interval) -> Interval:
    low, high = _corners(np.power, a, b)
    low, high = low - np.abs(low) * 1e-12, high + np.abs(high) * 1e-12  # pow is not correctly rounded
    return _only_where((np.asarray(a[0]) >= 0) & (np.asarray(b[0]) >= 0), outward(low, high))


def _flags(low: Any, high: Any) -> Interval:
    return np.asarray(low, np.float64), np.asarray(high, np.float64)


def _equal_bounds(a: Interval, b: Interval) -> Interval:
    possible = (np.asarray(a[0]) <= b[1]) & (np.asarray(b[0]) <= a[1])
    certain = (np.asarray(a[0]) == a[1]) & (np.asarray(b[0]) == b[1]) & (np.asarray(a[0]) == b[0])
    return _flags(certain, possible)


def _not_bounds(a: Interval) -> Interval:
    return 1.0 - np.asarray(a[1]), 1.0 - np.asarray(a[0])


def _fold(ufunc: np.ufunc) -> Callable[..., Interval]:
    return lambda *intervals: tuple(reduce(ufunc, ends) for ends in zip(*intervals))


# -- the table -----------------------------------------------------------------------------------------------

# Precedences are Python's: or 1, and 2, not 3, comparisons 4, | 5, & 6, + - 7, * / // % 8, unary 9, ** 10.
COMPARISON, UNARY, POWER, ATOM = 4, 9, 10, 11

OPERATORS: Final[dict[str, Operator]] = {
    entry.sign: entry
    for entry in [
        Operator("|", 5, "logic", None, None, _fold(np.maximum)),
        Operator("&", 6, "logic", None, None, _fold(np.minimum)),
        Operator("~", UNARY, "logic", operator.not_, lambda a: (~a.astype(bool, copy=False), None), _not_bounds),
        _order("<", operator.lt, np.less),
        _order("<=", operator.le, np.less_equal),
        _order(">", operator.gt, np.greater),
        _order(">=", operator.ge, np.greater_equal),
        Operator("==", COMPARISON, "equality", same, lambda a, b: (_equal(a, b), None), _equal_bounds),
        Operator(
            "!=",
            COMPARISON,
            "equality",
            lambda a, b: not same(a, b),
            lambda a, b: (~_equal(a, b), None),
            lambda a, b: _not_bounds(_equal_bounds(a, b)),
        ),
        Operator(
            "in",
            COMPARISON,
            "membership",
            lambda a, *values: any(same(a, value) for value in values),
            lambda a, *values: (reduce(np.logical_or, (_equal(a, value) for value in values)), None),
            lambda a, *values: _fold(np.maximum)(*(_equal_bounds(a, value) for value in values)),
        ),
        _arithmetic("+", 7, operator.add, np.add, lambda a, b: outward(a[0] + b[0], a[1] + b[1]), operator.add),
        _arithmetic("-", 7, operator.sub, np.subtract, lambda a, b: outward(a[0] - b[1], a[1] - b[0]), operator.add),
        _arithmetic("*", 8, operator.mul, np.multiply, lambda a, b: _corners(np.multiply, a, b), operator.mul),
        _division("/", lambda a, b: float(a) / float(b), np.true_divide, _divide_bounds),
        _division("//", operator.floordiv, np.floor_divide, _floor_bounds, partial(_floor_bounds, slack=0.0)),
        _division("%", operator.mod, np.remainder, _modulo_bounds, partial(_modulo_bounds, gap=1.0)),
        Operator("**", POWER, "arithmetic", _exactly(_power), _power_columns, _power_bounds),
        _arithmetic("neg", UNARY, operator.neg, np.negative, lambda a: (-np.asarray(a[1]), -np.asarray(a[0]))),
        _arithmetic("min", ATOM, min, lambda *columns: reduce(np.minimum, columns), _fold(np.minimum)),
        _arithmetic("max", ATOM, max, lambda *columns: reduce(np.maximum, columns), _fold(np.maximum)),
    ]
}
