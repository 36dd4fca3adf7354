"""Optuna's Gaussian process."""

from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import GPSampler as OptunaGPSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from ...space import Config
from .candidates import Candidates
from .containment import one_thread
from .encoding import Encoding
from .model_based import ModelSampler, thin
from .observations import Observations
from .optuna_study import ask, build_study

LIMIT = 4096
"""Candidates that are scored, at most."""
CHUNK = 256
"""Candidates that are scored at once: memory grows with this times trials times knobs."""


class GPSampler(ModelSampler):
    """Takes the candidate with the largest expected improvement times the chance that it works.

    Optuna's Gaussian process with a Matern 5/2 kernel and log constrained expected improvement
    (https://arxiv.org/abs/2310.20708); a second process learns how far trials are from failing, and
    pending trials are integrated over. Optuna searches the acquisition function's maximum over a box; here
    it is evaluated on the valid configurations themselves, which is both exact and quicker.
    """

    name = "gp"

    def choose(self, candidates: Candidates, seen: Observations, rng: np.random.Generator) -> Config:
        scored = thin(candidates, LIMIT, seen, rng)
        gp = _ConfinedGP(scored, seed=int(rng.integers(2**31)))
        with one_thread():
            code = ask(build_study(gp, self._encoding, seen), self._encoding)
        return candidates.closest(code, rng)


class _ConfinedGP(OptunaGPSampler):
    """A GPSampler whose acquisition function is maximised over given candidates."""

    def __init__(self, candidates: Candidates, *, seed: int) -> None:
        super().__init__(seed=seed, n_startup_trials=1, warn_independent_sampling=False)
        self._candidates = candidates
        self._names: tuple[str, ...] = ()

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        self._names = tuple(search_space)
        return super().sample_relative(study, trial, search_space)

    # Optuna offers this method for overriding but promises nothing for later versions. Were it not to call
    # it any longer, `closest` would still see to it that only valid and new configurations are proposed.
    def _optimize_acqf(self, acqf: Any, best_params: np.ndarray | None) -> np.ndarray:
        points = _normalised(self._candidates.encoding, self._candidates.codes, self._names)
        scores = [acqf.eval_acqf_no_grad(points[i : i + CHUNK]) for i in range(0, len(points), CHUNK)]
        return points[np.argmax(np.concatenate(scores))]


def _normalised(encoding: Encoding, codes: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """Codes as Optuna's processes take them, shape (n, names): integers in the middle of equal parts of
    0 to 1, categories as their number."""
    columns = [encoding.names.index(name) for name in names]
    start = codes[:, columns] + encoding.optional[columns]
    parts = encoding.sizes[columns] + encoding.optional[columns]
    return np.where(encoding.ordered[columns], (start + 0.5) / parts, start.astype(np.float64))
