"""Restricts a model's space to the values in another tool's space."""

from collections.abc import Collection

from ..base.errors import SpaceError, UsageError
from ..frameworks.stated_space import ForeignSpace
from ..knobs.text import config_text
from ..space import Space
from ..space.expression import Expression


def narrow(space: Space, foreign: ForeignSpace, asked: Collection[str]) -> tuple[str, ...]:
    """Restricts a model's space to another one's values, and everything else to its default. Returns notes.

    Args:
        asked: knobs that vary anyway, because their values are given.

    Raises:
        UsageError: the model has none of its knobs.
        SpaceError: no configuration is left.
    """
    notes = list(foreign.notes)
    shared = [knob for knob in foreign.space.knobs if not knob.derived and knob.name in space.by_name]
    if not shared:
        missing = ", ".join(knob.name for knob in foreign.space.knobs if not knob.derived)
        raise UsageError(f"the model has none of the knobs of {foreign.called}: {missing}")
    names = [knob.name for knob in shared]
    for knob in foreign.space.knobs:
        if not knob.derived and knob.name not in names:
            notes.append(f"not carried over: {knob.name}: the model has no such knob on these devices")
    for knob in shared:
        if knob.name in asked:
            continue
        try:
            space.override(knob.name, knob.values)
        except SpaceError as error:
            raise SpaceError(f"{foreign.called}: {error}") from error
    there = {rule.text for rule in space.constraints}
    for rule in foreign.space.constraints:
        if isinstance(rule.rule, Expression) and all(name in space.by_name for name in rule.rule.names):
            if rule.text not in there:
                space.require(rule.text, rule.reason)
    usual = space.default()
    kept = {}
    for knob in space.free:
        if knob.name in names or knob.name in asked:
            continue
        value = usual.get(knob.name, knob.default)
        try:
            space.fix(knob.name, value)
        except SpaceError:  # the given values require another one
            continue
        kept[knob.name] = value
    if kept:
        defaults = config_text(kept, between=", ")
        notes.append(f"{foreign.called} has no values for some knobs, so {defaults}; --set gives them values")
    return tuple(notes)
