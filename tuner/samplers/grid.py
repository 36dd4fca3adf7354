"""Exhaustive search."""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import gcd

from ...base.errors import UsageError
from ...results import Trial
from ...space import Config, Space
from .sampler import Sampler, check_count


class GridSampler(Sampler):
    """Tries the whole space in even strides, whatever the outcomes; the seed has no effect.

    In the space's own order the first trials would differ only in the last knobs. A stride near the golden section of
    the space's size, and coprime to it, reaches every configuration once and spreads the first trials over the whole
    space (Knuth, The Art of Computer Programming 3, 6.4).

    Raises:
        UsageError: the space is too large to be listed.
    """

    name = "grid"
    learns = False

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        super().__init__(space, seed=seed)
        if not space.enumerable:
            raise UsageError(
                "the sampler 'grid' tries every configuration in order, but this space is too large to be "
                "listed; fix some knobs, or choose another sampler"
            )

    def propose(self, trials: Sequence[Trial], count: int = 1) -> list[Config]:
        check_count(count)
        seen = {trial.config for trial in trials}
        return list(islice((config for config in self._walk() if config not in seen), count))

    def _walk(self) -> Iterator[Config]:
        size = self.space.size
        stride = max(1, round(size * (5**0.5 - 1) / 2))
        while gcd(stride, size) != 1:
            stride += 1
        for step in range(size):
            yield self.space.at(step * stride % size)
