"""Explains why a point is not in a space and which rules leave a space empty; describes a space."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import SpaceError, unknown
from .expression import Expression, Operation
from .knob import DerivedKnob, Knob
from .operators import UNDEFINED
from .rules import Constraint, Rule, RuleError, compute, holds
from .structure import Structure, reaching
from .valid_set import ValidSet
from .values import Value, coerce, kind_of, listing

# -- a point -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Point:
    """A mapping of knob to value, checked against a space."""

    values: dict[str, Value] = field(default_factory=dict)
    """Values in the knobs' types, in evaluation order; absent knobs are left out."""
    absent: set[str] = field(default_factory=set)
    """Knobs whose condition is false, or that are derived from such knobs."""
    unsettled: set[str] = field(default_factory=set)
    """Knobs without a usable value, and those that depend on them."""
    problems: list[str] = field(default_factory=list)
    """Problems, one sentence each; empty for a valid point."""


def resolve(
    knobs: Mapping[str, Knob],
    constraints: Iterable[Constraint],
    values: Mapping[str, Any],
    *,
    complete: bool = False,
    stop_early: bool = False,
) -> Point:
    """Checks `values` against every knob and rule of a space.

    Args:
        knobs: by name, each after those it depends on.
        constraints: constraints of the space.
        values: values by name.
        complete: fill in defaults and derived values instead of reporting them as missing.
        stop_early: stop at the first problem.

    Raises:
        SpaceError: a callable of the space raised, and there is no other problem.
    """
    point = Point()
    raised: RuleError | None = None
    for name in values:
        if name not in knobs:
            point.problems.append(unknown("knob", name, knobs))
    for name, knob in knobs.items():
        if stop_early and point.problems:
            return point
        try:
            if isinstance(knob, DerivedKnob):
                _derived(point, knob, values, complete)
            else:
                _chosen(point, knob, values, complete)
        except RuleError as error:
            raised = raised or error
            point.unsettled.add(name)
    for constraint in constraints:
        if stop_early and point.problems:
            return point
        if point.absent.isdisjoint(constraint.names) and point.unsettled.isdisjoint(constraint.names):
            try:
                if not holds(constraint.rule, point.values):
                    point.problems.append(_violation(constraint, point.values))
            except RuleError as error:
                raised = raised or error
    if raised is not None and not point.problems:
        raise raised
    return point


def _chosen(point: Point, knob: Knob, values: Mapping[str, Any], complete: bool) -> None:
    name = knob.name
    if knob.when is not None:
        if not point.unsettled.isdisjoint(knob.when.names):
            point.unsettled.add(name)
            return
        hidden = point.absent.intersection(knob.when.names)
        if hidden or not holds(knob.when, point.values):
            point.absent.add(name)
            if name in values:
                point.problems.append(_inapplicable(name, knob.when, point, hidden))
            return
    if name not in values and not complete:
        point.problems.append(f"knob '{name}' is missing; its values are {', '.join(map(str, knob.values[:12]))}")
        point.unsettled.add(name)
        return
    try:
        point.values[name] = knob.check(values[name]) if name in values else knob.default
    except SpaceError as error:
        point.problems.append(str(error))
        point.unsettled.add(name)


def _derived(point: Point, knob: DerivedKnob, values: Mapping[str, Any], complete: bool) -> None:
    name, rule = knob.name, knob.rule
    hidden = point.absent.intersection(rule.names)
    if hidden:
        point.absent.add(name)
        if name in values:
            point.problems.append(
                f"knob '{name}' does not apply here: it is derived from {_listed(hidden)}, which does not either"
            )
        return
    if not point.unsettled.isdisjoint(rule.names):
        point.unsettled.add(name)
        return
    value = compute(rule, point.values)
    if value is UNDEFINED:
        point.problems.append(
            f"knob '{name}' has no value: `{rule.text}` cannot be computed with {_shown(rule, point.values)}"
        )
        point.unsettled.add(name)
        return
    point.values[name] = value
    if name in values:
        try:
            agrees = coerce(values[name], kind_of(value), f"knob '{name}'") == value
        except SpaceError:
            agrees = False
        if not agrees:
            point.problems.append(
                f"knob '{name}' is {values[name]!r}, but `{rule.text}` gives {value!r} with {_shown(rule, point.values)}"
            )
    elif not complete:
        point.problems.append(f"derived knob '{name}' is missing; it is {value!r} here, and config() fills it in")


def _inapplicable(name: str, when: Rule, point: Point, hidden: set[str]) -> str:
    start = f"knob '{name}' does not apply here: it exists when `{when.text}`, "
    if hidden:
        return start + f"and {_listed(hidden)} does not apply either"
    return start + f"and {_shown(when, point.values)}"


