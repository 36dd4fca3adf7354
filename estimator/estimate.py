"""Estimates of one configuration and of many at once."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Predicted speed and memory of one configuration."""

    step_ms: float
    """Time of one optimizer step, ms."""
    peak_memory_mib: float
    """Peak memory of the fullest rank, MiB, by the same definition as `Measurement.peak_memory_mib`."""
    fits: bool | None
    """True if the peak is within the memory limit; None without a limit."""
    throughput: float
    """Over all devices, in `unit`."""
    unit: str = "tokens/s"
    """`tokens/s`, or `samples/s` if the setup has no sequence length."""
    step_ms_low: float = float("nan")
    """Lower end of the 80 % interval of `step_ms`, ms."""
    step_ms_high: float = float("nan")
    """Upper end of it, ms."""
    memory_low: float = float("nan")
    """Lower end of the 80 % interval of `peak_memory_mib`, MiB."""
    memory_high: float = float("nan")
    """Upper end of it, MiB."""
    probability_fits: float = float("nan")
    """Chance that the peak stays within the limit, 0 to 1."""
    probability_runs: float = float("nan")
    """Chance that a run leaves a measurement: it fits, and no stall of the network ends it."""
    memory_limit_mib: float = float("nan")
    """The limit, MiB; NaN without a limit."""
    mfu: float = float("nan")
    """Model FLOPs utilisation, 0 to 1, at the peak rate of the configuration's precision."""
    breakdown: Mapping[str, float]
    """Parts of the step and of the peak: names that start with `time.` are ms, with `memory.` MiB.

    Times are those of the slowest stage and sum to `step_ms`, memories are those of the fullest rank and sum
    to `peak_memory_mib`.
    """
    binds: str
    """Largest part of the step: `compute`, `memory bandwidth`, `links`, `bubble` or `launches`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateTable:
    """Predictions for many configurations; every array has one entry a configuration, in their order."""

    step_ms: np.ndarray
    """Time of one optimizer step, ms."""
    throughput: np.ndarray
    """Over all devices, in `unit`."""
    peak_memory_mib: np.ndarray
    """Peak memory of the reported rank (`TrainingSetup.reported_rank`), MiB; by default the fullest."""
    fullest_memory_mib: np.ndarray
    """Peak memory of the fullest rank, MiB; it decides if a configuration fits."""
    step_ms_low: np.ndarray
    """Lower end of the 80 % interval of `step_ms`, ms."""
    step_ms_high: np.ndarray
    """Upper end of it, ms: it includes stalls and retries with a chance above a tenth."""
    log_throughput_std: np.ndarray
    """Standard deviation of the natural logarithm of the throughput (and of the step time)."""
    log_throughput_risk: np.ndarray
    """Expected loss of the logarithm of the throughput, compared with `throughput`, by stalls of the network and by the
    allocator's retries: a risk in the interval and in the order of preference. Negative where `throughput` includes a stall.
    """
    log_throughput_effects: np.ndarray
    """Change of the logarithm of the throughput per standard deviation of each calibration factor; shape (n, factors)."""
    log_memory_std: np.ndarray
    """Standard deviation of the natural logarithm of the peak memory."""
    probability_fits: np.ndarray
    """Chance that the peak stays within the limit, 0 to 1; 1 without a limit."""
    probability_runs: np.ndarray
    """Chance that a run leaves a measurement: it fits, and no stall of the network ends it."""
    fits: np.ndarray
    """Booleans: the predicted peak is within the limit."""
    mfu: np.ndarray
    """Model FLOPs utilisation, 0 to 1."""
    breakdown: Mapping[str, np.ndarray]
    """As `Estimate.breakdown`, one array each."""
    binds: np.ndarray
    """As `Estimate.binds`, strings."""
    unit: str = "tokens/s"
    """Unit of `throughput`."""
    memory_limit_mib: float = float("nan")
    """The limit, MiB; NaN without a limit."""

    @property
    def preference(self) -> np.ndarray:
        """Throughput less its risk, by which configurations are ordered; shape (n,)."""
        return self.throughput * np.exp(-self.log_throughput_risk)

    def __len__(self) -> int:
        return len(self.step_ms)

    def row(self, index: int) -> Estimate:
        """The estimate of one configuration.

        80 % intervals are those of a log-normal, the prediction times exp(+-1.2816 standard deviations), widened by risks.
        """
        memory, memory_factor = float(self.peak_memory_mib[index]), float(np.exp(Z80 * self.log_memory_std[index]))
        limited = bool(np.isfinite(self.memory_limit_mib))
        return Estimate(
            **{name: float(getattr(self, name)[index]) for name in _NUMBERS},
            fits=bool(self.fits[index]) if limited else None,
            unit=self.unit,
            memory_low=memory / memory_factor,
            memory_high=memory * memory_factor,
            memory_limit_mib=float(self.memory_limit_mib),
            breakdown={name: float(value[index]) for name, value in self.breakdown.items()},
            binds=str(self.binds[index]),
        )


_NUMBERS = (
    "step_ms", "peak_memory_mib", "throughput", "step_ms_low", "step_ms_high", "probability_fits", "probability_runs", "mfu",
)  # fmt: skip
"""Numbers of an estimate that are those of a row."""
Z80 = 1.2815515655446004
"""Half-width of the central 80 % of a normal distribution, in standard deviations."""


def joined(table: EstimateTable, appended: EstimateTable) -> EstimateTable:
    """The configurations of one table, followed by those of another of the same estimator."""
    arrays: dict[str, Any] = {}
    for field in fields(table):
        values, more = getattr(table, field.name), getattr(appended, field.name)
        if isinstance(values, np.ndarray):
            arrays[field.name] = np.concatenate((values, more))
        elif isinstance(values, Mapping):
            arrays[field.name] = {name: np.concatenate((values[name], more[name])) for name in values}
    return replace(table, **arrays)
