"""Forecasts from the posterior: the gain that is left, and the expected measurement of a trial."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr

from ...results import Trial
from ...space import Config
from .containment import one_blas_thread
from .posterior import SearchPosterior, SurrogatePrior

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
