"""Expressions over knobs: trees built by operators, with a text, a value, and bounds.

    >>> tp * pp <= 8
    Expression('tp * pp <= 8')

An expression has no truth value, so `and`, `or`, `not`, `in`, chained comparisons and the builtins `min` and `max`
cannot be used on it; use `&`, `|`, `~`, `isin`, `minimum` and `maximum` instead.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ..base.errors import SpaceError
from .operators import (
    ATOM,
    COMPARISON,
    OPERATORS,
    POWER,
    UNARY,
    UNDEFINED,
    UNKNOWN,
    Column,
    Interval,
    Operator,
    outward,
    union,
)
from .values import FLAG, INTEGER, TEXT, coerce, is_number, kind_of, python_scalar

MAX_DEPTH = 200
"""Deepest nesting of an expression; evaluation recurses, and Python allows 1,000 calls."""


Method = Callable[["Expression", Any], "Expression"]


def _joining(sign: str) -> tuple[Method, Method]:
    """Methods of an operator: for an expression on its left, and for one only on its right."""
    return (lambda self, other: operation(sign, self, other)), (lambda self, other: operation(sign, other, self))


class Expression:
    """A value computed from knobs. Every operator returns a new expression; none evaluates anything."""

    __array_ufunc__ = None  # numpy scalars on the left delegate the operation to this class
    kind: str | None
    """`flag`, `integer`, `number` or `text`; None if only a callable determines it."""
    names: tuple[str, ...] = ()
    """Knobs that it mentions, in order of first mention."""
    precedence: int = ATOM
    depth: int = 1

    @property
    def text(self) -> str:
        """The expression in the grammar of `redline.space.grammar`."""
        raise NotImplementedError

    def scalar(self, lookup: Callable[[str], Any]) -> Any:
        """Value, given a function from a knob's name to its value; `UNDEFINED` if there is none."""
        raise NotImplementedError

    def columns(self, lookup: Callable[[str], Column]) -> Column:
        """Values and mask of undefined ones, given a function from a knob's name to those of the knob."""
        raise NotImplementedError

    def bounds(self, lookup: Callable[[str], Interval]) -> Interval:
        """An interval that contains every value, given a function from a name to the knob's interval."""
        raise NotImplementedError

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """Value for a mapping of knob to value, or a column for a mapping of knob to numpy column.

        A scalar without a value (a division by zero) is None; in columns, a condition without a value is False, and
        any other expression's column is masked (`numpy.ma`).

        Raises:
            SpaceError: a knob is missing.
        """
        missing = [name for name in self.names if name not in values]
        if missing:
            raise SpaceError(f"`{self}` needs a value for {', '.join(missing)}")
        if not any(isinstance(values[name], np.ndarray) for name in self.names):
            value = self.scalar({name: python_scalar(values[name]) for name in self.names}.__getitem__)
            return None if value is UNDEFINED else value
        arrays = {name: _as_column(values[name]) for name in self.names}
        with np.errstate(all="ignore"):
            value, undefined = self.columns(lambda name: (arrays[name], None))
        if undefined is None:
            return value
        return value & ~undefined if value.dtype == bool else np.ma.masked_array(value, undefined)

    def identical(self, other: "Expression") -> bool:
        """True if both are the same tree."""
        return self._key() == other._key()

    def _key(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def isin(self, values: Iterable[Any]) -> "Expression":
        """Condition that this is one of `values`; in text, `tp in [1, 2]`."""
        return membership(self, values)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise SpaceError(
            f"`{self}` has no truth value: it is an expression over knobs, not a result. Write & | ~ instead "
            "of and, or, not; knob.isin([1, 2]) instead of in; (1 < a) & (a < 8) instead of 1 < a < 8; and "
            "minimum, maximum of redline.space instead of min, max"
        )

    __add__, __radd__ = _joining("+")
    __sub__, __rsub__ = _joining("-")
    __mul__, __rmul__ = _joining("*")
    __truediv__, __rtruediv__ = _joining("/")
    __floordiv__, __rfloordiv__ = _joining("//")
    __mod__, __rmod__ = _joining("%")
    __pow__, __rpow__ = _joining("**")
    __and__, __rand__ = _joining("&")
    __or__, __ror__ = _joining("|")
    # Python itself mirrors a comparison if the expression is on its right.
    __lt__, __le__, __gt__, __ge__, __eq__, __ne__ = (  # type: ignore[assignment]
        _joining(sign)[0] for sign in ("<", "<=", ">", ">=", "==", "!=")
    )

    def __neg__(self) -> "Expression":
        return operation("neg", self)

    def __pos__(self) -> "Expression":
        return self

    def __invert__(self) -> "Expression":
        return operation("~", self)

    def _without_value(self, *digits: Any) -> Any:
        raise SpaceError(
            f"`{self}` has no value yet, as it differs between configurations: use // for whole numbers, as in a // 2"
        )

    __int__ = __float__ = __index__ = __round__ = __trunc__ = __floor__ = __ceil__ = _without_value

    def __contains__(self, item: Any) -> bool:
        raise SpaceError(f"'in' cannot ask `{self}`: it is an expression over knobs, not a collection")

    def __iter__(self) -> Any:
        raise SpaceError(f"`{self}` cannot be iterated: it is an expression over knobs, not a collection")


class Constant(Expression):
    """A value written in an expression."""

    def __init__(self, value: Any) -> None:
        self.value = python_scalar(value, "a value in an expression")
        self.kind = kind_of(self.value)
        if is_number(self.value) and self.value < 0:
            self.precedence = UNARY

    @property
    def text(self) -> str:
        return repr(self.value)

    def scalar(self, lookup: Callable[[str], Any]) -> Any:
        return self.value

    def columns(self, lookup: Callable[[str], Column]) -> Column:
        return _as_column(self.value), None

    def bounds(self, lookup: Callable[[str], Interval]) -> Interval:
        return UNKNOWN if self.kind == TEXT else outward(self.value, self.value)

    def _key(self) -> tuple[Any, ...]:
        return type(self.value), self.value


class Operation(Expression):
    """An operator and its operands."""

    def __init__(self, operator: Operator, arguments: tuple[Expression, ...]) -> None:
        kinds = tuple(argument.kind for argument in arguments)
        refusal = operator.refusal(kinds, tuple(f"`{argument}`" for argument in arguments))
        if refusal:
            raise SpaceError(f"`{_render(operator, arguments)}`: {refusal}")
        self.operator = operator
        self.arguments = arguments
        self.precedence = operator.precedence if _denied(operator, arguments) is None else COMPARISON
        self.kind = operator.kind(kinds)
        self.names = tuple(dict.fromkeys(name for argument in arguments for name in argument.names))
        self.depth = 1 + max(argument.depth for argument in arguments)
        if self.depth > MAX_DEPTH:
            raise SpaceError(f"an expression may be nested {MAX_DEPTH} deep at most; derive a part of it first")
        # kind None may become floats, whose bounds are wider
        self._integral = all(kind in (INTEGER, FLAG) for kind in kinds)

    @property
    def text(self) -> str:
        return _render(self.operator, self.arguments)

    def scalar(self, lookup: Callable[[str], Any]) -> Any:
        sign, compute = self.operator.sign, self.operator.scalar
        if compute is None:
            # Three-valued logic: an undefined side decides nothing, a deciding side settles it.
            decisive = sign == "|"
            undefined = False
            for argument in self.arguments:
                side = argument.scalar(lookup)
                if side is UNDEFINED:
                    undefined = True
                elif bool(side) is decisive:
                    return decisive
            return UNDEFINED if undefined else not decisive
        values = [argument.scalar(lookup) for argument in self.arguments]
        if UNDEFINED in values:
            return UNDEFINED
        if self.operator.family in ("arithmetic", "order"):
            for value, argument in zip(values, self.arguments):
                if value is None or isinstance(value, str):
                    raise SpaceError(f"`{self}`: '{sign}' needs numbers, but `{argument}` is {value!r}")
        return compute(*values)

    def columns(self, lookup: Callable[[str], Column]) -> Column:
        sides = [argument.columns(lookup) for argument in self.arguments]
        vector = self.operator.vector
        if vector is None:
            return _logic(self.operator.sign == "|", *sides)
        try:
            values, undefined = vector(*(value for value, _ in sides))
        except TypeError as error:
            raise SpaceError(f"`{self}`: {error}") from None
        return values, union(undefined, *(mask for _, mask in sides))

    def bounds(self, lookup: Callable[[str], Interval]) -> Interval:
        intervals = [argument.bounds(lookup) for argument in self.arguments]
        bounds = self.operator.integer_bounds if self._integral else None
        return (bounds or self.operator.bounds)(*intervals)

    def _key(self) -> tuple[Any, ...]:
        return self.operator.sign, *(argument._key() for argument in self.arguments)


def operation(sign: str, *arguments: Any) -> Expression:
    """Returns the expression of an operator and its operands, each an expression or a plain value.

    Raises:
        SpaceError: the operands' kinds do not fit the operator.
    """
    operands = tuple(argument if isinstance(argument, Expression) else Constant(argument) for argument in arguments)
    base = operands[0]
    if sign == "neg" and isinstance(base, Constant) and is_number(base.value):
        return Constant(-base.value)
    if sign == "**" and base.kind == INTEGER and isinstance(operands[1], Constant):
        exponent = operands[1].value
        if isinstance(exponent, int) and exponent < 0:
            raise SpaceError(
                f"`{_render(OPERATORS['**'], operands)}`: the power of an integer needs an "
                "exponent of at least 0; divide instead"
            )
    return Operation(OPERATORS[sign], operands)


def membership(subject: Expression, values: Iterable[Any]) -> Expression:
    """Condition that an expression is one of some values; in text, `tp in [1, 2]`.

    Raises:
        SpaceError: no values, or some of another kind.
    """
    try:
        if isinstance(values, str | Expression):
            raise TypeError
        members = sorted(values, key=repr) if isinstance(values, set | frozenset) else list(values)
    except TypeError:
        raise SpaceError(f"isin takes a list of values, but got {values!r}") from None
    if not members:
        raise SpaceError(f"`{subject}` is never one of no values; give isin at least one")
    constants = [Constant(coerce(member, subject.kind, f"`{subject}`")) for member in members]
    return Operation(OPERATORS["in"], (subject, *constants))


def minimum(*arguments: Any) -> Expression:
    """Smallest of two or more expressions or numbers; `min(a, b)` in text."""
    return _extreme("min", arguments)


def maximum(*arguments: Any) -> Expression:
    """Largest of two or more expressions or numbers; `max(a, b)` in text."""
    return _extreme("max", arguments)


_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


def negation(condition: Any) -> Any:
    """Negates a condition, with `~` moved into its comparisons and constants folded.

    >>> negation((tp > 1) & (pp == 2) & True)
    Expression('tp <= 1 | pp != 2')

    Returns:
        An expression; a bool if the condition is one or is constant.
    """
    if not isinstance(condition, Operation):
        return (
            ~condition
            if isinstance(condition, Expression) and not isinstance(condition, Constant)
            else (not getattr(condition, "value", condition))
        )
    sign, arguments = condition.operator.sign, condition.arguments
    if sign in "&|":
        left, right = map(negation, arguments)
        decisive = sign == "&"  # operator whose negation is decided by one side: `|` by True, `&` by False
        for side, opposite in ((left, right), (right, left)):
            if isinstance(side, bool):
                return decisive if side is decisive else opposite
        return left | right if decisive else left & right
    if sign == "~":
        return arguments[0]
    if sign in _OPPOSITE:
        return operation(_OPPOSITE[sign], *map(_without_ones, arguments))
    return ~condition


def _without_ones(expression: Expression) -> Expression:
    """The expression without factors of 1."""
    if not isinstance(expression, Operation):
        return expression
    arguments = tuple(map(_without_ones, expression.arguments))
    if expression.operator.sign == "*":
        left, right = arguments
        for factor, cofactor in ((left, right), (right, left)):
            if isinstance(factor, Constant) and factor.value == 1 and factor.kind == INTEGER:
                return cofactor
    return Operation(expression.operator, arguments)


def _extreme(sign: str, arguments: tuple[Any, ...]) -> Expression:
    if len(arguments) < 2:
        raise SpaceError(f"{sign}(...) takes two or more arguments, but got {len(arguments)}")
    return operation(sign, *arguments)


def _as_column(value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind in "bif":
        return array
    return array.astype(np.int64) if array.dtype.kind == "u" else array.astype(object)


def _logic(decisive: bool, left: Column, right: Column) -> Column:
    (a, a_bad), (b, b_bad) = left, right
    a, b = a.astype(bool, copy=False), b.astype(bool, copy=False)
    result = a | b if decisive else a & b
    if a_bad is None and b_bad is None:
        return result, None
    settled = np.zeros(result.shape, bool)
    for value, bad in ((a, a_bad), (b, b_bad)):
        side = value if decisive else ~value
        settled = settled | (side if bad is None else side & ~bad)
    return np.where(settled, decisive, result), union(a_bad, b_bad) & ~settled


def _denied(operator: Operator, arguments: tuple[Expression, ...]) -> Operation | None:
    """The membership that this negates, which is written `not in`; None for anything else."""
    only = arguments[0]
    if operator.sign == "~" and isinstance(only, Operation) and only.operator.sign == "in":
        return only
    return None


def _wrapped(expression: Expression, least: int) -> str:
    return expression.text if expression.precedence >= least else f"({expression.text})"


def _render(operator: Operator, arguments: tuple[Expression, ...]) -> str:
    sign, level = operator.sign, operator.precedence
    denied = _denied(operator, arguments)
    if denied is not None:
        sign, arguments = "not in", denied.arguments
    if sign in ("in", "not in"):
        subject, *values = arguments
        return f"{_wrapped(subject, COMPARISON + 1)} {sign} [{', '.join(value.text for value in values)}]"
    if sign in ("min", "max"):
        return f"{sign}({', '.join(argument.text for argument in arguments)})"
    if len(arguments) == 1:
        return f"{'-' if sign == 'neg' else sign}{_wrapped(arguments[0], UNARY)}"
    left, right = arguments
    if level == POWER:  # right-associative, and binds less tightly than a sign on its right
        return f"{_wrapped(left, ATOM)} ** {_wrapped(right, UNARY)}"
    least = level + 1 if level == COMPARISON else level  # comparisons do not chain
    return f"{_wrapped(left, least)} {sign} {_wrapped(right, level + 1)}"
