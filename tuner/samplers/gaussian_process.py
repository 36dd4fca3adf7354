"""A small Gaussian process: exact, with priors on its few hyperparameters, fitted in milliseconds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize

_SQRT5 = 5.0**0.5
_JITTER = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """Hyperparameters, in the units of the values. Also the medians of their log-normal priors."""

    length: float | np.ndarray = 1.0
    """Distance over which the joint part forgets; one for all columns, or one each, shape (columns,)."""
    joint: float = 0.5
    """Standard deviation of the part in which columns interact."""
    additive: float = 0.5
    """Standard deviation of the sum of one function a column."""
    noise: float = 0.03
    """Standard deviation of a measurement."""
    spread: float = 1.0
    """Standard deviation of the logarithms of all these under their priors."""
    noise_spread: float = 1.0
    """That of the noise: a handful of trials says little of it, and that it is nil they say by chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Basis:
    """Known functions whose weights are learnt along: the mean is `weights @ values`."""

    values: np.ndarray
    """Their values, shape (n, functions)."""
    deviation: np.ndarray
    """Standard deviation of each weight around 0, shape (functions,)."""


class Kernel:
    """Covariances: basis functions + one Matern 5/2 function a column + a joint Matern 5/2 of all columns.

    The additive part is what lets a handful of trials speak for a whole space: throughput and memory are
    mostly products of one factor a knob, hence sums in the logarithm (Duvenaud et al., "Additive Gaussian
    processes", 2011). The joint part has a length scale per column (ARD).
    """

    def __init__(self, scales: Scales, columns: int) -> None:
        self.scales = replace(
            scales, length=np.broadcast_to(np.asarray(scales.length, float), (columns,)).copy()
        )

    def between(self, a: np.ndarray, b: np.ndarray, basis_a: np.ndarray, basis_b: np.ndarray) -> np.ndarray:
        """Covariances of points a (n, columns) and b (m, columns): shape (n, m).

        `basis_*` hold the basis functions times their deviations, shape (points, functions).
        """
        out = basis_a @ basis_b.T
        columns = a.shape[1]
        if not columns:
            return out + self.scales.joint**2 + self.scales.additive**2
        square = np.zeros((len(a), len(b)))
        additive = np.zeros((len(a), len(b)))
        for column in range(columns):
            # Columns have few different values, so the function is evaluated on those alone.
            values_a, rows_a = np.unique(a[:, column], return_inverse=True)
            values_b, rows_b = np.unique(b[:, column], return_inverse=True)
            apart = np.abs(values_a[:, None] - values_b[None, :]) / self.scales.length[column]
            additive += matern(apart)[rows_a][:, rows_b]
            square += (apart**2)[rows_a][:, rows_b]
        out += self.scales.additive**2 / columns * additive
        out += self.scales.joint**2 * matern(np.sqrt(square))
        return out

    def diagonal(self, basis: np.ndarray) -> np.ndarray:
        """Prior variances of points, shape (n,)."""
        return (basis**2).sum(axis=1) + self.scales.additive**2 + self.scales.joint**2


def matern(distance: np.ndarray) -> np.ndarray:
    """Matern 5/2 correlation at a distance in length scales."""
    scaled = _SQRT5 * distance
    return (1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled)


