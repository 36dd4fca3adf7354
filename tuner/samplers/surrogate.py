"""Models of each candidate's speed and memory, as mixtures of rival models."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.special import expit, ndtr

from .gaussian_process import Kernel, Posterior, Scales, fit_scales, left_out

LIMIT = 400
"""Largest number of trials that a posterior is conditioned on."""
FEW = 64
"""Number of trials up to which the scales are fitted again after outliers are known."""
ENOUGH = 12
"""Number of values from which the worse half of them is compressed. With fewer every value informs about the best."""
SOFTNESS = 0.1
"""Scale of the logistic likelihood of an OOM, in log memory. It tolerates outliers: a single fluke changes the
posterior by a bounded amount.
"""
DEGREES = 4.0
"""Degrees of freedom of the Student t of a throughput: on a cluster some runs stall, and are several times slower."""

STALL = 2.0
"""Largest evidence of an outlier against a model, in natural logarithms: a run that stalls should not count for or
against an estimate.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PriorModel:
    """A model before any trial: a mean, functions with unknown weights, and scales of the rest."""

    mean: np.ndarray
    """Mean at every point, trials first, then candidates: shape (n + m,)."""
    basis: np.ndarray
    """Functions times the deviations of their weights, shape (n + m, functions)."""
    scales: Scales
    """Medians of the hyperparameters of the rest."""
    independent: np.ndarray | None = None
    """Variance at every point that is independent of its neighbours, in addition to the noise: shape (n + m,); None
    for 0.
    """
    weight: float = 1.0
    """Prior probability of this model, up to a common factor."""


class Mixture:
    """Posteriors of rival models, weighted by how well each explains the measurements.

    An estimate is the mean of one model, while another has none. A wrong estimate therefore costs only the few trials
    that show it (Bayesian model averaging; Hoeting et al. 1999).
    """

    def __init__(
        self,
        posteriors: Sequence[Posterior],
        means: Sequence[np.ndarray],
        weights: np.ndarray,
        noise: Sequence[np.ndarray],
    ) -> None:
        self.posteriors, self._means, self.weights = posteriors, means, weights
        self.noise = noise
        """Variance of a measurement of each candidate in each model, shape (m,)."""

    def parts(self) -> list[tuple[float, np.ndarray, np.ndarray]]:
        """Weight, means and variances at the candidates of each model."""
        return [
            (float(weight), posterior.mean + mean, posterior.variance)
            for weight, posterior, mean in zip(self.weights, self.posteriors, self._means, strict=True)
        ]

    def outcomes(self) -> list[tuple[float, np.ndarray, np.ndarray]]:
        """As `parts`, with the variances of measurements: a candidate's own deviation can make it the best."""
        return [
            (weight, mean, variance + noise)
            for (weight, mean, variance), noise in zip(self.parts(), self.noise, strict=True)
        ]

    @property
    def mean(self) -> np.ndarray:
        """Mean at the candidates, shape (m,)."""
        return np.sum([weight * mean for weight, mean, _ in self.parts()], axis=0)

    @property
    def variance(self) -> np.ndarray:
        """Variance at the candidates, shape (m,)."""
        mean = self.mean
        return sum(weight * (variance + (model_mean - mean) ** 2) for weight, model_mean, variance in self.parts())

    def observe(self, index: int) -> None:
        """Conditions every model on its posterior mean at candidate `index`."""
        for posterior, noise in zip(self.posteriors, self.noise):
            posterior.observe(index, float(noise[index]))


