"""What each operator of an expression does: on scalars, on numpy columns, and on intervals.

The three agree. Integers are exact: what does not fit 64 bits has no value rather than a wrong one, and
neither has a division by zero, a negative power of an integer, or a result that is not finite.

Scalars use `UNDEFINED` for "no value"; columns carry a mask that is true where there is none (None: nowhere).
An interval `(low, high)` holds every value that the operator can give when it gives one; conditions count as
0 and 1, so that `high == 0` means "never true" and `low == 1` "never false".
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .values import FLAG, INTEGER, INTEGER_LIMIT, NUMBER, NUMERIC, TEXT, Value, article

Column = tuple[np.ndarray, np.ndarray | None]
Interval = tuple[Any, Any]
UNKNOWN: Final[Interval] = (-math.inf, math.inf)
_EXACT = 2.0**53  # integers up to here are exact as floats


class _Undefined:
    """The one value of what has no value; as a condition it does not hold."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "UNDEFINED"

    def __reduce__(self) -> str:
        return "UNDEFINED"


UNDEFINED: Final = _Undefined()


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator: its sign, how tightly it binds (as in Python), and its three meanings."""

    sign: str
    precedence: int
    family: str
    """`arithmetic`, `order`, `equality` or `logic`: which kinds of operands it takes."""
    scalar: Callable[..., Any]
    vector: Callable[..., Column]
    bounds: Callable[..., Interval]

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_sign, (self.sign,)

    def kind(self, kinds: tuple[str | None, ...]) -> str | None:
        """Kind of the result; None where an operand's kind is only known at run time."""
        if self.family != "arithmetic":
            return FLAG
        if self.sign == "/" or NUMBER in kinds:
            return NUMBER
        return None if None in kinds else INTEGER

    def refusal(self, kinds: tuple[str | None, ...], texts: tuple[str, ...]) -> str | None:
        """Why operands of these kinds do not fit, or None where they do."""
        known = [(kind, text) for kind, text in zip(kinds, texts) if kind is not None]
        if self.family == "logic":
            for kind, text in known:
                if kind != FLAG:
                    return (
                        f"'{self.sign}' joins conditions, but {text} is {article(kind)}; put comparisons in "
                        "parentheses, as in (tp > 1) & (pp < 4)"
                    )
        elif self.family == "equality":
            groups = {NUMBER if kind in NUMERIC else kind: (kind, text) for kind, text in known}
            if len(groups) > 1:
                (kind, text), (other, other_text) = groups.values()
                return f"{text} is {article(kind)} and {other_text} is {article(other)}: they are never equal"
        else:
            for kind, text in known:
                if kind == TEXT:
                    return f"'{self.sign}' needs numbers, but {text} is text"
        return None


def _by_sign(sign: str) -> Operator:
    return OPERATORS[sign]


def union(*masks: np.ndarray | None) -> np.ndarray | None:
    """True where any of the masks is; None stands for nowhere."""
    out = None
    for mask in masks:
        if mask is not None:
            out = mask if out is None else out | mask
    return out


# -- numbers -------------------------------------------------------------------------------------------------


def _alike(*values: Value) -> list[Any]:
    """Numbers of one type, as numpy would take them: all integers, or all floats."""
    if any(isinstance(value, float) for value in values):
        return [float(value) for value in values]
    return [int(value) for value in values]


def _number(value: Any) -> Any:
    if isinstance(value, float):
        return value + 0.0 if math.isfinite(value) else UNDEFINED
    return value if abs(value) <= INTEGER_LIMIT else UNDEFINED


