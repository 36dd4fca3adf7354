"""A small exact Gaussian process with priors on its few hyperparameters, fitted in milliseconds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.linalg.lapack import dpotri
from scipy.optimize import minimize

_SQRT5 = 5.0**0.5
_JITTER = 1e-8  # keeps the Cholesky factor of nearly equal points finite; values are of the order of 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """Hyperparameters, in the units of the values. Also the medians of their log-normal priors."""

    length: float | np.ndarray = 1.0
    """Length scale of the joint part; one for all columns, or one per column, shape (columns,)."""
    joint: float = 0.5
    """Standard deviation of the part in which columns interact."""
    additive: float = 0.5
    """Standard deviation of the sum of one function per column."""
    noise: float = 0.03
    """Standard deviation of a measurement."""
    spread: float = 1.0
    """Standard deviation of the logarithms of the hyperparameters under their priors."""
    noise_spread: float = 1.0
    """The same of the noise. A few trials hardly determine it, and may suggest zero noise by chance."""


class Kernel:
    """Covariances: basis functions + one Matern 5/2 function per column + a joint Matern 5/2 of all columns.

    The additive part lets a few trials inform the whole space: throughput and memory are mostly products of one factor
    per knob, hence sums in the logarithm (Duvenaud et al., "Additive Gaussian processes", 2011). The joint part has a
    length scale per column (ARD).
    """

    def __init__(self, scales: Scales, columns: int) -> None:
        self.scales = scales
        self._lengths = np.broadcast_to(np.asarray(scales.length, float), (columns,))

    def between(
        self, a: "Points | np.ndarray", b: "Points | np.ndarray", basis_a: np.ndarray, basis_b: np.ndarray
    ) -> np.ndarray:
        """Covariances of points a (n, columns) and b (m, columns): shape (n, m).

        `basis_*` are the basis functions times their deviations, shape (points, functions).
        """
        a, b = Points.of(a), Points.of(b)
        covariances = basis_a @ basis_b.T
        if not a.columns:
            return covariances + self.scales.joint**2 + self.scales.additive**2
        # Columns have few distinct values, so functions of two values are evaluated only on those.
        distances = [
            np.abs(levels[:, None] - other_levels[None, :]) / length
            for levels, other_levels, length in zip(a.levels, b.levels, self._lengths)
        ]
        joint = _spread([distance**2 for distance in distances], a, b)
        np.sqrt(joint, out=joint)
        covariances += self.scales.joint**2 * matern(joint)
        share = self.scales.additive**2 / a.columns
        covariances += _spread([share * matern(distance) for distance in distances], a, b)
        return covariances

    def diagonal(self, basis: np.ndarray) -> np.ndarray:
        """Prior variances of points, shape (n,)."""
        return (basis**2).sum(axis=1) + self.scales.additive**2 + self.scales.joint**2


class Points:
    """Points (n, columns) with the distinct values of each column, and the index of each point's value."""

    def __init__(self, points: np.ndarray) -> None:
        self.rows, self.columns = points.shape
        self.levels: list[np.ndarray] = []
        """Distinct values of each column, ascending."""
        self.codes: list[np.ndarray] = []
        """Index of each point's value among them, shape (n,) per column."""
        for column in points.T:
            levels, codes = np.unique(column, return_inverse=True)
            self.levels.append(levels)
            self.codes.append(codes)
        self._one_hot: np.ndarray | None = None

    @classmethod
    def of(cls, points: "Points | np.ndarray") -> "Points":
        """Converts points to `Points`."""
        return points if isinstance(points, Points) else cls(points)

    @property
    def width(self) -> int:
        """Number of levels of all columns together."""
        return sum(map(len, self.levels))

    @property
    def one_hot(self) -> np.ndarray:
        """1 for each level that a point has, shape (levels, n)."""
        if self._one_hot is None:
            self._one_hot = np.zeros((self.width, self.rows))
            start, rows = 0, np.arange(self.rows)
            for levels, codes in zip(self.levels, self.codes):
                self._one_hot[start + codes, rows] = 1.0
                start += len(levels)
        return self._one_hot

    def row(self, index: int) -> "Points":
        """Returns one point."""
        point = Points.__new__(Points)
        point.rows, point.columns, point._one_hot = 1, self.columns, None
        point.levels = [levels[[codes[index]]] for levels, codes in zip(self.levels, self.codes)]
        point.codes = [np.zeros(1, dtype=int)] * self.columns
        return point


