"""A handful of values of a range: redline's knobs are choices, and what other tools draw from is often continuous."""

import math
from collections.abc import Sequence
from itertools import pairwise

HANDFUL = 5
"""Values that are taken of a continuous range."""
MOST_LISTED = 16
"""Integers of a range that are all taken."""


def reals(low: float, high: float, *, log: bool = False) -> list[float]:
    """Values from `low` to `high`, both included, equally far apart or, with `log`, by equal factors; those between
    are rounded to as few digits as leave them apart.

    >>> reals(1e-5, 1e-1, log=True), reals(0.0, 0.3)
    ([1e-05, 0.0001, 0.001, 0.01, 0.1], [0.0, 0.075, 0.15, 0.22, 0.3])
    """
    low, high = float(low), float(high)
    if low == high:
        return [low]
    if log:
        ratio = (math.log(high) - math.log(low)) / (HANDFUL - 1)
        between = [math.exp(math.log(low) + at * ratio) for at in range(1, HANDFUL - 1)]
    else:
        between = [low + at * (high - low) / (HANDFUL - 1) for at in range(1, HANDFUL - 1)]
    for digits in range(2, 17):
        values = [low, *(float(f"{value:.{digits}g}") for value in between), high]
        if all(left < right for left, right in pairwise(values)):
            return values
    return [low, high]


def integers(low: int, high: int, *, step: int = 1, log: bool = False) -> list[int]:
    """The integers from `low` by `step` up to `high`: all where they are few, else some, the first and the last of them
    included.

    >>> integers(1, 4), integers(8, 4096, log=True), integers(0, 1000, step=10)
    ([1, 2, 3, 4], [8, 38, 180, 860, 4096], [0, 250, 500, 750, 1000])
    """
    count = (high - low) // step + 1
    if count <= MOST_LISTED:
        return list(range(low, high + 1, step))
    last = low + (count - 1) * step
    near = reals(low, last, log=log and low > 0)
    return sorted({low + round((value - low) / step) * step for value in near})


def stepped(low: float, high: float, step: float, *, log: bool = False) -> list[float]:
    """The multiples of `step` between two bounds: all where they are few, else some.

    >>> stepped(0.0, 0.5, 0.1)
    [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    """
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{each * step:.12g}") for each in integers(first, last, log=log)]


def divisors(total: int, among: Sequence[int] | None = None) -> list[int]:
    """The divisors of a number, or those of some numbers that divide it.

    >>> divisors(12), divisors(12, [5, 4, 2])
    ([1, 2, 3, 4, 6, 12], [4, 2])
    """
    if among is not None:
        return [each for each in among if each > 0 and total % each == 0]
    low = [each for each in range(1, math.isqrt(total) + 1) if total % each == 0]
    return sorted({*low, *(total // each for each in low)})


def normal(mean: float, deviation: float) -> list[float]:
    """The mean of a normal distribution first, then what is one and two deviations off.

    >>> normal(0.0, 0.5)
    [0.0, -0.5, 0.5, -1.0, 1.0]
    """
    return [float(f"{mean + each * deviation:.4g}") for each in (0, -1, 1, -2, 2)]


def rounded(values: Sequence[float], step: float) -> list[float]:
    """The multiples of `step` that are nearest, none twice.

    >>> rounded([0.0, 0.26, 0.3], 0.25)
    [0.0, 0.25]
    """
    return list(dict.fromkeys(float(f"{round(each / step) * step:.12g}") for each in values))


def tried(values: Sequence[float], of: str, step: float | None = None) -> str:
    """What is to be said of values that stand for a range; nothing where they are all there are, by `step`."""
    if not values or (step is not None and len(values) > round((max(values) - min(values)) / step)):
        return ""
    return f"{', '.join(f'{each:g}' if isinstance(each, float) else str(each) for each in values)} are tried of {of}"
