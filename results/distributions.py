"""Knobs as Optuna sees them, so that its plots and its dashboard can show a study."""

import math
from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def distribution(values: Sequence[Any]) -> "BaseDistribution":
    """The narrowest Optuna distribution that holds all `values`.

    Integers become `IntDistribution` and other numbers `FloatDistribution`: logarithmic where each value is
    the same multiple of the one before, stepped where they are evenly spaced. All else is categorical.

    Raises:
        ValueError: `values` is empty.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    # Optuna keeps a number as a float: past 2 ** 53 that is another number.
    numeric = all(
        isinstance(each, (int, float)) and not isinstance(each, bool) and abs(each) <= 2**53 for each in values
    )
    if not values or not numeric:
        return CategoricalDistribution(tuple(values))
    ordered = sorted(set(values))
    low, high = ordered[0], ordered[-1]
    log = low > 0 and len(ordered) > 2 and _geometric(ordered)
    if all(isinstance(each, int) for each in ordered):
        step = 1 if log or low == high else math.gcd(*(each - low for each in ordered[1:]))
        return IntDistribution(low, high, log=log, step=step)
    return FloatDistribution(low, high, log=log, step=None if log else _even_step(ordered))


def _geometric(ordered: Sequence[float]) -> bool:
    ratio = ordered[1] / ordered[0]
    return all(math.isclose(b / a, ratio, rel_tol=1e-9) for a, b in pairwise(ordered))


def _even_step(ordered: Sequence[float]) -> float | None:
    # Optuna counts steps in decimals: 0, 0.1, 0.2 are even, thirds are not.
    if len(ordered) < 2:
        return None
    exact = [Decimal(repr(each)) for each in ordered]
    first, step = exact[0], exact[1] - exact[0]
    if (exact[-1] - first) / step > 10**6:
        return None
    # The difference of two floats may have more digits than a float.
    even = Decimal(repr(float(step))) == step and all((each - first) % step == 0 for each in exact)
    return float(step) if even else None
