"""A space in words, for people."""

from typing import TYPE_CHECKING

from .values import listing

if TYPE_CHECKING:
    from .space import Space


def describe(space: "Space") -> str:
    """See `Space.describe`."""
    lines = [_summary(space), ""]
    width = max((len(knob.name) for knob in space.knobs), default=0)
    for knob in space.knobs:
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
    if space.constraints:
        lines += ["", "constraints"]
        width = max(len(each.text) for each in space.constraints)
        lines += [f"  {each.text:<{width}}  {each.reason}".rstrip() for each in space.constraints]
    return "\n".join(lines)


def _summary(space: "Space") -> str:
    total = f"{space.combinations:,}"
    count = (
        f"{space.size:,} of {total}"
        if space.enumerable
        else f"an unknown number, more than can be listed, of {total}"
    )
    return f"{len(space.free)} free knobs; {count} combinations are valid"
