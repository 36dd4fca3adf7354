"""Parallel degrees as the tuners of Megatron's and Paddle's worlds have them: factors of the number of devices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.errors import UsageError
from .stated_space import Draft

MOST_LISTED = 16
"""Integers of a range that are all taken."""


def listed(given: Any, auto: Sequence[Any]) -> list[Any]:
    """The values that a setting is given: `auto` where it says that, or one."""
    if isinstance(given, str) and given.lower() == "auto":
        return list(auto)
    return list(given) if isinstance(given, list) else [given]


def whole_numbers(values: Sequence[Any], shown: str) -> list[int]:
    """Values of a degree or a batch.

    Raises:
        UsageError: one is no whole number of at least 1, or there are none.
    """
    if strange := [each for each in values if type(each) is not int or each < 1]:
        raise UsageError(f"{shown} must be whole numbers of at least 1 or 'auto', but holds {strange[0]!r}")
    if not values:
        raise UsageError(f"{shown} must have values, but is empty")
    return list(values)


def declare_degrees(draft: Draft, degrees: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    """Declares degrees of which the product divides the devices; the text of that product, empty where all are 1.

    Args:
        draft: the space.
        degrees: of each knob what the file calls it, and its values.

    Raises:
        UsageError: of the values of one none divides the devices.
    """
    factors = []
    for name, (shown, values) in degrees.items():
        fitting = divisors(draft.devices, values)
        left = [str(each) for each in values if each not in fitting]
        if not fitting:
            raise UsageError(f"{shown} {', '.join(left)}: none of them divides {draft.devices} devices; see --devices")
        if left:
            draft.leave(f"{shown} {', '.join(left)}", f"it does not divide the {draft.devices} devices")
        if fitting == [1]:
            draft.off(f"{shown}=1")
        elif draft.knob(shown, fitting, name=name):
            factors.append(name)
    return " * ".join(factors)


def declare_micro_batch(draft: Draft, shown: str, given: Any, total: int | None, asked: bool) -> bool:
    """Declares `micro_batch`; whether it could.

    Args:
        draft: the space.
        shown: what the file calls it.
        given: its values, or `auto`: what divides the global batch.
        total: samples of a step; None where nobody says.
        asked: whether they were asked for beside the file.
    """
    auto = isinstance(given, str) and given.lower() == "auto"
    if auto and total is None:
        draft.leave(
            shown, "its range ends at the global batch, which nobody says: --global-batch B, or --set micro_batch=1,2,4"
        )
        return False
    values = whole_numbers(listed(given, divisors(total) if total else ()), shown)
    if auto and len(values) > MOST_LISTED:
        powers = [each for each in values if each & (each - 1) == 0 or each == total]
        draft.say(f"{shown}: {', '.join(map(str, powers))} of the {len(values)} divisors of the global batch {total}")
        values = powers
    elif not auto and total and not asked:
        draft.say(f"the global batch is {total}, as the file has it; --global-batch for another")
    return draft.knob(shown, values, name="micro_batch")


def share(draft: Draft, total: int, replicas: str) -> None:
    """Has a step take so many samples, whatever the micro-batch.

    Args:
        draft: the space, with a micro-batch.
        total: samples of a step.
        replicas: a text that says how many replicas there are.
    """
    together = f"micro_batch * {replicas}"
    draft.space.derive("grad_accum", f"{total} // ({together})", help="micro-batches per optimizer step")
    draft.space.require(f"{together} * grad_accum == {total}", f"global batch {total}")


def divisors(total: int, among: Sequence[int] | None = None) -> list[int]:
    """The divisors of a number, or those of some numbers that divide it.

    >>> divisors(12), divisors(12, [5, 4, 2])
    ([1, 2, 3, 4, 6, 12], [4, 2])
    """
    if among is not None:
        return [each for each in among if each > 0 and total % each == 0]
    low = [each for each in range(1, math.isqrt(total) + 1) if total % each == 0]
    return sorted({*low, *(total // each for each in low)})
