"""Structure of a space's rules: dependencies, and independent groups of knobs.

Also determines the order in which the knobs of a component are joined, so that the rules apply early.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from .expression import Constant, Expression, Operation
from .knob import DerivedKnob, Knob
from .operators import UNDEFINED, UNKNOWN, Column, Interval, outward
from .rules import Constraint, Listed, Predicate, Rule, compute, holds
from .values import Value

_SAFE = 2.0**62  # half of what int64 holds: bounds are floats, rounded outward


@dataclass(frozen=True, eq=False, slots=True)
class Check:
    """A condition on configurations, prepared for the enumeration."""

    label: Constraint | DerivedKnob
    """Its rule: a constraint, or a derived knob that must have a value."""
    rule: Expression | Predicate
    """The condition; for a derived knob, the expression that must have a value."""
    bases: frozenset[str]
    """Knobs to be chosen before it can be checked."""
    conditionals: frozenset[str]
    """Those of `bases` that may be absent; if one is, the check does not apply."""
    opaque: bool
    """True if it calls a Python function, itself or through a derived knob."""

    @property
    def equation(self) -> bool:
        """True if all knobs but one determine the last."""
        return isinstance(self.rule, Operation) and self.rule.operator.sign == "=="

    @property
    def computes(self) -> str | None:
        """Derived knob that a callable computes here."""
        if isinstance(self.label, DerivedKnob) and isinstance(self.rule, Predicate):
            return self.label.name
        return None


class Structure:
    """The rules of a space, resolved.

    Knobs with a single value and no condition are constants and do not connect rules. All other knobs are grouped into
    components: sets of knobs that share no rule, whose valid sets multiply.

    Args:
        knobs: every knob by name, each after those it depends on.
        constraints: the constraints, in order.
    """

    def __init__(self, knobs: Mapping[str, Knob], constraints: Sequence[Constraint]) -> None:
        self.knobs = dict(knobs)
        self.constraints = tuple(constraints)
        self.fixed: dict[str, Value] = {}
        """Values that no choice changes."""
        self.bases: dict[str, frozenset[str]] = {}
        self._conditionals: dict[str, frozenset[str]] = {}
        self._opaque: set[str] = set()
        for name, knob in self.knobs.items():
            self._resolve(name, knob)
        self.variables = tuple(name for name, knob in self.knobs.items() if not knob.derived and name not in self.fixed)
        self.contradiction: Constraint | DerivedKnob | None = None
        """The first rule that fails for every choice, because it depends only on constants."""
        self._settle()
        self.checks = tuple(self._checks()) if self.contradiction is None else ()
        self.components = self._components() if self.contradiction is None else ()

    # -- dependencies ----------------------------------------------------------------------------------------

    def _resolve(self, name: str, knob: Knob) -> None:
        if isinstance(knob, DerivedKnob):
            self.bases[name] = self.bases_of(knob.rule.names)
            self._conditionals[name] = self.conditionals_of(knob.rule.names)
            if _calls(knob.rule) or self._opaque.intersection(knob.rule.names):
                self._opaque.add(name)
        elif len(knob.values) == 1 and knob.when is None:
            self.fixed[name] = knob.values[0]
            self.bases[name] = self._conditionals[name] = frozenset()
        else:
            self.bases[name] = frozenset({name})
            self._conditionals[name] = frozenset({name}) if knob.when is not None else frozenset()

    def bases_of(self, names: Iterable[str]) -> frozenset[str]:
        """Knobs to be chosen before all of `names` have a value."""
        return frozenset().union(*(self.bases[name] for name in names))

    def conditionals_of(self, names: Iterable[str]) -> frozenset[str]:
        """Knobs whose absence makes one of `names` absent; a conditional knob is one itself."""
        return frozenset().union(*(self._conditionals[name] for name in names))

    def needs(self, name: str) -> frozenset[str]:
        """Knobs to be chosen before the presence of `name` is known."""
        when = self.knobs[name].when
        return self.bases_of(when.names) if when is not None else frozenset()

    def _settle(self) -> None:
        """Derives values that depend only on constants, and checks the rules that depend only on them."""
        for name, knob in self.knobs.items():
            if isinstance(knob, DerivedKnob) and not self.bases[name] and self.contradiction is None:
                value = compute(knob.rule, self.fixed)
                if value is UNDEFINED:
                    self.contradiction = knob
                else:
                    self.fixed[name] = value
        for constraint in self.constraints:
            if (
                self.contradiction is None
                and not self.bases_of(constraint.names)
                and not holds(constraint.rule, self.fixed)
            ):
                self.contradiction = constraint

    # -- checks ----------------------------------------------------------------------------------------------

    def _checks(self) -> Iterable[Check]:
        for name, knob in self.knobs.items():
            if (
                isinstance(knob, DerivedKnob)
                and self.bases[name]
                and (isinstance(knob.rule, Predicate) or not self._always_defined(knob.rule))
            ):
                yield self._check(knob, knob.rule)
        for constraint in self.constraints:
            if self.bases_of(constraint.names):
                for conjunct in _conjuncts(constraint.rule):
                    check = self._check(constraint, conjunct)
                    if self.bases_of(conjunct.names):
                        yield check
                    elif not holds(conjunct, self.fixed):
                        if check.bases:
                            yield check
                        else:
                            self.contradiction = self.contradiction or constraint

    def _check(self, label: Constraint | DerivedKnob, rule: Expression | Predicate) -> Check:
        # The whole constraint does not apply if one of its knobs is absent, whichever part names it.
        names = label.names if isinstance(label, Constraint) else rule.names
        return Check(
            label=label,
            rule=rule,
            bases=self.bases_of(rule.names) | self.conditionals_of(names),
            conditionals=self.conditionals_of(names),
            opaque=_calls(rule) or not self._opaque.isdisjoint(rule.names),
        )

    def _always_defined(self, rule: Expression) -> bool:
        ranges: dict[str, Interval] = {}

        def interval(name: str) -> Interval:
            if name not in ranges:
                knob = self.knobs[name]
                if isinstance(knob, DerivedKnob) and isinstance(knob.rule, Expression):
                    ranges[name] = knob.rule.bounds(interval)
                else:
                    ranges[name] = knob.hull()
            return ranges[name]

        def defined(node: Expression) -> bool:
            if isinstance(node, DerivedKnob):
                return isinstance(node.rule, Predicate) or defined(node.rule)
            if not isinstance(node, Operation):
                return True
            if not all(defined(argument) for argument in node.arguments):
                return False
            if node.operator.family != "arithmetic":
                return True
            low, high = node.bounds(interval)  # infinite for a division by zero
            return bool(low > -_SAFE and high < _SAFE)

        with np.errstate(all="ignore"):
            return defined(rule)

    def _components(self) -> tuple["tuple[str, ...]", ...]:
        parent = {name: name for name in self.variables}

        def root(name: str) -> str:
            while parent[name] != name:
                parent[name] = parent[parent[name]]
                name = parent[name]
            return name

        groups = [check.bases for check in self.checks]
        groups += [self.needs(name) | {name} for name in self.variables]
        for group in groups:
            representative, *members = group
            for member in members:
                parent[root(member)] = root(representative)
        components: dict[str, list[str]] = {}
        for name in self.variables:
            components.setdefault(root(name), []).append(name)
        return tuple(tuple(names) for names in components.values())


def reaching(knobs: Mapping[str, Knob], names: Iterable[str]) -> dict[str, Knob]:
    """The named knobs, and those that they are derived from or conditional on, in the order of `knobs`."""
    reached: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            knob = knobs[name]
            if isinstance(knob, DerivedKnob):
                pending += knob.rule.names
            elif knob.when is not None:
                pending += knob.when.names
    return {name: knob for name, knob in knobs.items() if name in reached}


class Lookup:
    """Columns by name: chosen or computed already, constant, or derived by an expression on first use.

    Args:
        structure: the rules.
        load: returns the column of a chosen knob or of a callable's results; None for any other name.
    """

    def __init__(self, structure: Structure, load: Callable[[str], np.ndarray | None]) -> None:
        self.structure = structure
        self.load = load
        self.memo: dict[str, Column] = {}

    def __call__(self, name: str) -> Column:
        column = self.memo.get(name)
        if column is None:
            values = self.load(name)
            if values is not None:
                column = values, None
            elif name in self.structure.fixed:
                column = Constant(self.structure.fixed[name]).columns(self)
            else:
                knob = self.structure.knobs[name]
                # Chosen knobs and what callables return are loaded.
                assert isinstance(knob, DerivedKnob) and isinstance(knob.rule, Expression)
                column = knob.rule.columns(self)
            self.memo[name] = column
        return column


class Ranges:
    """Intervals by name: exact if a column is known, otherwise the hull of the remaining choices.

    Args:
        lookup: columns of chosen knobs.
        hulls: interval of the values of each open knob.
    """

    def __init__(self, lookup: Lookup, hulls: Mapping[str, Interval]) -> None:
        self.lookup = lookup
        self.hulls = hulls
        self.memo: dict[str, Interval] = {}

    def __call__(self, name: str) -> Interval:
        interval = self.memo.get(name)
        if interval is None:
            interval = self.memo[name] = self._interval(name)
        return interval

    def _interval(self, name: str) -> Interval:
        structure = self.lookup.structure
        if name in self.hulls:
            return self.hulls[name]
        if name in structure.fixed:
            return Constant(structure.fixed[name]).bounds(self)
        knob = structure.knobs[name]
        if isinstance(knob, DerivedKnob):
            return knob.rule.bounds(self) if isinstance(knob.rule, Expression) else UNKNOWN
        values, _ = self.lookup(name)
        return UNKNOWN if values.dtype == object else outward(values, values)


# -- order ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """A step of the enumeration: the knob to join, and the checks that are made then."""

    name: str
    """Knob to join."""
    open: frozenset[str]
    """The component's knobs that are still open after it."""
    complete: tuple[Check, ...]
    """Checks by expressions whose knobs are all joined from here on."""
    partial: tuple[Check, ...]
    """Checks by expressions over this knob and some that are still open."""
    opaque: tuple[Check, ...]
    """Checks with a Python function whose knobs are all joined from here on, in order."""