def _numeric_columns(sign: str, columns: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    for column in columns:
        if column.dtype == object:
            raise TypeError(f"'{sign}' needs numbers, but got {column.ravel()[0]!r}")
    if any(column.dtype.kind == "f" for column in columns):
        return [column.astype(np.float64, copy=False) for column in columns]
    return [column.astype(np.int64, copy=False) for column in columns]


def _finite(column: np.ndarray) -> Column:
    bad = ~np.isfinite(column)
    return column + 0.0, bad if bad.any() else None


def _largest(column: np.ndarray) -> int:
    return int(np.abs(column).max(initial=0))


def _one_by_one(scalar: Callable[..., Any], a: np.ndarray, b: np.ndarray, dtype: type) -> Column:
    """Every element by the scalar operator: slow and exact, for what numpy would round or wrap."""
    a, b = np.broadcast_arrays(a, b)
    results = [scalar(x, y) for x, y in zip(a.ravel().tolist(), b.ravel().tolist())]
    bad = np.fromiter((each is UNDEFINED for each in results), bool, len(results)).reshape(a.shape)
    values = np.fromiter((0 if each is UNDEFINED else each for each in results), dtype, len(results))
    return values.reshape(a.shape), bad if bad.any() else None


def _arithmetic(sign: str, exact: Callable[[Any, Any], Any], ufunc: np.ufunc) -> tuple[Any, Any]:
    """Scalar and vector form of + - *; the vector form takes numpy's way wherever it cannot wrap."""

    def scalar(a: Value, b: Value) -> Any:
        return _number(exact(*_alike(a, b)))

    def vector(*columns: np.ndarray) -> Column:
        a, b = _numeric_columns(sign, columns)
        if a.dtype.kind == "f":
            return _finite(ufunc(a, b))
        reach = (_largest(a), _largest(b))
        if (reach[0] * reach[1] if sign == "*" else sum(reach)) <= INTEGER_LIMIT:
            return ufunc(a, b), None
        return _one_by_one(scalar, a, b, np.int64)

    return scalar, vector


def _divide_scalar(
    exact: Callable[[Any, Any], Any], *, floats: bool = False
) -> Callable[[Value, Value], Any]:
    def scalar(a: Value, b: Value) -> Any:
        a, b = _alike(a, b)
        if b == 0:
            return UNDEFINED
        return _number(exact(float(a), float(b)) if floats else exact(a, b))

    return scalar


def _divide_vector(sign: str, ufunc: np.ufunc, *, floats: bool = False) -> Callable[..., Column]:
    def vector(*columns: np.ndarray) -> Column:
        a, b = _numeric_columns(sign, columns)
        if floats:
            a, b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
        zero = b == 0
        bad = zero if zero.any() else None
        if bad is not None:
            b = np.where(zero, b.dtype.type(1), b)
        out = ufunc(a, b)
        if out.dtype.kind == "f":
            out, infinite = _finite(out)
            bad = union(bad, infinite)
        return out, bad

    return vector


def _power_scalar(a: Value, b: Value) -> Any:
    a, b = _alike(a, b)
    if isinstance(a, int):
        if b < 0 or (abs(a) > 1 and b > 63):
            return UNDEFINED
        return _number(a**b)
    try:
        return _number(math.pow(a, b))
    except (ValueError, OverflowError, ZeroDivisionError):
        return UNDEFINED


def _power_vector(*columns: np.ndarray) -> Column:
    a, b = _numeric_columns("**", columns)
    if a.dtype.kind == "i" and b.size and b.min() >= 0:
        reach, most = _largest(a), _largest(b)
        if reach <= 1 or (most <= 63 and reach**most <= INTEGER_LIMIT):
            return np.power(a, b), None
    return _one_by_one(_power_scalar, a, b, a.dtype.type)


def _negate_vector(*columns: np.ndarray) -> Column:
    (a,) = _numeric_columns("-", columns)
    return (-a + 0.0 if a.dtype.kind == "f" else -a), None


def _extreme(choose: Callable[..., Any], ufunc: np.ufunc) -> tuple[Any, Any]:
    def vector(*columns: np.ndarray) -> Column:
        columns = _numeric_columns(choose.__name__, columns)
        out = columns[0]
        for column in columns[1:]:
            out = ufunc(out, column)
        return out, None

    return (lambda *values: choose(_alike(*values))), vector


# -- conditions ----------------------------------------------------------------------------------------------


def same(a: Value, b: Value) -> bool:
    """Equality of two plain values; a number equals the same number of the other kind."""
    if a is None or b is None or isinstance(a, str) or isinstance(b, str):
        return type(a) is type(b) and a == b
    a, b = _alike(a, b)
    return a == b


def _equal_columns(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype == object or b.dtype == object:
        return np.asarray(np.equal(a.astype(object), b.astype(object)), bool)
    if a.dtype != b.dtype:
        a, b = _numeric_columns("==", (a, b))
    return a == b


def _order(sign: str, ufunc: np.ufunc, exact: Callable[[Any, Any], bool]) -> tuple[Any, Any]:
    def vector(*columns: np.ndarray) -> Column:
        return ufunc(*_numeric_columns(sign, columns)), None

    return (lambda a, b: exact(*_alike(a, b))), vector


def _not_scalar(a: Value) -> Any:
    return not a


# -- intervals -----------------------------------------------------------------------------------------------


def outward(low: Any, high: Any) -> Interval:
    """Widened by one step where floats no longer hold every integer; unknown where it is not a number."""
    low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
    if np.abs(low).max(initial=0) >= _EXACT or np.isnan(low).any():
        low = np.where(
            np.isnan(low), -np.inf, np.where(np.abs(low) >= _EXACT, np.nextafter(low, -np.inf), low)
        )
    if np.abs(high).max(initial=0) >= _EXACT or np.isnan(high).any():
        high = np.where(
            np.isnan(high), np.inf, np.where(np.abs(high) >= _EXACT, np.nextafter(high, np.inf), high)
        )
    return low, high


def _corners(function: Callable[[Any, Any], Any], a: Interval, b: Interval) -> Interval:
    """The hull over the corners: the range of a function that is monotone in each argument."""
    values = [function(x, y) for x in a for y in b]
    low = high = values[0]
    for value in values[1:]:
        low, high = np.minimum(low, value), np.maximum(high, value)
    return outward(low, high)


def _only_where(known: Any, interval: Interval) -> Interval:
    return np.where(known, interval[0], -np.inf), np.where(known, interval[1], np.inf)


def _excludes_zero(b: Interval) -> Any:
    return (np.asarray(b[0]) > 0) | (np.asarray(b[1]) < 0)


def _divide_bounds(a: Interval, b: Interval, *, integral: bool = False) -> Interval:
    return _only_where(_excludes_zero(b), _corners(np.true_divide, a, b))


def _floor_bounds(a: Interval, b: Interval, *, integral: bool) -> Interval:
    low, high = _divide_bounds(a, b)
    slack = 0.0 if integral else 1.0  # Python's float // is not the floor of the rounded quotient
    return outward(np.floor(low) - slack, np.floor(high) + slack)


def _modulo_bounds(a: Interval, b: Interval, *, integral: bool) -> Interval:
    positive = np.asarray(b[0]) > 0
    high = np.asarray(b[1]) - (1.0 if integral else 0.0)
    high = np.where(np.asarray(a[0]) >= 0, np.minimum(high, a[1]), high)
    low, high = _only_where(positive, outward(np.zeros_like(high), high))
    settled = (np.asarray(a[0]) == a[1]) & (np.asarray(b[0]) == b[1]) & _excludes_zero(b)
    exact = np.remainder(a[0], b[0])
    return np.where(settled, exact, low), np.where(settled, exact, high)


def _power_bounds(a: Interval, b: Interval, *, integral: bool) -> Interval:
    low, high = _corners(np.power, a, b)
    low, high = low - np.abs(low) * 1e-12, high + np.abs(high) * 1e-12  # pow is not correctly rounded
    return _only_where((np.asarray(a[0]) >= 0) & (np.asarray(b[0]) >= 0), outward(low, high))


def _flags(low: Any, high: Any) -> Interval:
    return np.asarray(low, np.float64), np.asarray(high, np.float64)


def _equal_bounds(a: Interval, b: Interval, *, integral: bool = False) -> Interval:
    possible = (np.asarray(a[0]) <= b[1]) & (np.asarray(b[0]) <= a[1])
    certain = (np.asarray(a[0]) == a[1]) & (np.asarray(b[0]) == b[1]) & (np.asarray(a[0]) == b[0])
    return _flags(certain, possible)


def _not_bounds(a: Interval, *, integral: bool = False) -> Interval:
    return 1.0 - np.asarray(a[1]), 1.0 - np.asarray(a[0])


def _fold(function: Callable[[Any, Any], Any]) -> Callable[..., Interval]:
    def bounds(*intervals: Interval, integral: bool = False) -> Interval:
        low, high = intervals[0]
        for other in intervals[1:]:
            low, high = function(low, other[0]), function(high, other[1])
        return low, high

    return bounds


def _less(a: Any, b: Any) -> Any:
    return np.asarray(a) < b


def _at_most(a: Any, b: Any) -> Any:
    return np.asarray(a) <= b


# -- the table -----------------------------------------------------------------------------------------------


def _ignoring_kind(bounds: Callable[..., Interval]) -> Callable[..., Interval]:
    return lambda *intervals, integral=False: bounds(*intervals)


_add = _arithmetic("+", operator.add, np.add)
_subtract = _arithmetic("-", operator.sub, np.subtract)
_multiply = _arithmetic("*", operator.mul, np.multiply)
_minimum = _extreme(min, np.minimum)
_maximum = _extreme(max, np.maximum)

# Precedences are Python's: or 1, and 2, not 3, comparisons 4, | 5, & 6, + - 7, * / // % 8, unary 9, ** 10.
COMPARISON, UNARY, POWER, ATOM = 4, 9, 10, 11

OPERATORS: Final[dict[str, Operator]] = {
    each.sign: each
    for each in [
        Operator("|", 5, "logic", None, None, _fold(np.maximum)),  # three-valued: see expression.py
        Operator("&", 6, "logic", None, None, _fold(np.minimum)),
        Operator(
            "~", UNARY, "logic", _not_scalar, lambda a: (~a.astype(bool, copy=False), None), _not_bounds
        ),
        Operator(
            "<",
            4,
            "order",
            *_order("<", np.less, operator.lt),
            _ignoring_kind(lambda a, b: _flags(_less(a[1], b[0]), _less(a[0], b[1]))),
        ),
        Operator(
            "<=",
            4,
            "order",
            *_order("<=", np.less_equal, operator.le),
            _ignoring_kind(lambda a, b: _flags(_at_most(a[1], b[0]), _at_most(a[0], b[1]))),
        ),
        Operator(
            ">",
            4,
            "order",
            *_order(">", np.greater, operator.gt),
            _ignoring_kind(lambda a, b: _flags(_less(b[1], a[0]), _less(b[0], a[1]))),
        ),
        Operator(
            ">=",
            4,
            "order",
            *_order(">=", np.greater_equal, operator.ge),
            _ignoring_kind(lambda a, b: _flags(_at_most(b[1], a[0]), _at_most(b[0], a[1]))),
        ),
        Operator("==", 4, "equality", same, lambda a, b: (_equal_columns(a, b), None), _equal_bounds),
        Operator(
            "!=",
            4,
            "equality",
            lambda a, b: not same(a, b),
            lambda a, b: (~_equal_columns(a, b), None),
            _ignoring_kind(lambda a, b: _not_bounds(_equal_bounds(a, b))),
        ),
        Operator("+", 7, "arithmetic", *_add, _ignoring_kind(lambda a, b: outward(a[0] + b[0], a[1] + b[1]))),
        Operator(
            "-", 7, "arithmetic", *_subtract, _ignoring_kind(lambda a, b: outward(a[0] - b[1], a[1] - b[0]))
        ),
        Operator("*", 8, "arithmetic", *_multiply, _ignoring_kind(lambda a, b: _corners(np.multiply, a, b))),
        Operator(
            "/",
            8,
            "arithmetic",
            _divide_scalar(operator.truediv, floats=True),
            _divide_vector("/", np.true_divide, floats=True),
            _divide_bounds,
        ),
        Operator(
            "//",
            8,
            "arithmetic",
            _divide_scalar(operator.floordiv),
            _divide_vector("//", np.floor_divide),
            _floor_bounds,
        ),
        Operator(
            "%",
            8,
            "arithmetic",
            _divide_scalar(operator.mod),
            _divide_vector("%", np.remainder),
            _modulo_bounds,
        ),
        Operator("**", POWER, "arithmetic", _power_scalar, _power_vector, _power_bounds),
        Operator(
            "neg",
            UNARY,
            "arithmetic",
            lambda a: _number(-_alike(a)[0]),
            _negate_vector,
            _ignoring_kind(lambda a: (-np.asarray(a[1]), -np.asarray(a[0]))),
        ),
        Operator("min", ATOM, "arithmetic", *_minimum, _fold(np.minimum)),
        Operator("max", ATOM, "arithmetic", *_maximum, _fold(np.maximum)),
    ]
}
