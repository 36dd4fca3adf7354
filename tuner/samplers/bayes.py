"""Bayesian optimisation over the valid set, guided by an estimate if there is one. The default sampler."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...results import Trial
from ...space import Config, Space
from .containment import one_blas_thread
from .posterior import CAUTION, SearchPosterior, SurrogatePrior
from .sampler import Sampler, check_count
from .surrogate import expected_improvement, throughput_model

FAILURE_COST = 0.005
"""Value of a failed trial, in log throughput."""


class BayesSampler(Sampler):
    """Chooses the candidate with the largest expected improvement times probability of success, divided by expected
    cost.

    The model of the candidates is `SearchPosterior`. Pending trials and members of a batch count as measured at their
    mean. See docs/search.md.

    Args:
        space: the valid configurations.
        seed: seed of every random choice.
        prior, warn, headroom: of `SurrogatePrior`.
        knowledge: a shared `SurrogatePrior`, in place of these.

    Raises:
        UsageError: an argument is out of range.
    """

    name = "bayes"
    surrogate = staticmethod(throughput_model)
    """Makes the models of throughput; `bench/surrogates.py` replaces it by other libraries' models."""

    def __init__(
        self,
        space: Space,
        *,
        seed: int = 0,
        prior: Any = None,
        warn: Callable[[str], None] | None = None,
        headroom: float = 0.0,
        knowledge: SurrogatePrior | None = None,
    ) -> None:
        super().__init__(space, seed=seed)
        self.knowledge = knowledge or SurrogatePrior(space, seed=seed, prior=prior, warn=warn, headroom=headroom)

    def propose(self, trials: Sequence[Trial], count: int = 1) -> list[Config]:
        check_count(count)
        with one_blas_thread():
            return _Choice(SearchPosterior(self.knowledge, trials, self.surrogate)).choose(count)


class _Choice:
    """One call of `propose`."""

    def __init__(self, beliefs: SearchPosterior) -> None:
        self.beliefs = beliefs

    def choose(self, count: int) -> list[Config]:
        """Returns up to `count` candidates, best first."""
        beliefs = self.beliefs
        for index in beliefs.pending if beliefs.open.any() else ():
            beliefs.observe(index)
        chosen: list[Config] = []
        while len(chosen) < count and beliefs.open.any():
            index = self._next(len(chosen) + len(beliefs.pending))
            beliefs.open[index] = False
            chosen.append(beliefs.candidates.config(index))
            if len(chosen) < count:
                beliefs.observe(index)
        return chosen

    def _next(self, ahead: int) -> int:
        beliefs = self.beliefs
        rows = beliefs.considered()
        if beliefs.speed is None:
            # Without knowledge of speed: a spread of trials, among those that probably fit.
            rng = np.random.default_rng([beliefs.knowledge.seed, len(beliefs.known), ahead])
            draws = rng.choice(rows, size=min(16, len(rows)), replace=False)
            codes = [*beliefs.seen.codes, *(beliefs.candidates.codes[i] for i in beliefs.taken)]
            if not codes:
                return int(draws[np.argmax(beliefs.works[draws] > 0.3)])
            apart = np.stack([beliefs.encoding.distances(np.array(codes), beliefs.candidates.codes[i]) for i in draws])
            return int(draws[np.argmax(apart.min(axis=1) * beliefs.works[draws])])
        score, promised = np.zeros(len(beliefs.open)), 0.0
        for weight, mean, variance in beliefs.speed.outcomes():
            if beliefs.best is None:
                score += weight * np.exp(np.clip(mean - mean.max(), -50, 0))
                continue
            best = max([beliefs.best, *(mean[i] for i in beliefs.taken)])
            gain = expected_improvement(mean, variance, best)
            # A model with wide uncertainty has the largest expected improvement everywhere, so each model has a vote.
            top = float((gain * beliefs.works**CAUTION)[rows].max())
            score += weight * gain / max(top, 1e-300)
            promised += weight * top
        # Until a trial has succeeded, the probability of success comes first, and its weight grows with the failures.
        caution = CAUTION if beliefs.best is not None else CAUTION + len(beliefs.known)
        score = score * beliefs.works**caution
        if beliefs.best is not None:
            score = score - FAILURE_COST / max(promised, FAILURE_COST) * (1.0 - beliefs.works)
            score = np.where(score > 0, score / beliefs.cost, score * beliefs.cost)
        return int(rows[np.argmax(score[rows])])
