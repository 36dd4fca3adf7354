"""HEBO, the heteroscedastic evolutionary Bayesian optimiser, restricted to valid configurations."""

from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.errors import MissingDependency, UsageError
from ...space import Config, Space
from .candidates import Candidates, ModelSampler, spread, subsample
from .containment import contained
from .encoding import Encoding, Observations

if TYPE_CHECKING:
    import torch

LIMIT = 4096
"""Largest number of candidates that are scored."""
CHUNK = 512
"""Number of candidates that are scored at once."""


class HEBOSampler(ModelSampler):
    """Chooses the candidate that is best in confidence bound, expected improvement and probability of improvement
    together.

    Uses HEBO's surrogate (a Gaussian process under pSGLD, on power-transformed values) and its acquisition ensemble
    MACE, https://arxiv.org/abs/2012.03826. HEBO draws from the ensemble's Pareto front, which it finds with an
    evolution strategy. Here every candidate is scored, and the non-dominated candidate with the best ranks is chosen.
    HEBO drops failed observations; here they get a poor value, and pending trials get the mean.

    Args:
        space: the valid configurations.
        seed: seed of every random choice.
        startup: see `ModelSampler`.
        epochs: steps in which the surrogate is fitted. HEBO takes 100 steps of a fifth of the size, which gives the
            same quality in twice the time.

    Raises:
        UsageError: an argument is out of range.
        MissingDependency: HEBO, or a package that it needs, is not installed.
    """

    name = "hebo"

    def __init__(self, space: Space, *, seed: int = 0, startup: int | None = None, epochs: int = 40) -> None:
        super().__init__(space, seed=seed, startup=startup)
        if epochs < 1:
            raise UsageError(f"`epochs` must be at least 1, but got {epochs!r}.")
        self.epochs = epochs
        with contained(seed):
            _load()

    def choose(self, candidates: Candidates, seen: Observations, rng: np.random.Generator) -> Config:
        candidates = subsample(candidates, LIMIT, seen, rng)
        with contained(int(rng.integers(2**31))):
            scores = _score(self._encoding, candidates.codes, seen, self.epochs)
        usable = np.flatnonzero(np.isfinite(scores).all(axis=1))
        if not len(usable):
            return candidates.config(spread(candidates, seen, rng))
        front = usable[pareto_front(scores[usable])]
        ranks = scores[front].argsort(axis=0).argsort(axis=0).sum(axis=1)
        return candidates.config(front[rng.choice(np.flatnonzero(ranks == ranks.min()))])


def pareto_front(values: np.ndarray) -> np.ndarray:
    """Indices of the non-dominated rows of `values` (n, objectives), all minimised; one of equal rows."""
    front = []
    rows = np.lexsort(values.T[::-1])  # the first row in this order is not dominated
    while len(rows):
        top, rows = rows[0], rows[1:]
        front.append(top)
        rows = rows[(values[rows] < values[top]).any(axis=1)]
    return np.array(front)


def _score(encoding: Encoding, codes: np.ndarray, seen: Observations, epochs: int) -> np.ndarray:
    """MACE's objectives of each code, to be minimised: bound, -log EI, -log PI; shape (n, 3)."""
    import torch
    from gpytorch.settings import cholesky_jitter

    get_model, mace = _load()
    cost = _costs(seen)
    numeric, categorical = _inputs(encoding, seen.codes)
    # HEBO's own settings, except for the number of steps.
    settings: dict[str, Any] = {"lr": 0.05, "num_epochs": epochs, "noise_lb": 8e-4, "pred_likeli": False}
    if not encoding.ordered.all():
        settings["num_uniqs"] = (encoding.sizes + encoding.optional)[~encoding.ordered].tolist()
    model = get_model("gp", numeric.shape[1], categorical.shape[1], 1, **settings)
    scores = []
    with cholesky_jitter():  # HEBO raises gpytorch's jitter for the whole process if a fit is difficult
        model.fit(numeric, categorical, torch.from_numpy(cost).float().reshape(-1, 1))
        with torch.no_grad():
            best = int(np.argmin(cost))
            best_cost, _ = model.predict(numeric[[best]], categorical[[best]])
            ensemble = mace(model, best_y=best_cost.item(), kappa=_kappa(*seen.codes.shape))
            for start in range(0, len(codes), CHUNK):
                scores.append(ensemble(*_inputs(encoding, codes[start : start + CHUNK])).numpy())
    return np.concatenate(scores)


def _kappa(trials: int, knobs: int) -> float:
    """Distance of the confidence bound from the mean, in standard deviations, as in HEBO."""
    return float(np.sqrt((2.0 + knobs / 2.0) * np.log(trials) + np.log(np.pi**2 / 0.01)))


def _costs(seen: Observations) -> np.ndarray:
    """Values that HEBO minimises, shape (n,): the negative objective after a power transform to normality."""
    from sklearn.preprocessing import power_transform

    objective = np.where(seen.failed, seen.poor, seen.objective)
    cost = np.where(seen.pending, -np.nanmean(objective), -objective)
    cost = (cost - cost.mean()) / cost.std()
    try:
        normal = power_transform(cost.reshape(-1, 1), method="yeo-johnson").ravel()
    except (ValueError, RuntimeError):  # values from which no exponent can be estimated
        return cost
    return normal if np.isfinite(normal).all() and normal.std() > 0.5 else cost


def _inputs(encoding: Encoding, codes: np.ndarray) -> "tuple[torch.Tensor, torch.Tensor]":
    """Ordered knobs as numbers from 0 to 1 (n, ordered), all others as categories from 0 (n, others)."""
    import torch

    ordered = encoding.ordered
    start, highest = codes + encoding.optional, encoding.sizes + encoding.optional - 1
    return (
        torch.from_numpy((start / highest)[:, ordered]).float(),
        torch.from_numpy(start[:, ~ordered]).long(),
    )


def _load() -> tuple[Any, Any]:
    """Returns HEBO's model factory and acquisition ensemble."""
    try:
        from hebo.acquisitions.acq import MACE
        from hebo.models.model_factory import get_model
    except ImportError as error:
        raise MissingDependency(
            f"the sampler 'hebo' cannot be loaded ({error}). Install HEBO without the versions it pins, and "
            'then what it needs: `pip install --no-deps HEBO==0.3.6` and `pip install "redline[hebo]"`.'
        ) from error
    return get_model, MACE