class _Evidence:
    """Log posterior density of the hyperparameters given values at points, and its gradient."""

    def __init__(
        self,
        points: np.ndarray,
        values: np.ndarray,
        basis: np.ndarray,
        prior: Scales,
        extra: np.ndarray,
        inflation: np.ndarray,
    ) -> None:
        self.values, self.prior, self.extra, self.inflation = values, prior, extra, inflation
        self.spread = np.full(points.shape[1] + 3, prior.spread)
        self.spread[-1] = prior.noise_spread
        self.apart = np.abs(points.T[:, :, None] - points.T[:, None, :])
        self.columns, self.n = points.shape[1], len(values)
        self.fixed = basis @ basis.T
        self.centre = np.log(
            [*np.broadcast_to(prior.length, (self.columns,)), prior.joint, prior.additive, prior.noise]
        )

    def __call__(self, logs: np.ndarray) -> tuple[float, np.ndarray]:
        """Negative log density and gradient at the logarithms (length..., joint, additive, noise)."""
        lengths = np.exp(logs[: self.columns])
        joint, additive, noise = np.exp(2 * logs[self.columns :])
        scaled = self.apart / lengths[:, None, None]
        each = matern(scaled)
        distance = np.sqrt((scaled**2).sum(axis=0))
        all_of_them = matern(distance)
        added = each.mean(axis=0) if self.columns else np.ones((self.n, self.n))
        covariance = self.fixed + joint * all_of_them + additive * added
        covariance[np.diag_indices(self.n)] += (noise + self.extra) * self.inflation + _JITTER
        try:
            lower = cholesky(covariance, lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            return 1e25, np.zeros_like(logs)
        weights = cho_solve((lower, True), self.values, check_finite=False)
        inverse = cho_solve((lower, True), np.eye(self.n), check_finite=False)
        away = (logs - self.centre) / self.spread
        value = 0.5 * self.values @ weights + np.log(np.diag(lower)).sum() + 0.5 * self.n * np.log(2 * np.pi)
        value += 0.5 * (away**2).sum()
        # d log evidence / d K, contracted with dK / d log parameter.
        slope = 0.5 * (inverse - np.outer(weights, weights))
        gradient = away / self.spread
        # d matern(r) / d log l_c = 5/3 (1 + sqrt5 r) exp(-sqrt5 r) s_c^2, with s_c the scaled distance along c.
        whole = slope * joint * (5.0 / 3.0) * (1 + _SQRT5 * distance) * np.exp(-_SQRT5 * distance)
        squares = scaled**2
        gradient[: self.columns] += (squares * whole).sum(axis=(1, 2))
        if self.columns:
            steep = (5.0 / 3.0) * (1 + _SQRT5 * scaled) * np.exp(-_SQRT5 * scaled) * squares
            gradient[: self.columns] += additive / self.columns * (steep * slope).sum(axis=(1, 2))
        gradient[self.columns] += 2 * joint * (slope * all_of_them).sum()
        gradient[self.columns + 1] += 2 * additive * (slope * added).sum()
        gradient[self.columns + 2] += 2 * noise * (np.diag(slope) * self.inflation).sum()
        return float(value), gradient


def fit_scales(
    points: np.ndarray,
    values: np.ndarray,
    basis: np.ndarray,
    prior: Scales,
    *,
    extra: np.ndarray | None = None,
    inflation: np.ndarray | None = None,
    limit: int = 192,
) -> tuple[Scales, float]:
    """The most probable hyperparameters, and the log evidence of the values with them.

    Args:
        points: shape (n, columns).
        values: shape (n,), of mean about 0 apart from what the basis explains.
        basis: basis functions times the deviations of their weights, shape (n, functions).
        prior: medians and spread.
        extra: known variances beside the noise, shape (n,); by default 0.
        inflation: factors of the variances, shape (n,); by default 1.
        limit: more points than this are thinned evenly by value: hyperparameters need no more.
    """
    extra = np.zeros(len(values)) if extra is None else extra
    inflation = np.ones(len(values)) if inflation is None else inflation
    if len(values) > limit:
        rows = np.argsort(values, kind="stable")[np.linspace(0, len(values) - 1, limit).astype(int)]
        points, values, basis, extra, inflation = (
            each[rows] for each in (points, values, basis, extra, inflation)
        )
    evidence = _Evidence(points, values, basis, prior, extra, inflation)
    if len(values) < 2:
        return prior, -evidence(evidence.centre)[0]
    spread = evidence.spread
    bounds = list(zip(evidence.centre - 4 * spread, evidence.centre + 4 * spread, strict=True))
    found = minimize(
        evidence, evidence.centre, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40}
    )
    logs = found.x if np.isfinite(found.fun) else evidence.centre
    columns = points.shape[1]
    joint, additive, noise = np.exp(logs[columns:])
    scales = replace(prior, length=np.exp(logs[:columns]), joint=joint, additive=additive, noise=noise)
    return scales, -float(found.fun)


def left_out(
    kernel: Kernel, points: np.ndarray, values: np.ndarray, noise: np.ndarray, basis: np.ndarray
) -> np.ndarray:
    """How far each value is from what the others predict, in standard deviations: shape (n,).

    Source: Rasmussen and Williams (2006), section 5.4.2.
    """
    own = kernel.between(points, points, basis, basis)
    own[np.diag_indices(len(points))] += noise + _JITTER
    inverse = np.linalg.inv(own)
    return (inverse @ values) / np.sqrt(np.diag(inverse))


class Posterior:
    """A Gaussian process given observations with their own noise, at a set of candidates.

    Keeps what is needed to go on observing candidates one by one (pending trials, the members of a batch)
    at the price of one row each. Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning"
    (2006), algorithm 2.1; the update is that of the Cholesky factor by a row.

    Args:
        kernel: covariances.
        points, values, noise, basis: of the observations: (n, columns), (n,), variances (n,), (n, functions).
        at, at_basis: the candidates: (m, columns), (m, functions).
    """

    def __init__(
        self,
        kernel: Kernel,
        points: np.ndarray,
        values: np.ndarray,
        noise: np.ndarray,
        basis: np.ndarray,
        at: np.ndarray,
        at_basis: np.ndarray,
    ) -> None:
        self.kernel, self._at, self._at_basis = kernel, at, at_basis
        own = kernel.between(points, points, basis, basis)
        own[np.diag_indices(len(points))] += noise + _JITTER
        lower = cholesky(own, lower=True, check_finite=False)
        cross = kernel.between(points, at, basis, at_basis)
        self._projected = solve_triangular(lower, cross, lower=True, check_finite=False)
        """L^-1 K(points, candidates), shape (n, m)."""
        whitened = solve_triangular(lower, values, lower=True, check_finite=False)
        self.mean = whitened @ self._projected
        """Means at the candidates, shape (m,)."""
        self.variance = np.maximum(kernel.diagonal(at_basis) - (self._projected**2).sum(axis=0), 1e-12)
        """Variances of the function (without noise) at the candidates, shape (m,)."""
        self._extra: list[np.ndarray] = []

    def observe(self, index: int, noise: float) -> None:
        """Conditions on candidate `index` having its mean as value, with noise of that variance: the means
        stay, the variances around it shrink."""
        here, basis = self._at[[index]], self._at_basis[[index]]
        covariance = self.kernel.between(here, self._at, basis, self._at_basis)[0]
        covariance -= self._projected[:, index] @ self._projected
        for row in self._extra:
            covariance -= row[index] * row
        row = covariance / np.sqrt(max(float(covariance[index]), 1e-12) + noise + _JITTER)
        self._extra.append(row)
        self.variance = np.maximum(self.variance - row**2, 1e-12)


def bases(*parts: Sequence[Basis]) -> np.ndarray:
    """Basis functions times their deviations, side by side: shape (n, functions)."""
    return np.concatenate([part.values * part.deviation for part in parts], axis=1)
