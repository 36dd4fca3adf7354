"""A space in words, for people."""

from collections.abc import Sequence

from .knob import Knob
from .rules import Constraint
from .values import listing


def describe(
    knobs: Sequence[Knob], constraints: Sequence[Constraint], size: int | None, combinations: int
) -> str:
    """See `Space.describe`.

    Args:
        knobs: the derived ones included.
        constraints: of the space.
        size: how many configurations are valid; None where they are too many to be listed.
        combinations: of the knobs' values, before any rule.
    """
    free = sum(1 for knob in knobs if not knob.derived and len(knob.values) > 1)
    count = f"{size:,}" if size is not None else "an unknown number, more than can be listed,"
    lines = [f"{free} free knobs; {count} of {combinations:,} combinations are valid", ""]
    width = max((len(knob.name) for knob in knobs), default=0)
    for knob in knobs:
        if knob.derived:
            parts = [f"= {knob.rule.text}"]
        else:
            parts = [listing(knob.values)]
            if len(knob.values) > 1:
                parts.append(f"default {knob.default}")
            if knob.when is not None:
                parts.append(f"when {knob.when.text}")
        if knob.help:
            parts.append(knob.help)
        lines.append(f"  {knob.name:<{width}}  {'  |  '.join(parts)}")
    if constraints:
        lines += ["", "constraints"]
        width = max(len(each.text) for each in constraints)
        lines += [f"  {each.text:<{width}}  {each.reason}".rstrip() for each in constraints]
    return "\n".join(lines)
