"""The order in which the knobs of a component are joined, and what is checked at each join."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from .knob import DerivedKnob
from .rules import Predicate
from .structure import Check, Structure


@dataclass(frozen=True, slots=True)
class Step:
    """One join."""

    name: str
    """The knob that is joined."""
    open: frozenset[str]
    """The component's knobs that are still to be joined after it."""
    complete: tuple[Check, ...]
    """Checks by expressions whose knobs are all joined from here on."""
    partial: tuple[Check, ...]
    """Checks by expressions over this knob and some that are still open."""
    opaque: tuple[Check, ...]
    """Checks with a Python function in them whose knobs are all joined from here on, in order."""
    interned: tuple[str, ...]
    """Knobs derived by a callable that get their value here."""
    required: frozenset[str]
    """The conditional knobs that a constraint mentions."""


def plan(
    structure: Structure, names: Sequence[str], checks: Sequence[Check], sizes: Mapping[str, int]
) -> tuple[Step, ...]:
    """The joins of a component, so ordered that the rules bind early.

    Always next is the smallest knob of the rule that is cheapest to complete: whose open knobs have the
    fewest combinations, where an equation leaves its largest knob no choice. A knob's
    condition comes before it.
    """
    required = frozenset().union(
        *(check.conditionals for check in checks if not isinstance(check.label, DerivedKnob))
    )
    place = {name: at for at, name in enumerate(names)}
    joined: set[str] = set()
    steps = []
    while len(joined) < len(names):
        name = _next(structure, place, checks, sizes, joined)
        joined.add(name)
        left = frozenset(place) - joined
        touched = [check for check in checks if name in check.bases]
        done = [check for check in touched if check.bases <= joined]
        opaque = tuple(check for check in done if check.opaque)
        steps.append(
            Step(
                name=name,
                open=left,
                # Those about this knob alone have chosen its values beforehand.
                complete=tuple(check for check in done if not check.opaque and check.bases != {name}),
                partial=tuple(
                    check
                    for check in touched
                    if not check.opaque and not check.bases <= joined and check.conditionals <= joined
                ),
                opaque=opaque,
                interned=tuple(
                    check.label.name
                    for check in opaque
                    if isinstance(check.label, DerivedKnob) and isinstance(check.rule, Predicate)
                ),
                required=required,
            )
        )
    return tuple(steps)


def _next(
    structure: Structure,
    place: Mapping[str, int],
    checks: Sequence[Check],
    sizes: Mapping[str, int],
    joined: set[str],
) -> str:
    groups = []
    for check in checks:
        left = _with_conditions(structure, check.bases - joined, joined)
        if left:
            cost = prod(max(1, sizes[name]) for name in left)
            if check.equation and len(left) > 1:
                cost //= max(1, max(sizes[name] for name in left))
            groups.append((cost, len(left), min(place[name] for name in left), left))
    candidates = min(groups, key=lambda group: group[:3])[3] if groups else frozenset(place) - joined
    ready = [name for name in candidates if structure.needs(name) <= joined]
    return min(ready, key=lambda name: (sizes[name] if groups else 0, place[name]))


def _with_conditions(structure: Structure, names: frozenset[str], joined: set[str]) -> frozenset[str]:
    """The knobs with those that their conditions mention, and theirs."""
    out = set(names)
    while True:
        more = frozenset().union(*(structure.needs(name) for name in out)) - joined - out
        if not more:
            return frozenset(out)
        out |= more
