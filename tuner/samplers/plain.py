"""Samplers that do not learn: exhaustive and random search."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import gcd

import numpy as np

from ...base.errors import UsageError
from ...results import Trial
from ...space import Config, Space
from .candidates import remaining
from .encoding import Encoding
from .sampler import Sampler, StepwiseSampler, check_count

DRAWS = 8
"""Draws from the whole space before the rest of it is enumerated."""


class GridSampler(Sampler):
    """Tries the whole space in even strides, regardless of the outcomes; the seed has no effect.

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


class RandomSampler(StepwiseSampler):
    """Draws uniformly from the valid configurations that were not tried yet."""

    name = "random"
    learns = False

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        super().__init__(space, seed=seed)
        self._encoding = Encoding(space)

    def next(self, trials: Sequence[Trial]) -> Config | None:
        rng = np.random.default_rng([self.seed, len(trials)])
        # While most of the space is left, a few draws find an untried configuration quickly.
        tried = {trial.config for trial in trials}
        for config in self._draw(rng):
            if config not in tried:
                return config
        candidates = remaining(self._encoding, trials, rng, sample=1)
        return candidates.config(int(rng.integers(len(candidates)))) if len(candidates) else None

    def _draw(self, rng: np.random.Generator) -> Iterable[Config]:
        if self._encoding.listed is None:
            return self.space.sample(DRAWS, int(rng.integers(2**31)))
        return map(self.space.at, rng.integers(len(self._encoding.listed), size=DRAWS).tolist())
