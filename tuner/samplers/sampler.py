"""The interface every sampler stands behind."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from ...results import Trial
from ...space import Config, Space


class Sampler(ABC):
    """Proposes the next configurations from the trials so far.

    A sampler keeps no history of its own that a resumed run could not rebuild: everything it learns
    comes with `trials`, which holds finished, failed and pending trials alike. The same seed and the
    same trials give the same proposals.

    Args:
        space: the valid configurations.
        seed: seed of every random choice.
    """

    name: ClassVar[str]
    """The name on the command line and in the `sampler` column."""

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        self.space = space
        self.seed = seed

    @abstractmethod
    def propose(self, trials: Sequence[Trial], count: int = 1) -> list[Config]:
        """Up to `count` valid configurations, none of which is in `trials` already.

        Fewer than `count` means that the space is exhausted; an empty list, that nothing is left.
        `trials` come in the order of their numbers; those without a measurement are pending.
        """
