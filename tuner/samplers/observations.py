"""What a model can learn from the trials so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...results import Measurement, Status, Trial
from .encoding import Encoding, stack


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """The trials as arrays, one row each; trials whose configuration the space does not know are left out."""

    codes: np.ndarray
    """Encoded configurations, `int32` of shape (n, knobs)."""
    objective: np.ndarray
    """What is maximised, shape (n,): the log of the throughput; NaN for failed and pending trials."""
    violation: np.ndarray
    """How far a trial was from working, shape (n,): above 0 failed, below 0 worked, NaN pending."""

    @property
    def ok(self) -> np.ndarray:
        """Which trials worked, shape (n,)."""
        return np.isfinite(self.objective)

    @property
    def failed(self) -> np.ndarray:
        """Which trials failed, shape (n,)."""
        return self.violation > 0

    @property
    def pending(self) -> np.ndarray:
        """Which trials have no outcome yet, shape (n,)."""
        return np.isnan(self.violation)

    @property
    def poor(self) -> float:
        """The lower quartile of the objectives: what a model is told of a failure, so that it learns from it.

        The lowest of all would be safer, but what is fastest mostly lies next to what runs out of memory,
        and a model that is told of a cliff keeps away from its edge. `bench/samplers.py` says the same.
        """
        return float(np.nanquantile(self.objective, 0.25))


def observe(encoding: Encoding, trials: Sequence[Trial]) -> Observations:
    """The trials as arrays.

    Where every throughput is positive the objective is its logarithm: twice as fast is worth the same
    everywhere, and the noise of a throughput grows with it. Callables may return zero or less; then the
    throughputs are taken as they are.
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
    """The throughput of a trial that worked, NaN of any other; `ok` without a finite number did not work."""
    if measurement is None or not measurement.ok or measurement.throughput is None:
        return math.nan
    return float(measurement.throughput) if math.isfinite(measurement.throughput) else math.nan


def _violation(measurement: Measurement | None) -> float:
    """log2 of peak memory over the limit where both are known, so that a model sees the wall coming.

    A doubling of the need beyond the limit counts as much as a failure of unknown degree.
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
