"""Interface of samplers, and the base class of those that choose one configuration at a time."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from ...base.errors import UsageError
from ...results import Trial
from ...space import Config, Space


class Sampler(ABC):
    """Proposes the next configurations from the trials so far.

    A sampler keeps no state that a resumed run could not rebuild: it learns only from `trials`, which contains
    finished, failed and pending trials. The same seed and the same trials give the same proposals, in any process.

    Test a new sampler by inheriting from `redline.testing.samplers.SamplerConformance`.

    Args:
        space: the valid configurations.
        seed: seed of every random choice, 0 or more.

    Raises:
        UsageError: the seed is not a whole number of at least 0.
    """

    name: ClassVar[str]
    """Name on the command line and in the `sampler` column."""
    learns: ClassVar[bool] = True
    """True if measurements influence the proposals; False if only the set of tried configurations does."""

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise UsageError(f"a sampler's seed must be a whole number of at least 0, but got {seed!r}.")
        self.space = space
        self.seed = seed

    @abstractmethod
    def propose(self, trials: Sequence[Trial], count: int = 1) -> list[Config]:
        """Returns up to `count` valid configurations that are not in `trials`.

        Fewer than `count` mean that the space is exhausted; an empty list means that nothing is left. `trials` are
        ordered by number; those without a measurement are pending.

        Raises:
            UsageError: `count` is below 1.
        """


class StepwiseSampler(Sampler):
    """A sampler that chooses one configuration at a time.

    A batch equals the proposals of single calls: each proposal is pending when the next is chosen.
    """

    def propose(self, trials: Sequence[Trial], count: int = 1) -> list[Config]:
        check_count(count)
        trials_so_far = list(trials)
        proposals: list[Config] = []
        while len(proposals) < count and (config := self.next(trials_so_far)) is not None:
            proposals.append(config)
            trials_so_far.append(Trial(number=len(trials_so_far), config=config, sampler=self.name))
        return proposals

    @abstractmethod
    def next(self, trials: Sequence[Trial]) -> Config | None:
        """Returns a valid configuration that is not in `trials`; None if there is none left."""


def check_count(count: int) -> None:
    """Raises UsageError unless `count` is a whole number of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"`count` must be a whole number of at least 1, but got {count!r}.")
