"""Corrections of the predictions from measured trials: a handful of factors, drawn toward the physics.

A prediction is a sum of groups of terms, T_1 + ... + T_k. Calibration multiplies each group by exp(theta_g),
with theta ~ Normal(0, prior_g^2), and finds the most likely theta for log(measured) ~ log(sum exp(theta_g)
T_g) with heavy-tailed noise (Student's t with 4 degrees of freedom, by reweighting). The curvature at the
optimum gives the covariance of theta (Laplace), and with the noise the spread of a prediction. Without trials
the same formula gives the spread of the uncalibrated prediction, so uncertainty shrinks continuously as
trials come in.

Most of the noise is systematic: a configuration that is slower than predicted is slower each time, and so are similar ones. A
Gaussian process over the knobs interpolates the residuals after the factors (universal kriging with a fixed trend; Rasmussen and
Williams 2006, sections 2.2 and 2.7). Far from all trials, only the factors count.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .knob_arrays import KnobArrays
from .memory import MEMORY_TERMS
from .time import TIME_TERMS

DEGREES = 4.0
"""Degrees of freedom of the noise: outliers (a disturbed node, a lucky run) lose their weight."""
PRIOR_WEIGHT = 8.0
"""Trials that the prior noise counts as."""
LEAST_SCALE = 0.2
"""Lower bound of the noise, as a share of the expected noise, however well a few trials agree."""
SYSTEMATIC = 0.8
"""Share of the noise's variance that is the same each time a configuration runs, and similar for similar ones."""
REACH = 1.5
"""Distance of `KnobArrays.features` at which these shares have a correlation of exp(-1/2): 1.5 doublings of a degree."""


class Interpolation(NamedTuple):
    """Correction of n predictions by the residuals of measured configurations; without arguments none."""

    factor: "np.ndarray | float" = 1.0
    """Factor of each prediction, shape (n,)."""
    explained: "np.ndarray | float" = 0.0
    """Part of the noise's variance that measured configurations explain, shape (n,)."""


@dataclass(frozen=True, slots=True)
class Residual:
    """Residuals of the logarithms of m measured values after the factors, interpolated between configurations."""

    features: np.ndarray
    """Features of the measured configurations, shape (m, f)."""
    amplitude: np.ndarray
    """Prior standard deviation of each, shape (m,)."""
    inverse: np.ndarray
    """Inverse of their covariance with the noise, shape (m, m)."""
    values: np.ndarray
    """Shape (m,)."""

    @classmethod
    def of(cls, features: np.ndarray, values: np.ndarray, noise: np.ndarray, weight: np.ndarray) -> "Residual":
        """Interpolates these values.

        Args:
            features: shape (m, f).
            values: logarithms of measured over corrected values, shape (m,).
            noise: their standard deviations, shape (m,).
            weight: shape (m,); less than 1 for outliers.
        """
        amplitude = np.sqrt(SYSTEMATIC) * noise
        chance = (1 - SYSTEMATIC) * noise**2 / weight
        covariance = amplitude[:, None] * amplitude * _correlation(features, features) + np.diag(chance)
        return cls(features, amplitude, np.linalg.inv(covariance), values)

    def at(self, features: np.ndarray, noise: np.ndarray) -> Interpolation:
        """The residuals of n configurations.

        Args:
            features: shape (n, f).
            noise: standard deviations of measurements without this, shape (n,).
        """
        amplitude = np.sqrt(SYSTEMATIC) * noise
        covariance = amplitude[:, None] * self.amplitude * _correlation(features, self.features)
        weights = covariance @ self.inverse
        return Interpolation(np.exp(weights @ self.values), (weights * covariance).sum(1))


