"""Rules of a space: an expression, or any callable whose parameters are knobs."""

import ast
import inspect
import linecache
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..base.errors import SpaceError, unknown
from .expression import Expression
from .grammar import parse
from .operators import UNDEFINED
from .values import FLAG, Value, article, python_scalar

_SUBSCRIPT = re.compile(r"""\bconfig\[(['"])(\w+)\1\]""")


class RuleError(SpaceError):
    """A callable of a space raised, or returned an invalid value."""


class Predicate:
    """A callable over knobs: its parameters are their names, or one parameter `config` is a mapping of them.

    It is called with plain Python values. `ZeroDivisionError` means that there is no value, as in an expression; any
    other exception becomes a SpaceError with the values it was raised for, if the point satisfies every other rule.
    """

    kind = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise SpaceError(f"the parameters of {function!r} cannot be read ({error}); use a lambda") from None
        self.parameters = tuple(signature.parameters.values())
        for parameter in self.parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise SpaceError(
                    f"{_named(function)} has the parameter '{parameter}'; a rule names each of its knobs as an "
                    "ordinary parameter, as in lambda tp, pp: tp <= pp"
                )
        self.names: tuple[str, ...] = ()
        """Its knobs, in the order of its parameters; set by `bind`."""
        self.body = _lambda_body(function)
        """Source of a lambda's result; None if it is not available."""
        self.grammar = self.body
        """The same over the names of knobs."""
        listed = ", ".join(parameter.name for parameter in self.parameters)
        self.text = f"{_named(function)}({listed})" if self.body is None else f"lambda {listed}: {self.body}"

    def bind(self, knobs: Any) -> str | None:
        """Determines which parameters are knobs. Returns the name of the first that is not, or None.

        A parameter with a default that is not a knob keeps its default. A single parameter `config` that is not a knob
        gets a mapping of the knobs whose names occur as texts in the function.
        """
        self._mapped = [parameter.name for parameter in self.parameters] == ["config"] and "config" not in knobs
        if self._mapped:
            texts = _texts(getattr(self.function, "__code__", None))
            self.names = tuple(name for name in knobs if name in texts)
            if self.body is not None:
                self.grammar = _SUBSCRIPT.sub(r"\2", self.body)
            return None if self.names else "config"
        names = []
        for parameter in self.parameters:
            if parameter.name in knobs:
                names.append(parameter.name)
            elif parameter.default is parameter.empty:
                return parameter.name
        self.names = tuple(names)
        # If the knobs are the first parameters, they can be passed by position, which is faster.
        self._by_position = self.names == tuple(parameter.name for parameter in self.parameters[: len(names)]) and all(
            parameter.kind == parameter.POSITIONAL_OR_KEYWORD for parameter in self.parameters[: len(names)]
        )
        return None

    def call(self, values: Mapping[str, Value]) -> Any:
        """Result of the callable at a point; `UNDEFINED` for a division by zero.

        Raises:
            RuleError: the callable raised something else.
        """
        return self.call_all([[values[name]] for name in self.names])[0]

    def call_all(self, columns: Sequence[Sequence[Value]]) -> list[Any]:
        """Results of the callable at many points, given the values of each of its knobs there.

        Raises:
            RuleError: the callable raised something other than a division by zero.
        """
        function, names = self.function, self.names
        results: list[Any] = []
        for point in zip(*columns):
            try:
                if self._mapped:
                    results.append(function(dict(zip(names, point))))
                    continue
                results.append(function(*point) if self._by_position else function(**dict(zip(names, point))))
            except ZeroDivisionError:
                results.append(UNDEFINED)
            except Exception as error:  # raised again with the point, which the traceback does not show
                arguments = ", ".join(f"{name}={value!r}" for name, value in zip(names, point))
                raise RuleError(f"`{self.text}` raised {type(error).__name__}: {error} for {arguments}") from error
        return results

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Predicate({self.text!r})"


class Listed(Predicate):
    """A condition that holds if the knobs have the values of one of the listed rows."""

    def __init__(self, names: Sequence[str], rows: Iterable[tuple[Value, ...]]) -> None:
        self.names = tuple(names)
        self.rows = frozenset(rows)
        self.body = self.grammar = None
        self.text = f"({', '.join(self.names)}) is one of {len(self.rows):,} rows"

    def call_all(self, columns: Sequence[Sequence[Value]]) -> list[Any]:
        return [point in self.rows for point in zip(*columns)]


def _texts(code: Any) -> set[str]:
    """Texts in the constants of a function's code, including those of functions inside of it."""
    if isinstance(code, str):
        return {code}
    constants = code if isinstance(code, tuple | frozenset) else getattr(code, "co_consts", ())
    return {name for constant in constants for name in _texts(constant)}


