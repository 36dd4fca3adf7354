"""What observations of like functions say of one that was not observed itself.

Notation, logarithms throughout:

    f(x)      what departs from the estimate, or without one from the mean, at configuration x of this search
    f_r(x)    the same in the earlier run r, of which y_j was observed at x_j, with noise s
    w_r       how alike run r is to this one, 0 to 1 (see `task_similarity`): the correlation of f_r with f
    k         covariance of f; f and f_r have w_r k, two runs w_r w_q k, a run with itself k

so that the mean of f is m(x) = sum_j w_r(j) k(x, x_j) a_j with a = (k * W + s^2 I)^-1 y, where W has 1 within
a run and w_r w_q between two: a run half as alike moves half as much, and counts for no more by being long.
Source: Bonilla, Chai and Williams, "Multi-task Gaussian Process Prediction" (2008), with the correlations
given.
"""

import numpy as np

from .samplers.gaussian_process import Kernel, Points, Scales, fit_scales

EXPECTED = Scales(joint=0.3, additive=0.3, noise=0.05)
"""Medians of the scales before they are fitted."""


class Transfer:
    """The mean of f given what the earlier runs observed of f_r.

    Args:
        points: of the observations, shape (n, columns).
        values: y, shape (n,); NaN where nothing was observed.
        owner: the run of each, shape (n,).
        weights: w of each run, shape (runs,).
    """

    def __init__(self, points: np.ndarray, values: np.ndarray, owner: np.ndarray, weights: np.ndarray) -> None:
        rows = np.flatnonzero(np.isfinite(values))
        points, values, owner = points[rows], values[rows], owner[rows]
        self._runs, self._kernel = len(weights), None
        if not len(rows):
            return
        # What runs less alike say of the scales would be mostly how they differ.
        alike = weights[owner] == weights[owner].max()
        none = np.zeros((int(alike.sum()), 0))
        scales, _ = fit_scales(points[alike], values[alike], none, EXPECTED)
        self._kernel, self._points = Kernel(scales, points.shape[1]), Points.of(points)
        correlation = np.where(owner[:, None] == owner, 1.0, np.outer(weights[owner], weights[owner]))
        none = np.zeros((len(rows), 0))
        covariance = self._kernel.between(self._points, self._points, none, none) * correlation
        covariance[np.diag_indices(len(rows))] += scales.noise**2 + 1e-8
        moved = weights[owner] * np.linalg.solve(covariance, values)
        self._moved = moved[:, None] * (owner[:, None] == np.arange(self._runs))
        """w a, in the column of the run it is of: shape (n, runs)."""

    def parts(self, at: np.ndarray) -> np.ndarray:
        """What each run adds to the mean at points (m, columns): shape (m, runs); 0 far from what it saw."""
        if self._kernel is None:
            return np.zeros((len(at), self._runs))
        none_at, none = np.zeros((len(at), 0)), np.zeros((self._points.rows, 0))
        return self._kernel.between(at, self._points, none_at, none) @ self._moved
