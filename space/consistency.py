"""Whether the rules of a space leave anything, and which of them contradict each other."""

from collections.abc import Iterable, Mapping, Sequence

from ..errors import SpaceError
from .config import Config
from .expression import Expression
from .grammar import parse
from .knob import Knob
from .operators import UNDEFINED
from .rules import Constraint, Predicate, RuleError
from .structure import Structure
from .valid_set import ValidSet
from .values import listing

_COMPARED = 10_000


def reaching(knobs: Mapping[str, Knob], names: Iterable[str]) -> dict[str, Knob]:
    """The knobs named, and those that they are derived from or conditional on, in the order of `knobs`."""
    found: set[str] = set()
    rest = list(names)
    while rest:
        name = rest.pop()
        if name not in found:
            found.add(name)
            knob = knobs[name]
            rest += knob.rule.names if knob.derived else knob.when.names if knob.when is not None else ()
    return {name: knob for name, knob in knobs.items() if name in found}


def check_alone(knobs: Mapping[str, Knob], constraint: Constraint) -> None:
    """Refuses a constraint that never holds where all its knobs are present, the other constraints aside.

    Passes it where that is not known: there is too much to look through, or a callable raises, which it may
    not do where other constraints hold.

    Raises:
        SpaceError: the constraint can never hold.
    """
    concerned = reaching(knobs, constraint.names)
    if not _possible(concerned, [constraint], strict=True):
        chosen = [knob for knob in concerned.values() if not knob.derived]
        ranges = "; ".join(f"{knob.name} is one of {listing(knob.values)}" for knob in chosen)
        raise SpaceError(f"constraint {constraint} can never hold: {ranges}")


def emptied_by(knobs: Mapping[str, Knob], constraints: Sequence[Constraint], start: str) -> str:
    """`start`, and which rules leave no configuration: constraints each of which is needed for it."""
    blamed = list(constraints)
    if _possible(knobs, blamed):
        return start
    for constraint in constraints:
        fewer = [each for each in blamed if each is not constraint]
        if not _possible(knobs, fewer):
            blamed = fewer
    if not blamed:
        return start + _without_value(knobs, start)
    named = [str(each) for each in blamed if str(each) not in start]
    return f"{start}: it contradicts {' and '.join(named)}" if named else start


def as_expression(knobs: Mapping[str, Knob], rule: Predicate) -> Expression | None:
    """The expression that a lambda amounts to, where its source is in the grammar and names only its knobs.

    Python and the grammar may differ, in a division by zero for instance, so both are compared on the values
    of the rule's knobs: on every combination, or on a sample of 10,000. None where they disagree anywhere.
    """
    if rule.body is None:
        return None
    try:
        expression = parse(rule.body, {name: knobs[name] for name in rule.names})
    except SpaceError:
        return None
    points = ValidSet(Structure(reaching(knobs, rule.names), []))
    try:
        return (
            expression
            if all(_agree(expression, rule, point) for point in points.sample(_COMPARED, 0))
            else None
        )
    except RuleError:
        return None


def _agree(expression: Expression, rule: Predicate, point: Config) -> bool:
    if any(name not in point for name in rule.names):
        return True  # does not apply
    result, value = rule.call(point), expression.scalar(point.__getitem__)
    if result is UNDEFINED or value is UNDEFINED:
        return result is value
    return type(result) is type(value) and result == value


def _without_value(knobs: Mapping[str, Knob], start: str) -> str:
    for name, knob in knobs.items():
        if knob.derived and f"'{name}'" not in start and not _possible(reaching(knobs, [name]), []):
            inner = [f"{each} = `{knobs[each].rule.text}`" for each in knob.rule.names if knobs[each].derived]
            where = f", where {' and '.join(inner)}" if inner else ""
            return f": derived knob '{name}' = `{knob.rule.text}` has no value{where}"
    return ""


def _possible(knobs: Mapping[str, Knob], constraints: Sequence[Constraint], *, strict: bool = False) -> bool:
    try:
        return ValidSet(Structure(knobs, constraints, strict=strict)).witness() is not None
    except RuleError:
        return True