def _named(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    return "the lambda" if name.endswith("<lambda>") else name.rsplit(".", 1)[-1]


def _lambda_body(function: Callable[..., Any]) -> str | None:
    """The expression that a lambda returns, as written; None for any other callable, or without a source."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_name != "<lambda>":
        return None
    source = "".join(linecache.getlines(code.co_filename, getattr(function, "__globals__", None)))
    spans = [span for span in code.co_positions() if None not in span]
    spans = [(span[0], span[2], span[1], span[3]) for span in spans]  # start and end as (line, column) pairs
    spans = [span for span in spans if span[:2] != span[2:]]
    if not source or not spans:
        return None
    start, end = min(span[:2] for span in spans), max(span[2:] for span in spans)
    enclosing = [
        body
        for line, body in _lambdas(source)
        if line == code.co_firstlineno
        and (body.lineno, body.col_offset) <= start
        and end <= (body.end_lineno, body.end_col_offset)
    ]
    if not enclosing:
        return None
    innermost = max(enclosing, key=lambda body: (body.lineno, body.col_offset))
    written = ast.get_source_segment(source, innermost)
    return None if written is None else " ".join(written.split())


@lru_cache(maxsize=4)
def _lambdas(source: str) -> list[tuple[int, Any]]:
    """Line and body of every lambda of a file. The source is parsed, as Python did before, not run."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    return [(node.lineno, node.body) for node in ast.walk(tree) if isinstance(node, ast.Lambda)]


Rule = Expression | Predicate


def holds(rule: Rule, values: Mapping[str, Value]) -> bool:
    """True if a condition is true at a point; False without a value.

    Raises:
        RuleError: a predicate raised.
    """
    if isinstance(rule, Expression):
        return bool(rule.scalar(values.__getitem__))
    return truth_value(rule, rule.call(values))


def compute(rule: Rule, values: Mapping[str, Any]) -> Any:
    """The plain value that a rule derives at a point, or `UNDEFINED`.

    Raises:
        RuleError: a callable raised, or returned an invalid value for a knob.
    """
    if isinstance(rule, Expression):
        return rule.scalar(values.__getitem__)
    return settled(rule, rule.call(values))


def truth_value(rule: Predicate, result: Any) -> bool:
    """Truth value of a predicate's result."""
    try:
        return bool(result)
    except (TypeError, ValueError) as error:
        raise RuleError(f"`{rule.text}` must return True or False: {error}") from error


def settled(rule: Predicate, result: Any) -> Any:
    """Value of a derivation's result, `UNDEFINED` for None and for values that are not finite."""
    if result is None or result is UNDEFINED or (isinstance(result, float) and result - result != 0):
        return UNDEFINED
    try:
        return python_scalar(result, f"what `{rule.text}` returns")
    except SpaceError as error:
        raise RuleError(str(error)) from None


def read_rule(source: Any, subject: str, knobs: Mapping[str, Expression]) -> Rule:
    """Converts `given` to a rule over knobs: an expression, its text, or a callable.

    Raises:
        SpaceError: it is none of these, or names an unknown knob, or none.
    """
    if isinstance(source, Predicate):
        source = source.function
    rule: Rule
    stranger = None
    if isinstance(source, str):
        rule = parse(source, knobs)
    elif isinstance(source, Expression):
        rule = source
        stranger = next((name for name in source.names if name not in knobs), None)
    elif callable(source):
        rule = Predicate(source)
        stranger = rule.bind(knobs)
    else:
        hint = ""
        if type(source).__name__ in ("bool", "bool_"):
            hint = ": Python evaluated it to a constant, because it contains no knob"
        raise SpaceError(f"{subject} must be an expression, its text, or a callable, but got {source!r}{hint}")
    if stranger is not None:
        parameters = (
            " The parameters of a callable are knobs, or one named config is a mapping: lambda config: config['NAME'] > 1"
            if isinstance(rule, Predicate)
            else ""
        )
        raise SpaceError(f"{subject}, `{rule.text}`: {unknown('knob', stranger, knobs)}{parameters}")
    if not rule.names:
        raise SpaceError(f"{subject}, `{rule.text}`, mentions no knob")
    return rule


def read_condition(source: Any, subject: str, knobs: Mapping[str, Expression]) -> Rule:
    """Converts `given` to a condition over knobs.

    Raises:
        SpaceError: as `read_rule`, or it is a number or a text.
    """
    rule = read_rule(source, subject, knobs)
    if rule.kind not in (FLAG, None):
        raise SpaceError(
            f"{subject}: `{rule.text}` is {article(rule.kind)}, not a condition; compare it with something"
        )
    return rule


@dataclass(frozen=True, slots=True)
class Constraint:
    """A condition that every configuration with all its knobs must satisfy."""

    rule: Rule
    reason: str = ""
    origin: str = ""
    """`fix NAME` or `override NAME` for the constraint of a fixed or overridden derived knob."""

    @property
    def names(self) -> tuple[str, ...]:
        """Knobs that it mentions."""
        return self.rule.names

    @property
    def text(self) -> str:
        """The condition as text."""
        return self.rule.text

    def __str__(self) -> str:
        return f"`{self.text}`" + (f" ({self.reason})" if self.reason else "")
