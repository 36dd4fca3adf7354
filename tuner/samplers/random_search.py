"""Random search."""

from collections.abc import Iterable, Sequence

import numpy as np

from ...results import Trial
from ...space import Config, Space
from .candidates import TriedConfigs, remaining
from .encoding import Encoding
from .sampler import StepwiseSampler

DRAWS = 8
"""Draws from the whole space before the rest of it is enumerated."""


class RandomSampler(StepwiseSampler):
    """Draws uniformly from the valid configurations that were not tried yet."""

    name = "random"
    learns = False

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        super().__init__(space, seed=seed)
        self._encoding = Encoding(space)
        self._tried = TriedConfigs()

    def next(self, trials: Sequence[Trial]) -> Config | None:
        rng = np.random.default_rng([self.seed, len(trials)])
        # While most of the space is left, a few draws find an untried configuration quickly.
        tried = self._tried.of(trials)
        for config in self._draw(rng):
            if config not in tried:
                return config
        candidates = remaining(self._encoding, trials, rng, sample=1)
        return candidates.config(int(rng.integers(len(candidates)))) if len(candidates) else None

    def _draw(self, rng: np.random.Generator) -> Iterable[Config]:
        if self._encoding.listed is None:
            return self.space.sample(DRAWS, int(rng.integers(2**31)))
        return map(self.space.at, rng.integers(len(self._encoding.listed), size=DRAWS).tolist())