def _correlation(features: np.ndarray, others_features: np.ndarray) -> np.ndarray:
    """Correlation of the residuals of each pair, shape (n, m), from features of shapes (n, f) and (m, f)."""
    squares = (features**2).sum(1)[:, None] + (others_features**2).sum(1) - 2 * features @ others_features.T
    return np.exp(-np.maximum(squares, 0.0) / (2 * REACH**2))


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors for k groups of terms, with their uncertainty."""

    theta: np.ndarray
    """Natural logarithms of the factors, shape (k,)."""
    covariance: np.ndarray
    """Covariance of theta, shape (k, k)."""
    scale: float = 1.0
    """Ratio of the scatter of single measurements about the corrected prediction to the expected scatter."""
    trials: int = 0
    """Number of measurements that it is fitted to."""
    residual: Residual | None = None
    """Residuals after the factors; None if none are interpolated."""

    @classmethod
    def none(cls, prior: np.ndarray) -> "Correction":
        """No correction, with the prior's uncertainty."""
        return cls(np.zeros(len(prior)), np.diag(np.asarray(prior, float) ** 2))

    def apply(
        self, groups: np.ndarray, noise: "np.ndarray | float", interpolation: "Interpolation | None" = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Corrected sums and the standard deviations of their logarithms.

        Args:
            groups: predicted parts, shape (n, k).
            noise: prior standard deviation of a measurement's logarithm; shape (n,) or a scalar.
            interpolation: from `interpolate`, with the same noise; None for none.
        """
        interpolation = interpolation or Interpolation()
        share = self._shares(groups)
        variance = np.einsum("nk,kl,nl->n", share, self.covariance, share)
        single = (self.scale * np.asarray(noise)) ** 2 - interpolation.explained
        return (groups * np.exp(self.theta)).sum(1) * interpolation.factor, np.sqrt(np.maximum(variance, 0.0) + single)

    def interpolate(self, features: np.ndarray | None, noise: "np.ndarray | float") -> "Interpolation":
        """Returns the correction of n predictions by the residuals of measured configurations.

        Args:
            features: `KnobArrays.features`, shape (n, f); None for nothing.
            noise: as in `apply`.
        """
        if self.residual is None or features is None:
            return Interpolation()
        return self.residual.at(features, self.scale * np.broadcast_to(np.asarray(noise, float), (len(features),)))

    def effects(self, groups: np.ndarray) -> np.ndarray:
        """Change of the logarithms of the sums per standard deviation of each of k independent factors; shape (n, k), 0 where a
        sum is not finite.

        Their squares sum to the variance in `apply` without the noise.
        """
        return self._shares(groups) @ np.linalg.cholesky(self.covariance)

    def _shares(self, groups: np.ndarray) -> np.ndarray:
        """Shares of the groups in the corrected sums, shape (n, k); 0 where a sum is not finite."""
        scaled = groups * np.exp(self.theta)
        total = scaled.sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where((np.isfinite(total) & (total > 0))[:, None], scaled / total[:, None], 0.0)


def fit(
    groups: np.ndarray,
    measured: np.ndarray,
    prior: np.ndarray,
    noise: "np.ndarray | float",
    at_least: np.ndarray | None = None,
    features: np.ndarray | None = None,
) -> Correction:
    """Fits the correction to measurements.

    Args:
        groups: predicted parts, shape (n, k).
        measured: measured values, shape (n,), in the same unit.
        prior: prior standard deviations of theta, shape (k,).
        noise: prior standard deviation of a measurement's logarithm; shape (n,) or a scalar.
        at_least: booleans, shape (n,): the measured value is only a lower bound (out of memory at a limit).
        features: `KnobArrays.features`, shape (n, f); None for no residual.
    """
    groups, measured = np.asarray(groups, float), np.asarray(measured, float)
    bound = np.zeros(len(measured), bool) if at_least is None else np.asarray(at_least, bool)
    usable = np.isfinite(groups).all(1) & np.isfinite(measured) & (measured > 0) & (groups.sum(1) > 0)
    single = np.broadcast_to(np.asarray(noise, float), measured.shape)[usable]
    groups, measured, bound = groups[usable], measured[usable], bound[usable]
    if not len(measured):
        return Correction.none(prior)
    target = np.log(measured)
    precision = np.diag(1 / np.asarray(prior, float) ** 2)
    theta = np.zeros(groups.shape[1])
    scale = 1.0
    for _ in range(60):
        scaled = groups * np.exp(theta)
        total = scaled.sum(1)
        jacobian = scaled / total[:, None]
        residual = target - np.log(total)
        # A lower bound that the prediction satisfies carries no information.
        active = ~bound | (residual > 0)
        spread = scale * single
        weight = np.where(active, (DEGREES + 1) / (DEGREES + (residual / spread) ** 2), 0.0) / spread**2
        hessian = jacobian.T @ (weight[:, None] * jacobian) + precision
        step = np.linalg.solve(hessian, jacobian.T @ (weight * residual) - precision @ theta)
        size = np.abs(step).max()
        theta = theta + step * min(1.0, 0.5 / max(size, 1e-12))
        exact = ~bound
        if exact.any():
            # Robust scale of the residuals (Student's t), shrunk to the expected one; a fitted theta
            # accounts for some of them.
            used = np.trace(np.linalg.solve(hessian, jacobian.T @ (weight[:, None] * jacobian)))
            robust = (weight * spread**2 * (residual / single) ** 2)[exact].sum()
            freedom = max(exact.sum() - used, 0.0)
            scale = max(float(np.sqrt((PRIOR_WEIGHT + robust) / (PRIOR_WEIGHT + freedom))), LEAST_SCALE)
        if size < 1e-6:
            break
    covariance = np.linalg.inv(hessian)
    residuals = None
    if features is not None and exact.any():
        values = (target - np.log((groups * np.exp(theta)).sum(1)))[exact]
        spread = scale * single[exact]
        weight = (DEGREES + 1) / (DEGREES + (values / spread) ** 2)
        residuals = Residual.of(features[usable][exact], values, spread, weight)
    return Correction(theta, covariance, scale, int((~bound).sum()), residuals)


TIME_GROUPS: Mapping[str, tuple[str, ...]] = {
    "compute": ("matmul", "attention", "memory-bound", "recomputation", "expert imbalance", "optimizer"),
    "launches": ("launches", "fixed"),
    "links": (
        "tensor parallel", "sequence exchange", "expert exchange", "data parallel", "parameter gathers",
        "pipeline transfers", "offload",
    ),
    "stalls": ("stalls",),
}  # fmt: skip
"""Terms of the step by group; the bubble is divided in proportion to the terms of a slot."""
NETWORK = "network"
"""A further group: the terms of `links` where they leave the node."""
MEMORY_GROUPS: Mapping[str, tuple[str, ...]] = {
    "static": ("parameters", "gradients", "optimizer", "master", "weight copies", "build", "further"),
    "activations": (
        "gradient copies", "activations", "checkpoints", "recomputation", "logits and loss", "buffers",
        "slack",
    ),
    "overhead": ("context",),
}  # fmt: skip
"""Terms of the peak by group."""
_IN_SLOTS = (
    "matmul",
    "attention",
    "memory-bound",
    "recomputation",
    "launches",
    "tensor parallel",
    "sequence exchange",
    "expert exchange",
    "expert imbalance",
)


def time_names() -> tuple[str, ...]:
    """Names of the columns of `time_groups`."""
    return (*TIME_GROUPS, NETWORK)


def leaves_node(cols: KnobArrays, per_node: int) -> dict[str, np.ndarray]:
    """For each term of `links`: True where its traffic crosses nodes; booleans, shape (n,)."""
    stage = cols.tp * cols.replicas
    return {
        "tensor parallel": cols.tp > per_node,
        "sequence exchange": cols.tp * cols.sequence_ranks > per_node,
        "expert exchange": cols.expert_tp * cols.ep > per_node,
        "data parallel": stage > per_node,
        "parameter gathers": cols.tp * cols.shard_ranks > per_node,
        "pipeline transfers": stage * cols.pp > per_node,
        "offload": np.zeros(len(cols), bool),
    }


def time_groups(time: Mapping[str, np.ndarray], far: Mapping[str, np.ndarray]) -> np.ndarray:
    """Terms summed by group, shape (n, len(time_names())), with the bubble divided in proportion to the terms of a slot."""
    slots = sum(time[name] for name in _IN_SLOTS)
    with np.errstate(divide="ignore", invalid="ignore"):
        stretch = np.where(slots > 0, 1 + time["bubble"] / slots, 1.0)
    stretched = {name: time[name] * (stretch if name in _IN_SLOTS else 1.0) for name in TIME_TERMS if name != "bubble"}
    columns = [
        sum(np.where(far[name], 0.0, stretched[name]) if name in far else stretched[name] for name in names)
        for names in TIME_GROUPS.values()
    ]
    columns.append(sum(np.where(away, stretched[name], 0.0) for name, away in far.items()))
    return np.stack(columns, axis=1)


def memory_groups(memory: Mapping[str, np.ndarray]) -> np.ndarray:
    """Terms summed by group, shape (n, len(MEMORY_GROUPS))."""
    return np.stack([sum(memory[name] for name in names) for names in MEMORY_GROUPS.values()], axis=1)


def corrected_time(
    time: Mapping[str, np.ndarray],
    far: Mapping[str, np.ndarray],
    total: np.ndarray,
    correction: Correction,
    interpolation: Interpolation,
) -> dict[str, np.ndarray]:
    """The corrected terms of the step, `time.NAME` each; the rest of `total` is the bubble."""
    factors = dict(
        zip(time_names(), (interpolation.factor * factor for factor in np.exp(correction.theta)), strict=True)
    )
    corrected = {}
    for group, names in TIME_GROUPS.items():
        for name in names:
            away = far.get(name)
            factor = factors[group] if away is None else np.where(away, factors[NETWORK], factors[group])
            corrected[f"time.{name}"] = time[name] * factor
    with np.errstate(invalid="ignore"):
        bubble = total - sum(corrected.values())
    corrected["time.bubble"] = np.where(np.isfinite(bubble), np.maximum(bubble, 0.0), 0.0)
    return {f"time.{name}": corrected[f"time.{name}"] for name in TIME_TERMS}


def corrected_memory(
    memory: Mapping[str, np.ndarray], correction: Correction, interpolation: Interpolation
) -> dict[str, np.ndarray]:
    """The corrected terms of the peak, `memory.NAME` each."""
    corrected = {}
    for factor, names in zip(np.exp(correction.theta), MEMORY_GROUPS.values(), strict=True):
        for name in names:
            corrected[f"memory.{name}"] = memory[name] * factor * interpolation.factor
    return {f"memory.{name}": corrected[f"memory.{name}"] for name in MEMORY_TERMS}
