"""Rules of a space: an expression, or any callable that names knobs as its parameters."""

import inspect
import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SpaceError
from .expression import Expression
from .operators import UNDEFINED
from .values import Value, plain


class RuleError(SpaceError):
    """A callable of a space raised, or returned what is no value."""


class Predicate:
    """A callable over knobs: its parameters are their names.

    It is called with plain Python values. `ZeroDivisionError` means that there is no value here, as for an
    expression; any other exception surfaces as a SpaceError that names the values it was raised for, once
    the point is one that every other rule allows.
    """

    kind = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise SpaceError(f"the parameters of {function!r} cannot be read ({error}); use a lambda") from None
        self.parameters = tuple(signature.parameters.values())
        for each in self.parameters:
            if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
                raise SpaceError(
                    f"{_named(function)} has the parameter '{each}'; a rule names each of its knobs as an ordinary "
                    "parameter, as in lambda tp, pp: tp <= pp"
                )
        self.names: tuple[str, ...] = ()
        """The knobs it takes, in the order of its parameters; set by `bind`."""
        self.text = _source(function) or f"{_named(function)}({', '.join(each.name for each in self.parameters)})"

    def bind(self, known: Any) -> str | None:
        """Settles which parameters are knobs; the name of the first that is none, or None if all is well.

        A parameter with a default that is not a knob keeps its default.
        """
        names = []
        for each in self.parameters:
            if each.name in known:
                names.append(each.name)
            elif each.default is each.empty:
                return each.name
        self.names = tuple(names)
        return None

    def call(self, values: Mapping[str, Value]) -> Any:
        """What the callable returns; `UNDEFINED` for a division by zero.

        Raises:
            SpaceError: the callable raised something else.
        """
        given = {name: values[name] for name in self.names}
        try:
            return self.function(**given)
        except ZeroDivisionError:
            return UNDEFINED
        except Exception as error:  # surfaces, with the point that the traceback does not show
            shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise RuleError(f"`{self.text}` raised {type(error).__name__}: {error} for {shown}") from error

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Predicate({self.text!r})"


Rule = Expression | Predicate


def holds(rule: Rule, values: Mapping[str, Value]) -> bool:
    """Whether a condition is true at a point; without a value it is not.

    Raises:
        SpaceError: a predicate raised.
    """
    result = compute(rule, values, condition=True)
    return result is not UNDEFINED and bool(result)


def compute(rule: Rule, values: Mapping[str, Any], *, condition: bool = False) -> Any:
    """The plain value of a rule at a point, or `UNDEFINED`. A derivation's None or NaN is no value.

    Raises:
        SpaceError: a callable raised, or returned what is no value of a knob.
    """
    if isinstance(rule, Expression):
        return rule.scalar(values.__getitem__)
    result = rule.call(values)
    if result is UNDEFINED:
        return UNDEFINED
    if condition:
        return truth(rule, result)
    return settled(rule, result)


def truth(rule: Predicate, result: Any) -> bool:
    """The truth of what a predicate returned."""
    try:
        return bool(result)
    except (TypeError, ValueError) as error:
        raise RuleError(f"`{rule.text}` must return True or False: {error}") from error


def settled(rule: Predicate, result: Any) -> Any:
    """The value that a derivation returned, `UNDEFINED` for None and for what is not finite."""
    if result is None or (isinstance(result, float) and result - result != 0):
        return UNDEFINED
    try:
        return plain(result, f"what `{rule.text}` returns")
    except SpaceError as error:
        raise RuleError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Constraint:
    """A condition that every configuration meets where all its knobs are present."""

    rule: Rule
    reason: str = ""
    origin: str = ""
    """`fix NAME` or `override NAME` for one that stands for a fixed or overridden derived knob."""

    @property
    def names(self) -> tuple[str, ...]:
        """The knobs it mentions."""
        return self.rule.names

    @property
    def text(self) -> str:
        """The condition as text."""
        return self.rule.text

    def __str__(self) -> str:
        return f"`{self.text}`" + (f" ({self.reason})" if self.reason else "")


def _named(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    return "the lambda" if name.endswith("<lambda>") else name.rsplit(".", 1)[-1]


def _source(function: Callable[..., Any]) -> str | None:
    """`lambda tp: tp > 1` for a lambda whose source is at hand; its code object knows where its body is."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_name != "<lambda>":
        return None
    spans = [span for span in code.co_positions() if None not in span and span[0] <= span[1]]
    lines = linecache.getlines(code.co_filename)
    # The first instructions (RESUME, COPY_FREE_VARS) sit on the line of the lambda with no width.
    spans = [span for span in spans if (span[0], span[2]) != (span[1], span[3])]
    if not spans or not lines or max(span[1] for span in spans) > len(lines):
        return None
    start = min((span[0], span[2]) for span in spans)
    end = max((span[1], span[3]) for span in spans)
    picked = [line.encode() for line in lines[start[0] - 1 : end[0]]]  # columns count bytes
    picked[-1] = picked[-1][: end[1]]
    picked[0] = picked[0][start[1] :]
    body = " ".join(b" ".join(picked).decode(errors="replace").split())
    parameters = ", ".join(inspect.signature(function).parameters)
    return f"lambda {parameters}: {body}" if body else None
