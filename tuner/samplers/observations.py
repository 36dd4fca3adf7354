"""Trials as arrays for models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...results import Measurement, Status, Trial
from .encoding import Encoding, stack


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """Trials as arrays, one row each. Trials whose configuration is not in the space are left out."""

    codes: np.ndarray
    """Encoded configurations, `int32` of shape (n, knobs)."""
    objective: np.ndarray
    """Value to maximise, shape (n,): the log of the throughput; NaN for failed and pending trials."""
    violation: np.ndarray
    """Constraint violation, shape (n,): above 0 for failed trials, below 0 for successful ones, NaN for pending ones."""

    @property
    def ok(self) -> np.ndarray:
        """Mask of successful trials, shape (n,)."""
        return np.isfinite(self.objective)

    @property
    def failed(self) -> np.ndarray:
        """Mask of failed trials, shape (n,)."""
        return self.violation > 0

    @property
    def pending(self) -> np.ndarray:
        """Mask of pending trials, shape (n,)."""
        return np.isnan(self.violation)

    @property
    def poor(self) -> float:
        """Lower quartile of the objectives: the value that models get for a failure.

        The lowest value would be safer, but the fastest configurations are mostly next to those that run out of
        memory, and a model that sees a cliff avoids its edge.
        """
        return float(np.nanquantile(self.objective, 0.25))


def observe(encoding: Encoding, trials: Sequence[Trial]) -> Observations:
    """Converts trials to arrays.

    If every throughput is positive the objective is its logarithm: a factor of two has the same value everywhere, and
    the noise of a throughput grows with it. Callables may return zero or less; then throughputs are used as they are.
    """
    codes, throughputs, violations = [], [], []
    for trial in trials:
        code = encoding.encode(trial.config)
        if code is not None:
            codes.append(code)
            throughputs.append(_throughput(trial.measurement))
            violations.append(_violation(trial.measurement))
    throughput = np.array(throughputs, dtype=np.float64)
    worked = throughput[np.isfinite(throughput)]
    return Observations(
        codes=stack(codes, len(encoding.knobs)),
        objective=np.log(throughput) if (worked > 0).all() else throughput,
        violation=np.array(violations, dtype=np.float64),
    )


def _throughput(measurement: Measurement | None) -> float:
    """Throughput of a successful trial; NaN of any other, and of `ok` without a finite number."""
    if measurement is None or not measurement.ok or measurement.throughput is None:
        return math.nan
    return float(measurement.throughput) if math.isfinite(measurement.throughput) else math.nan


def _violation(measurement: Measurement | None) -> float:
    """log2 of peak memory over the limit if both are known, so that a model sees how close trials are to the limit.

    A need of twice the limit counts as much as a failure of unknown degree.
    """
    if measurement is None:
        return math.nan
    peak, limit = measurement.peak_memory_mib, measurement.memory_limit_mib
    ratio = math.log2(peak / limit) if peak and limit and peak > 0 and limit > 0 else None
    if not math.isnan(_throughput(measurement)):
        return -1.0 if ratio is None else min(max(ratio, -3.0), -0.05)
    if measurement.status is not Status.OOM or ratio is None:
        return 1.0
    return min(max(ratio, 0.25), 3.0)
