"""Common part of samplers with a model: startup trials and candidates."""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from ...base.errors import UsageError
from ...results import Trial
from ...space import Config, Space
from .candidates import Candidates, remaining
from .encoding import Encoding
from .observations import Observations, observe
from .sampler import StepwiseSampler

SAMPLE = 2048
"""Number of candidates drawn from a space too large to enumerate."""
LEADERS = 3
"""Number of best trials whose neighbours are candidates in such a space."""


class ModelSampler(StepwiseSampler):
    """Spreads its first trials over the space, then chooses by a model of their outcomes.

    Args:
        space: the valid configurations.
        seed: seed of every random choice.
        startup: number of finished trials, including failed ones, before the model is used; None for the number of
            free knobs plus one, within 4 and 10.

    Raises:
        UsageError: the seed or `startup` is out of range.
    """

    def __init__(self, space: Space, *, seed: int = 0, startup: int | None = None) -> None:
        super().__init__(space, seed=seed)
        if startup is not None and startup < 2:
            raise UsageError(f"`startup` must be at least 2: a model needs two trials, but got {startup!r}.")
        self._encoding = Encoding(space)
        self.startup = min(max(len(self._encoding.knobs) + 1, 4), 10) if startup is None else startup

    def next(self, trials: Sequence[Trial]) -> Config | None:
        rng = np.random.default_rng([self.seed, len(trials)])
        seen = observe(self._encoding, trials)
        best = np.argsort(-seen.objective)[: min(LEADERS, seen.ok.sum())]  # NaN sorts last
        candidates = remaining(self._encoding, trials, rng, sample=SAMPLE, around=seen.codes[best])
        if len(candidates) < 2:
            return candidates.config(0) if len(candidates) else None
        if not self.ready(seen):
            return candidates.config(spread(candidates, seen, rng))
        return self.choose(candidates, seen, rng)

    def ready(self, seen: Observations) -> bool:
        """True if there is enough to learn from: `startup` outcomes, and two different ones that succeeded."""
        finished = len(seen.codes) - int(seen.pending.sum())
        return finished >= self.startup and len(np.unique(seen.objective[seen.ok])) > 1

    @abstractmethod
    def choose(self, candidates: Candidates, seen: Observations, rng: np.random.Generator) -> Config:
        """Returns the configuration to try next, either a candidate or one that `candidates.lookup` finds."""


def spread(candidates: Candidates, seen: Observations, rng: np.random.Generator, *, draws: int = 16) -> int:
    """Row of a candidate far from earlier trials, and farther from failed ones.

    It is the best of a few draws rather than the farthest of all, because the corners of a space are rarely good.
    Mitchell, "Spectrally optimal sampling for distribution ray tracing" (1991): best-candidate sampling.
    """
    rows = rng.choice(len(candidates), size=min(draws, len(candidates)), replace=False)
    if not len(seen.codes):
        return int(rows[0])
    apart = np.stack([candidates.encoding.distances(seen.codes, candidates.codes[row]) for row in rows])
    # Share of failures around a candidate, weighted by distance; one success is added as a prior.
    weight = np.exp(-((apart / (0.15 * len(candidates.encoding.knobs))) ** 2))
    risk = weight[:, seen.failed].sum(axis=1) / (weight.sum(axis=1) + 1.0)
    return int(rows[np.argmax(apart.min(axis=1) * (1.0 - risk))])


def subsample(candidates: Candidates, limit: int, seen: Observations, rng: np.random.Generator) -> Candidates:
    """At most `limit` of the candidates: the nearest to the best trial, and a random share."""
    if len(candidates) <= limit:
        return candidates
    best = seen.codes[np.nanargmax(seen.objective)]
    near = np.argsort(candidates.encoding.distances(candidates.codes, best), kind="stable")[: limit // 4]
    far = rng.choice(len(candidates), size=limit - len(near), replace=False)
    return candidates.take(np.union1d(near, far))