def throughput_model(
    models: Sequence[PriorModel], points: np.ndarray, values: np.ndarray, candidates: np.ndarray
) -> Mixture:
    """Models of log throughput given measurements.

    Args:
        models: the rival models; their means and bases cover `points`, then `candidates`.
        points: features of measured trials, shape (n, columns).
        values: their objectives, shape (n,).
        candidates: features of the candidates, shape (m, columns).
    """
    count = len(values)
    fitted = _subset(values, LIMIT)
    # Rivals are weighted by how well they explain the same values, so that only a model alone may change them.
    trusted = np.zeros(count, dtype=bool)
    if len(models) == 1 and count >= ENOUGH:
        trusted = values >= np.median(values)
        values = _compressed(values)
    posteriors, means, evidence, noises = [], [], [], []
    for model in models:
        residual = values - model.mean[:count]
        basis = model.basis[:count]
        independent = np.zeros(count + len(candidates)) if model.independent is None else model.independent
        scales, score, inflation = _robust_scales(points, residual, basis, model.scales, independent[:count], trusted)
        kernel = Kernel(scales, points.shape[1])
        noise = ((scales.noise**2 + independent[:count]) * inflation)[fitted]
        posteriors.append(
            Posterior(kernel, points[fitted], residual[fitted], noise, basis[fitted], candidates, model.basis[count:])
        )
        means.append(model.mean[count:])
        evidence.append(score + np.log(model.weight))
        noises.append(np.full(len(candidates), scales.noise**2))
    return Mixture(posteriors, means, _softmax(evidence), noises)


def _compressed(values: np.ndarray) -> np.ndarray:
    """Values whose distance below the median is compressed logarithmically, in quartile ranges, shape (n,).

    The worst configurations say little about the best ones, and would otherwise decide the scales.
    """
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    unit = max(high - low, 1e-3)
    return np.where(values < middle, middle - unit * np.log1p(np.maximum(middle - values, 0.0) / unit), values)


def _robust_scales(
    points: np.ndarray,
    values: np.ndarray,
    basis: np.ndarray,
    prior: Scales,
    independent: np.ndarray,
    trusted: np.ndarray,
) -> tuple[Scales, float, np.ndarray]:
    """Scales, log evidence, and the factor by which the noise of each value is inflated (n,), 1 or more.

    It is 1 for `trusted` values: a disturbance slows runs down and cannot have made a good one fast.

    A Student t is a Gaussian whose variance has an inverse gamma distribution. The result maximises over those
    variances and the scales alternately (Rasmussen and Williams 2006, section 9.3).
    """
    count = len(values)
    inflation, scales = np.ones(count), prior
    if not 3 <= count <= LIMIT:
        return *fit_scales(points, values, basis, prior, extra=independent, inflation=inflation), inflation
    # Starts from the expected scales: scales fitted to an outlier would make it look ordinary.
    for _ in range(2 if count <= FEW else 1):
        for _ in range(3):
            noise = (scales.noise**2 + independent) * inflation
            away = left_out(Kernel(scales, points.shape[1]), points, values, noise, basis)
            # The noise explains part of the leave-one-out residual; for an outlier, nearly all of it.
            inflation = np.maximum(1.0, (DEGREES + away**2 * inflation) / (DEGREES + 1.0))
            inflation[trusted] = 1.0
        scales, score = fit_scales(points, values, basis, prior, extra=independent, inflation=inflation)
    penalty = (DEGREES / 2 + 1) * np.log(inflation) + DEGREES / 2 * (1.0 / inflation - 1.0)
    return scales, score - float(np.minimum(penalty, STALL).sum()), inflation


