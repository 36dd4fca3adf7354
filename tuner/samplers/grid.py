"""Exhaustive search."""

from collections.abc import Sequence
from itertools import islice

from ...errors import UsageError
from ...results import Trial
from ...space import Config, Space
from .sampler import Sampler, check_count


class GridSampler(Sampler):
    """Goes through the whole space in its own order, whatever comes of it; the seed has no effect.

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
        return list(islice((config for config in self.space if config not in seen), count))
