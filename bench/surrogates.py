"""The default sampler with the Gaussian process of another library, for `bench/search.py`.

Only the model of throughput is replaced: features, feasibility and acquisition stay. With an estimate the other model
learns the residual. `bayes-botorch` has BoTorch's SingleTaskGP (Matern 5/2 or RBF with a length scale for each column,
BoTorch's default, fitted by its own optimiser), `bayes-hebo` HEBO's GP with HEBO's settings.
"""

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from redline.tuner.samplers.bayes import BayesSampler
from redline.tuner.samplers.surrogate import PriorModel


class OtherMixture:
    """Means and variances of one model at the candidates, with the interface of `Mixture`."""

    def __init__(self, mean: np.ndarray, variance: np.ndarray, noise: float) -> None:
        self.mean, self.variance, self.noise = mean, np.maximum(variance, 1e-12), noise

    def parts(self) -> list[tuple[float, np.ndarray, np.ndarray]]:
        return [(1.0, self.mean, self.variance)]

    def outcomes(self) -> list[tuple[float, np.ndarray, np.ndarray]]:
        return [(1.0, self.mean, self.variance + self.noise)]

    def observe(self, index: int) -> None:
        """This benchmark requests only one proposal per call."""


def botorch_gp(points: np.ndarray, values: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns mean, variance and noise of BoTorch's default model."""
    import torch
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.transforms import Standardize
    from gpytorch.mlls import ExactMarginalLogLikelihood

    x, y = torch.tensor(points, dtype=torch.double), torch.tensor(values, dtype=torch.double)[:, None]
    model = SingleTaskGP(x, y, outcome_transform=Standardize(m=1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    with torch.no_grad():
        found = model.posterior(torch.tensor(at, dtype=torch.double))
        noise = float(model.likelihood.noise) * float(values.std()) ** 2
        return found.mean[:, 0].numpy(), found.variance[:, 0].numpy(), noise


def hebo_gp(points: np.ndarray, values: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns mean, variance and noise of the model of HEBO."""
    import torch

    with contextlib.redirect_stdout(io.StringIO()):
        from hebo.models.model_factory import get_model

        model = get_model("gp", points.shape[1], 0, 1, lr=0.05, num_epochs=100, noise_lb=8e-4, pred_likeli=False)
        x = torch.tensor(points, dtype=torch.float32)
        model.fit(x, None, torch.tensor(values, dtype=torch.float32)[:, None])
        with torch.no_grad():
            mean, variance = model.predict(torch.tensor(at, dtype=torch.float32), None)
    noise = float(np.ravel(model.noise.detach().numpy())[0])
    return mean.numpy()[:, 0].astype(float), variance.numpy()[:, 0].astype(float), noise


def _surrogate(
    fit: Any, models: Sequence[PriorModel], points: np.ndarray, values: np.ndarray, at: np.ndarray
) -> OtherMixture:
    mean = models[0].mean
    here, there = mean[: len(values)], mean[len(values) :]
    residual = values - here
    if len(values) < 2 or residual.std() < 1e-9:
        deviation = models[0].scales.joint ** 2 + models[0].scales.additive ** 2
        level = residual.mean() if len(values) else 0.0
        return OtherMixture(there + level, np.full(len(at), deviation), 1e-4)
    predicted, variance, noise = fit(points, residual, at)
    return OtherMixture(there + predicted, variance, noise)


class BoTorchSampler(BayesSampler):
    """`bayes` with BoTorch's model."""

    name = "bayes-botorch"

    @staticmethod
    def surrogate(*arguments: Any) -> OtherMixture:
        return _surrogate(botorch_gp, *arguments)


class HEBOSurrogateSampler(BayesSampler):
    """`bayes` with HEBO's model."""

    name = "bayes-hebo"

    @staticmethod
    def surrogate(*arguments: Any) -> OtherMixture:
        return _surrogate(hebo_gp, *arguments)


SURROGATES = {each.name: each for each in (BoTorchSampler, HEBOSurrogateSampler)}
"""Samplers by their names in `bench/search.py`."""