def _violation(constraint: Constraint, values: Mapping[str, Value]) -> str:
    violation = f"violates {constraint} with {_shown(constraint.rule, values)}"
    rule = constraint.rule
    if isinstance(rule, Operation) and rule.operator.family in ("order", "equality"):
        left, right = (argument.scalar(values.__getitem__) for argument in rule.arguments)
        if left is UNDEFINED or right is UNDEFINED:
            side = rule.arguments[0 if left is UNDEFINED else 1]
            return f"{violation}: `{side}` has no value"
        return f"{violation}: {left!r} {rule.operator.sign} {right!r} is false"
    if isinstance(rule, Expression) and rule.scalar(values.__getitem__) is UNDEFINED:
        return f"{violation}: it has no value"
    return violation


def _shown(rule: Rule, values: Mapping[str, Value]) -> str:
    return ", ".join(f"{name}={values[name]!r}" for name in rule.names)


def _listed(names: set[str]) -> str:
    return " and ".join(f"'{name}'" for name in sorted(names))


# -- contradictions -----------------------------------------------------------------------------------------


def check_alone(knobs: Mapping[str, Knob], constraint: Constraint) -> None:
    """Checks that a constraint can hold with all its knobs present, without the other constraints.

    Passes if its knobs are never present together, or if that is unknown: there are too many combinations, or a
    callable raises, which other constraints may prevent.

    Raises:
        SpaceError: the constraint can never hold.
    """
    concerned = {name: copy.copy(knob) for name, knob in reaching(knobs, constraint.names).items()}
    present = []
    for knob in concerned.values():
        if knob.when is not None:
            present.append(Constraint(knob.when))
            knob.when = None
    # A constraint whose knobs are never present together excludes nothing.
    if not _possible(concerned, [*present, constraint]) and _possible(concerned, present):
        chosen = [knob for knob in concerned.values() if not knob.derived]
        ranges = "; ".join(f"{knob.name} is one of {listing(knob.values)}" for knob in chosen)
        raise SpaceError(f"constraint {constraint} can never hold: {ranges}")


def emptied_by(knobs: Mapping[str, Knob], constraints: Sequence[Constraint], start: str) -> str:
    """Returns `start`, followed by the rules that leave no configuration: a minimal set of constraints."""
    conflicting = list(constraints)
    if _possible(knobs, conflicting):
        return start
    # One constraint after the other is left out; those without which a configuration is possible remain.
    for constraint in constraints:
        fewer = [candidate for candidate in conflicting if candidate is not constraint]
        if not _possible(knobs, fewer):
            conflicting = fewer
    if not conflicting:
        return start + _without_value(knobs, start)
    contradicting = [str(constraint) for constraint in conflicting if str(constraint) not in start]
    return f"{start}: it contradicts {' and '.join(contradicting)}" if contradicting else start


def has_value(knobs: Mapping[str, Knob], name: str, value: Value) -> bool:
    """True if the derived knobs have values in some combination with this value of a knob."""
    restricted = copy.copy(knobs[name])
    restricted.set_values([value])
    return _possible({**knobs, name: restricted}, [])


def _without_value(knobs: Mapping[str, Knob], start: str) -> str:
    cause = next((knob for name, knob in knobs.items() if knob.derived and f"derived knob '{name}' = " in start), None)
    if cause is not None:
        try:
            problems = resolve(reaching(knobs, [cause.name]), (), {}, complete=True).problems
        except RuleError as error:
            problems = [str(error)]
        return f": {problems[0]}" if problems else ""
    for name, knob in knobs.items():
        if isinstance(knob, DerivedKnob) and f"'{name}'" not in start and not _possible(reaching(knobs, [name]), []):
            mentioned = [knobs[dependency] for dependency in knob.rule.names]
            inner = [f"{base.name} = `{base.rule.text}`" for base in mentioned if isinstance(base, DerivedKnob)]
            detail = f", where {' and '.join(inner)}" if inner else ""
            return f": derived knob '{name}' = `{knob.rule.text}` has no value{detail}"
    return ""


def _possible(knobs: Mapping[str, Knob], constraints: Sequence[Constraint]) -> bool:
    try:
        return ValidSet(Structure(knobs, constraints)).witness() is not None
    except RuleError:
        return True


# -- description ---------------------------------------------------------------------------------------------


def describe(knobs: Sequence[Knob], constraints: Sequence[Constraint], size: int | None) -> str:
    """See `Space.describe`.

    Args:
        knobs: all knobs, including derived ones.
        constraints: constraints of the space.
        size: number of valid configurations; None if they are too many to list.
    """
    lines = ["more configurations to try than can be listed" if size is None else f"{size:,} configurations to try", ""]
    width = max((len(knob.name) for knob in knobs), default=0)
    for knob in knobs:
        if isinstance(knob, DerivedKnob):
            columns = [f"= {knob.rule.text}"]
        else:
            columns = [listing(knob.values)]
            if len(knob.values) > 1:
                columns.append(f"default {knob.default}")
            if knob.when is not None:
                columns.append(f"when {knob.when.text}")
        if knob.help:
            columns.append(knob.help)
        lines.append(f"  {knob.name:<{width}}  {'  |  '.join(columns)}")
    if constraints:
        lines += ["", "constraints"]
        width = max(len(constraint.text) for constraint in constraints)
        lines += [f"  {constraint.text:<{width}}  {constraint.reason}".rstrip() for constraint in constraints]
    return "\n".join(lines)
