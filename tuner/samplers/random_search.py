"""Random search."""

from collections.abc import Sequence

import numpy as np

from ...results import Trial
from ...space import Config, Space
from .candidates import remaining
from .encoding import Encoding
from .sampler import StepwiseSampler


DRAWS = 8
"""Draws from the whole of a listed space before what is left of it is looked for."""


class RandomSampler(StepwiseSampler):
    """Draws uniformly from the valid configurations that were not tried yet."""

    name = "random"
    learns = False

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        super().__init__(space, seed=seed)
        self._encoding = Encoding(space)

    def next(self, trials: Sequence[Trial]) -> Config | None:
        rng = np.random.default_rng([self.seed, len(trials)])
        if self._encoding.listed is not None:
            # As long as most of the space is left, a draw or two find some of it, in no time.
            seen = {trial.config for trial in trials}
            for row in rng.integers(len(self._encoding.listed), size=DRAWS).tolist():
                if (config := self.space.at(row)) not in seen:
                    return config
        candidates = remaining(self._encoding, trials, rng, sample=1)
        return candidates.config(rng.integers(len(candidates))) if len(candidates) else None