def join_order(
    structure: Structure, names: Sequence[str], checks: Sequence[Check], sizes: Mapping[str, int]
) -> tuple[Join, ...]:
    """Order of the joins of a component in which the rules apply early.

    The next knob is always the smallest one of the rule that is cheapest to complete: the rule whose open knobs have
    the fewest combinations, where an equation determines its largest knob. A knob's condition comes first.
    """
    place = {name: index for index, name in enumerate(names)}
    joined: set[str] = set()
    joins = []
    while len(joined) < len(names):
        name = _next(structure, place, checks, sizes, joined)
        joined.add(name)
        touched = [check for check in checks if name in check.bases]
        opaque = tuple(check for check in touched if check.opaque and check.bases <= joined)
        plain = [check for check in touched if not check.opaque]
        # Checks on this knob alone were applied to its values before.
        complete = tuple(check for check in plain if check.bases <= joined and check.bases != {name})
        partial = tuple(check for check in plain if not check.bases <= joined and check.conditionals <= joined)
        joins.append(Join(name, frozenset(place) - joined, complete, partial, opaque))
    return tuple(joins)


def _next(
    structure: Structure,
    place: Mapping[str, int],
    checks: Sequence[Check],
    sizes: Mapping[str, int],
    joined: set[str],
) -> str:
    groups = []
    for check in checks:
        undecided = _with_conditions(structure, check.bases - joined, joined)
        if undecided:
            cost = prod(max(1, sizes[name]) for name in undecided)
            if check.equation and len(undecided) > 1:
                cost //= max(1, max(sizes[name] for name in undecided))
            groups.append((cost, len(undecided), min(place[name] for name in undecided), undecided))
    candidates = min(groups, key=lambda group: group[:3])[3] if groups else frozenset(place) - joined
    ready = [name for name in candidates if structure.needs(name) <= joined]
    return min(ready, key=lambda name: (sizes[name] if groups else 0, place[name]))


def _with_conditions(structure: Structure, names: frozenset[str], joined: set[str]) -> frozenset[str]:
    """The knobs with those that their conditions mention, recursively."""
    reached = set(names)
    while True:
        needed = frozenset().union(*(structure.needs(name) for name in reached)) - joined - reached
        if not needed:
            return frozenset(reached)
        reached |= needed


# -- parts of rules ------------------------------------------------------------------------------------------


def _calls(rule: Rule) -> bool:
    """True if the rule calls a Python function, so that it can be checked only when all its knobs are chosen."""
    return isinstance(rule, Predicate) and not isinstance(rule, Listed)


def _conjuncts(rule: Any) -> list[Any]:
    """Splits `a & b & c` into its parts, each of which can be checked as soon as its own knobs are chosen."""
    if isinstance(rule, Operation) and rule.operator.sign == "&":
        return [conjunct for side in rule.arguments for conjunct in _conjuncts(side)]
    return [rule]