def limit_model(
    models: Sequence[PriorModel],
    points: np.ndarray,
    values: np.ndarray,
    sign: np.ndarray,
    candidates: np.ndarray,
) -> Mixture:
    """Models of a quantity that must stay below 0: log memory over the limit, or a tendency to fail.

    Args:
        models: the rival models.
        points: features of the trials, shape (n, columns).
        values: the quantity if it was measured; if `sign` is not 0, the bound that it is above (1) or below (-1);
            shape (n,).
        sign: 0 for a measurement, 1 for more than the value, -1 for less; shape (n,).
        candidates: features of the candidates, shape (m, columns).
    """
    count = len(values)
    fitted = (
        np.arange(count)
        if count <= LIMIT
        else np.union1d(_evenly(np.flatnonzero(sign == 0)), _evenly(np.flatnonzero(sign != 0)))
    )
    exact = np.flatnonzero(sign == 0)
    posteriors, means, evidence, noises = [], [], [], []
    for model in models:
        scales, score = model.scales, 0.0
        if len(exact) > 1:
            residual = values[exact] - model.mean[exact]
            scales, score = fit_scales(points[exact], residual, model.basis[exact], model.scales)
        kernel = Kernel(scales, points.shape[1])
        here, basis, mean = points[fitted], model.basis[fitted], model.mean[fitted]
        targets, noise, loss = _pseudo(
            kernel.between(here, here, basis, basis), values[fitted] - mean, sign[fitted], scales.noise
        )
        posteriors.append(Posterior(kernel, here, targets, noise, basis, candidates, model.basis[count:]))
        means.append(model.mean[count:])
        evidence.append(score - loss + np.log(model.weight))
        noises.append(np.full(len(candidates), scales.noise**2))
    return Mixture(posteriors, means, _softmax(evidence), noises)


def chance_below(mixture: Mixture, bound: float) -> np.ndarray:
    """Probability that the quantity of each candidate is below the bound, shape (m,)."""
    # MacKay's approximation of a logistic averaged over a Gaussian.
    shares = [
        weight * expit((bound - mean) / np.sqrt(SOFTNESS**2 + np.pi * variance / 8))
        for weight, mean, variance in mixture.parts()
    ]
    return np.sum(shares, axis=0)


def expected_improvement(mean: np.ndarray, variance: np.ndarray, best: float) -> np.ndarray:
    """E[max(f - best, 0)] of Gaussian f, shape (m,)."""
    deviation = np.sqrt(variance)
    z = (mean - best) / deviation
    return deviation * (z * ndtr(z) + np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi))


def _pseudo(
    covariance: np.ndarray, values: np.ndarray, sign: np.ndarray, noise: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Gaussian observations that replace the bounds among `values`: Laplace's approximation.

    Returns:
        Targets and noise variances, each (n,), and the loss in log evidence caused by the bounds.
    """
    censored = sign != 0
    targets, variances = values.copy(), np.full(len(values), noise**2)
    if not censored.any():
        return targets, variances, 0.0
    function = np.where(censored, 0.0, values)
    s, bound = sign[censored], values[censored]
    for _ in range(30):
        away = s * (function[censored] - bound) / SOFTNESS
        pull = s * expit(-away) / SOFTNESS
        curvature = np.maximum(expit(away) * expit(-away) / SOFTNESS**2, 0.05)
        targets[censored] = function[censored] + pull / curvature
        variances[censored] = 1.0 / curvature
        noisy = covariance + np.diag(variances + 1e-8)
        factor = cho_factor(noisy, lower=True, check_finite=False)
        step = covariance @ cho_solve(factor, targets, check_finite=False) - function
        # A full Newton step may overshoot the knee of a bound; steps of one unit of log memory do not.
        step *= min(1.0, 1.0 / max(np.abs(step).max(), 1e-12))
        function = function + step
        if np.abs(step).max() < 1e-4:
            break
    away = s * (function[censored] - bound) / SOFTNESS
    return targets, variances, float(np.logaddexp(0.0, -away).sum())


def _subset(values: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` rows: the best half, and an even share of the others."""
    order = np.argsort(-values, kind="stable")
    if len(order) <= limit:
        return np.arange(len(values))
    worse = order[limit // 2 :]
    share = worse[np.linspace(0, len(worse) - 1, limit // 2).astype(int)]
    return np.sort(np.concatenate([order[: limit // 2], share]))


def _evenly(rows: np.ndarray) -> np.ndarray:
    half = LIMIT // 2
    return rows if len(rows) <= half else rows[np.linspace(0, len(rows) - 1, half).astype(int)]


def _softmax(scores: Sequence[float]) -> np.ndarray:
    array = np.array(scores)
    shares = np.exp(array - array.max())
    return shares / shares.sum()
