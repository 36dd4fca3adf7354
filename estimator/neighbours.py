"""From drawn configurations of a large space to better ones: their neighbours, as long as these are better."""

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import numpy as np

from ..base.errors import SpaceError
from ..space import Config, Space
from .estimate import EstimateTable
from .estimator import Estimator

STARTS = 12
"""Configurations from which neighbours are looked for."""
ROUNDS = 12
"""How often, at most."""
SHARED = ("tp", "sp", "cp", "pp", "ep", "micro_batch")
"""Knobs of which one can take a factor over from another."""
Order = Callable[[EstimateTable], np.ndarray]


def climbed(
    space: Space, estimator: Estimator, starts: list[Config], order: Order, kind: Callable[[Config], Any]
) -> list[Config]:
    """The best neighbours found, the neighbours of these, and so on until none is better: every configuration that was one of
    the best in its round.

    Args:
        space: that all are of.
        estimator: predicts them.
        starts: where to begin.
        order: which configurations of a table count, the best first.
        kind: the best of each kind go on, so that not all come to be variants of one.
    """
    found: dict[Config, None] = {}
    current = starts[:STARTS]
    looked: set[Config] = set(current)
    for _ in range(ROUNDS):
        fresh = [each for start in current for each in neighbours(space, start) if each not in looked]
        fresh = list(dict.fromkeys(fresh))
        looked.update(fresh)
        if not fresh:
            break
        everyone = [*current, *fresh]
        best: dict[Any, Config] = {}
        for index in order(estimator.table(everyone)):
            best.setdefault(kind(everyone[int(index)]), everyone[int(index)])
        following = list(best.values())[:STARTS]
        if set(following) <= set(current):
            break
        found.update(dict.fromkeys(following))
        current = following
    return list(found)


def neighbours(space: Space, config: Config) -> Iterator[Config]:
    """The configurations in which one knob has another value, or a factor of two has moved from one knob to another, or two
    are both twice as large or half as large."""
    values = {name: value for name, value in config.items() if not space[name].derived}
    for name, value in values.items():
        for other in space[name].values:
            if other != value and (made := _made(space, values, {name: other})):
                yield made
    sizes = {name: size for name in SHARED if isinstance(size := values.get(name), int)}
    for one, other in permutations(sizes, 2):
        ways: list[tuple[float, float]] = [(2 * sizes[one], sizes[other] / 2)]
        if one < other:
            ways += [(2 * sizes[one], 2 * sizes[other]), (sizes[one] / 2, sizes[other] / 2)]
        for first, second in ways:
            if first in space[one].values and second in space[other].values:
                if made := _made(space, values, {one: int(first), other: int(second)}):
                    yield made


def _made(space: Space, values: dict[str, Any], changes: dict[str, Any]) -> Config | None:
    """A configuration with some values changed; knobs that apply no longer are left out. None where it is not valid."""
    changed = {**values, **changes}
    for kept in (changed, {name: value for name, value in changed.items() if space[name].when is None}):
        try:
            return space.config(kept)
        except SpaceError:
            continue
    return None
