"""Which samples are held out for evaluation."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

STRETCHES = 64


@dataclass(frozen=True, kw_only=True)
class Split:
    """The last samples of each of up to 64 equal stretches of the data are held out.

    They come from all over the data, follow from it alone (not from the seed, so that trainings can be compared), and
    few of them lie beside a sample of training that is cut from the same document.
    """

    samples: int
    """Of the data."""
    evaluation: int
    """Of these, held out."""

    @staticmethod
    def of(samples: int, share: float) -> "Split":
        """So that a share of the samples is held out: of more than one at least one, and never all."""
        wanted = max(1, round(samples * share)) if share else 0
        return Split(samples=samples, evaluation=min(wanted, max(samples - 1, 0)))

    @property
    def training(self) -> int:
        """Samples that are not held out."""
        return self.samples - self.evaluation

    @cached_property
    def _bounds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the stretches: where they begin, and how many samples of training and of evaluation come before."""
        stretches = max(1, min(STRETCHES, self.evaluation))
        numbers = np.arange(stretches + 1, dtype=np.int64)
        begins = numbers * self.samples // stretches
        before = numbers * self.evaluation // stretches
        return begins, begins - before, before

    def training_ids(self, numbers: np.ndarray) -> np.ndarray:
        """Sample ids of the training split's samples by their numbers there, int64."""
        begins, training, _ = self._bounds
        stretch = np.searchsorted(training, numbers, side="right") - 1
        return begins[stretch] + numbers - training[stretch]

    def evaluation_ids(self, numbers: np.ndarray) -> np.ndarray:
        """Sample ids of the held-out samples by their numbers there, int64."""
        begins, _, evaluation = self._bounds
        stretch = np.searchsorted(evaluation, numbers, side="right") - 1
        held = evaluation[stretch + 1] - evaluation[stretch]
        return begins[stretch + 1] - held + numbers - evaluation[stretch]
