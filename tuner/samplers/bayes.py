"""Bayesian optimisation over the valid set, guided by an estimate if there is one: the default sampler, and forecasts of further
trials by the same posterior."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtr

from ...results import Trial
from ...space import Config, Space
from .containment import one_blas_thread
from .posterior import CAUTION, SearchPosterior, SurrogatePrior
from .sampler import Sampler, check_count
from .surrogate import expected_improvement

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
        surrogate_prior: a shared `SurrogatePrior`, in place of these.

    Raises:
        UsageError: an argument is out of range.
    """

    name = "bayes"

    def __init__(
        self,
        space: Space,
        *,
        seed: int = 0,
        prior: Any = None,
        warn: Callable[[str], None] | None = None,
        headroom: float = 0.0,
        surrogate_prior: SurrogatePrior | None = None,
    ) -> None:
        super().__init__(space, seed=seed)
        self.surrogate_prior = surrogate_prior or SurrogatePrior(
            space, seed=seed, prior=prior, warn=warn, headroom=headroom
        )

    def propose(self, trials: Sequence[Trial], count: int = 1) -> list[Config]:
        check_count(count)
        with one_blas_thread():
            return _Choice(SearchPosterior(self.surrogate_prior, trials)).choose(count)


class _Choice:
    """One call of `propose`."""

    def __init__(self, posterior: SearchPosterior) -> None:
        self.posterior = posterior

    def choose(self, count: int) -> list[Config]:
        """Returns up to `count` candidates, best first."""
        posterior = self.posterior
        for index in posterior.pending if posterior.open.any() else ():
            posterior.observe(index)
        chosen: list[Config] = []
        while len(chosen) < count and posterior.open.any():
            index = self._next(len(chosen) + len(posterior.pending))
            posterior.open[index] = False
            chosen.append(posterior.candidates.config(index))
            if len(chosen) < count:
                posterior.observe(index)
        return chosen

    def _next(self, ahead: int) -> int:
        posterior = self.posterior
        rows = posterior.considered()
        if posterior.speed is None:
            # Without knowledge of speed: a spread of trials, among those that probably fit.
            rng = np.random.default_rng([posterior.surrogate_prior.seed, len(posterior.known), ahead])
            draws = rng.choice(rows, size=min(16, len(rows)), replace=False)
            codes = [*posterior.seen.codes, *(posterior.candidates.codes[i] for i in posterior.taken)]
            if not codes:
                return int(draws[np.argmax(posterior.works[draws] > 0.3)])
            distances = np.stack(
                [posterior.encoding.distances(np.array(codes), posterior.candidates.codes[i]) for i in draws]
            )
            return int(draws[np.argmax(distances.min(axis=1) * posterior.works[draws])])
        score, promised = np.zeros(len(posterior.open)), 0.0
        for weight, mean, variance in posterior.speed.outcomes():
            if posterior.best is None:
                score += weight * np.exp(np.clip(mean - mean.max(), -50, 0))
                continue
            best = max([posterior.best, *(mean[i] for i in posterior.taken)])
            gain = expected_improvement(mean, variance, best)
            # A model with wide uncertainty has the largest expected improvement everywhere, so each model has a vote.
            top = float((gain * posterior.works**CAUTION)[rows].max())
            score += weight * gain / max(top, 1e-300)
            promised += weight * top
        # Until a trial has succeeded, the probability of success comes first, and its weight grows with the failures.
        caution = CAUTION if posterior.best is not None else CAUTION + len(posterior.known)
        score = score * posterior.works**caution
        if posterior.best is not None:
            score = score - FAILURE_COST / max(promised, FAILURE_COST) * (1.0 - posterior.works)
            score = np.where(score > 0, score / posterior.cost, score * posterior.cost)
        return int(rows[np.argmax(score[rows])])


WORTHWHILE = 0.01
"""Gain in log throughput that is worth further trials."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Forecast of further trials."""

    gain: float
    """Probability that any of the most promising candidates is faster than the best by `WORTHWHILE`; 1 until a trial
    has succeeded.
    """
    works: float
    """Largest probability of success among the candidates; 0 if none is left."""
    need_mib: float | None
    """Smallest predicted peak memory of a candidate, MiB; None if unknown."""


class Judge:
    """Forecasts single trials, and the gain of further trials."""

    def __init__(self, surrogate_prior: SurrogatePrior) -> None:
        self.surrogate_prior = surrogate_prior

    def prediction(self, config: Config) -> tuple[float | None, float | None]:
        """Throughput and peak memory (MiB) that the prior predicts; None if it predicts none."""
        answers = self.surrogate_prior.answers
        if answers is None or self.surrogate_prior.relative:
            return None, None
        if not answers.knows(config) and self.surrogate_prior.small:
            answers.of(list(self.surrogate_prior.space))  # all at once, so that warnings about the prior cover all
        answer = answers.of([config])
        throughput, memory = answer.log_throughput[0], answer.log_memory[0]
        return _number(throughput), _number(memory)

    def outlook(self, trials: Sequence[Trial], ahead: int = 5) -> Outlook:
        """Returns the forecast after these trials for the `ahead` most promising candidates."""
        with one_blas_thread():
            posterior = SearchPosterior(self.surrogate_prior, trials)
            if not posterior.open.any():
                return Outlook(gain=0.0, works=0.0, need_mib=None)
            works = float(posterior.works[posterior.open].max())
            need = None if posterior.need is None else float(np.exp(posterior.need[posterior.open].min()))
            if posterior.speed is None or posterior.best is None:
                return Outlook(gain=1.0, works=works, need_mib=need)
            # The scales were fitted to few trials, so the tails are those of a Student t with few degrees of freedom.
            degrees = max(2.0, posterior.seen.ok.sum() / 2)
            better = sum(
                weight * stdtr(degrees, (mean - posterior.best - WORTHWHILE / posterior.scale) / np.sqrt(variance))
                for weight, mean, variance in posterior.speed.parts()
            )
            chances = np.sort((better * posterior.works)[posterior.considered()])[-ahead:]
            return Outlook(gain=float(1.0 - np.prod(1.0 - chances)), works=works, need_mib=need)


def _number(log: float) -> float | None:
    return float(np.exp(log)) if np.isfinite(log) else None