def _spread(tables: Sequence[np.ndarray], a: Points, b: Points) -> np.ndarray:
    """Sum over columns of `table[level of a, level of b]`: shape (n, m).

    If there are few levels it uses two matrix products, which is ten times as fast as looking up every pair.
    """
    if a.rows > 16 and b.width <= 32 * b.columns:
        of_rows = np.concatenate([table[codes] for table, codes in zip(tables, a.codes)], axis=1)
        return of_rows @ b.one_hot
    sums = np.zeros((a.rows, b.rows))
    for table, codes_a, codes_b in zip(tables, a.codes, b.codes):
        sums += np.take(table[codes_a], codes_b, axis=1)
    return sums


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
        self.columns, self.n = points.shape[1], len(values)
        # As in `Kernel.between`, functions of two values of a column are evaluated only on distinct values.
        distinct = Points(points)
        self.apart = [np.abs(levels[:, None] - levels[None, :]).ravel() for levels in distinct.levels]
        starts = np.cumsum([0, *(len(gaps) for gaps in self.apart)])
        self.pairs = np.empty((self.columns, self.n, self.n), dtype=np.intp)
        """Index of each pair of points in the concatenated tables of all columns."""
        for column, (levels, codes) in enumerate(zip(distinct.levels, distinct.codes)):
            self.pairs[column] = starts[column] + codes[:, None] * len(levels) + codes[None, :]
        self.fixed = basis @ basis.T
        self.centre = np.log(
            [*np.broadcast_to(prior.length, (self.columns,)), prior.joint, prior.additive, prior.noise]
        )

    def __call__(self, logs: np.ndarray) -> tuple[float, np.ndarray]:
        """Negative log density and gradient at the logarithms (length..., joint, additive, noise)."""
        lengths = np.exp(logs[: self.columns])
        joint, additive, noise = np.exp(2 * logs[self.columns :])
        scaled = np.concatenate([*(gaps / length for gaps, length in zip(self.apart, lengths)), []])
        squares = (scaled**2)[self.pairs]
        distance = np.sqrt(squares.sum(axis=0))
        decay = np.exp(-_SQRT5 * distance)
        all_of_them = (1.0 + _SQRT5 * distance + 5.0 / 3.0 * distance**2) * decay
        added = matern(scaled)[self.pairs].mean(axis=0) if self.columns else np.ones((self.n, self.n))
        covariance = self.fixed + joint * all_of_them + additive * added
        covariance[np.diag_indices(self.n)] += (noise + self.extra) * self.inflation + _JITTER
        try:
            lower = cholesky(covariance, lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            return 1e25, np.zeros_like(logs)
        weights = cho_solve((lower, True), self.values, check_finite=False)
        inverse = dpotri(lower, lower=1)[0]
        inverse = np.tril(inverse) + np.tril(inverse, -1).T
        away = (logs - self.centre) / self.spread
        value = 0.5 * self.values @ weights + np.log(np.diag(lower)).sum() + 0.5 * self.n * np.log(2 * np.pi)
        value += 0.5 * (away**2).sum()
        # d log evidence / d K, contracted with dK / d log parameter.
        slope = 0.5 * (inverse - np.outer(weights, weights))
        gradient = away / self.spread
        # d matern(r) / d log l_c = 5/3 (1 + sqrt5 r) exp(-sqrt5 r) s_c^2, with s_c the scaled distance along c.
        steep_joint = slope * joint * (5.0 / 3.0) * (1 + _SQRT5 * distance) * decay
        gradient[: self.columns] += squares.reshape(self.columns, self.n**2) @ steep_joint.ravel()
        if self.columns:
            steep = (5.0 / 3.0) * (1 + _SQRT5 * scaled) * np.exp(-_SQRT5 * scaled) * scaled**2
            sums = steep[self.pairs].reshape(self.columns, self.n**2) @ slope.ravel()
            gradient[: self.columns] += additive / self.columns * sums
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
    """Returns the most probable hyperparameters, and the log evidence of the values with them.

    Args:
        points: shape (n, columns).
        values: shape (n,), with a mean of about 0 apart from what the basis explains.
        basis: basis functions times the deviations of their weights, shape (n, functions).
        prior: medians and spread.
        extra: known variances in addition to the noise, shape (n,); by default 0.
        inflation: factors of the variances, shape (n,); by default 1.
        limit: more points than this are thinned evenly by value, which is enough for hyperparameters.
    """
    if not len(values):
        return prior, 0.0
    extra = np.zeros(len(values)) if extra is None else extra
    inflation = np.ones(len(values)) if inflation is None else inflation
    if len(values) > limit:
        rows = np.argsort(values, kind="stable")[np.linspace(0, len(values) - 1, limit).astype(int)]
        points, values, basis, extra, inflation = (array[rows] for array in (points, values, basis, extra, inflation))
    evidence = _Evidence(points, values, basis, prior, extra, inflation)
    if len(values) < 2:
        return prior, -evidence(evidence.centre)[0]
    spread = evidence.spread
    bounds = list(zip(evidence.centre - 4 * spread, evidence.centre + 4 * spread, strict=True))
    # A log evidence to within 1e-5 is enough to choose the next trial.
    optimum = minimize(
        evidence,
        evidence.centre,
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": 40, "ftol": 1e-5, "gtol": 1e-2},
    )
    logs = optimum.x if np.isfinite(optimum.fun) else evidence.centre
    columns = points.shape[1]
    joint, additive, noise = np.exp(logs[columns:])
    scales = replace(prior, length=np.exp(logs[:columns]), joint=joint, additive=additive, noise=noise)
    return scales, -float(optimum.fun)


def left_out(
    kernel: Kernel, points: np.ndarray, values: np.ndarray, noise: np.ndarray, basis: np.ndarray
) -> np.ndarray:
    """Leave-one-out residuals: difference of each value from the prediction by the others, in standard deviations,
    shape (n,).

    Source: Rasmussen and Williams (2006), section 5.4.2.
    """
    covariance = kernel.between(points, points, basis, basis)
    covariance[np.diag_indices(len(points))] += noise + _JITTER
    inverse = np.linalg.inv(covariance)
    return (inverse @ values) / np.sqrt(np.diag(inverse))


class Posterior:
    """A Gaussian process conditioned on observations with individual noise, at a set of candidates.

    It can be conditioned on further candidates one by one (pending trials, the members of a batch) at the cost of one
    row each. Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), algorithm 2.1; the
    update extends the Cholesky factor by a row.

    Args:
        kernel: covariances.
        points, values, noise, basis: observations: (n, columns), (n,), variances (n,), (n, functions).
        candidates, candidate_basis: (m, columns), (m, functions).
    """

    def __init__(
        self,
        kernel: Kernel,
        points: np.ndarray,
        values: np.ndarray,
        noise: np.ndarray,
        basis: np.ndarray,
        candidates: np.ndarray,
        candidate_basis: np.ndarray,
    ) -> None:
        self.kernel, self._candidates, self._candidate_basis = kernel, Points.of(candidates), candidate_basis
        measured = Points.of(points)
        covariance = kernel.between(measured, measured, basis, basis)
        covariance[np.diag_indices(measured.rows)] += noise + _JITTER
        lower = cholesky(covariance, lower=True, check_finite=False)
        cross = kernel.between(measured, self._candidates, basis, candidate_basis)
        self._projected = solve_triangular(lower, cross, lower=True, check_finite=False)
        """L^-1 K(points, candidates), shape (n, m)."""
        whitened = solve_triangular(lower, values, lower=True, check_finite=False)
        self.mean = whitened @ self._projected
        """Means at the candidates, shape (m,)."""
        self.variance = np.maximum(kernel.diagonal(candidate_basis) - (self._projected**2).sum(axis=0), 1e-12)
        """Variances of the function (without noise) at the candidates, shape (m,)."""
        self._extra: list[np.ndarray] = []

    def observe(self, index: int, noise: float) -> None:
        """Conditions on the posterior mean of candidate `index`, with noise of that variance: the means do not
        change, the variances around it shrink.
        """
        here, basis = self._candidates.row(index), self._candidate_basis[[index]]
        covariance = self.kernel.between(here, self._candidates, basis, self._candidate_basis)[0]
        covariance -= self._projected[:, index] @ self._projected
        for row in self._extra:
            covariance -= row[index] * row
        row = covariance / np.sqrt(max(float(covariance[index]), 1e-12) + noise + _JITTER)
        self._extra.append(row)
        self.variance = np.maximum(self.variance - row**2, 1e-12)
