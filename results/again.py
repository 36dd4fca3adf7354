"""Combination of a trial's first measurement and its re-measurements into one result."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median, stdev

from .columns import speed
from .measurement import Measurement, Status, Trial

Z95 = 1.959963984540054
"""Half-width of a 95 % interval of a normal distribution, in standard errors."""
MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, for normal noise and many values."""
PRIOR_DEGREES = 4.0
"""Degrees of freedom of the first measurement's variance as the prior for that of the re-measurements."""


def median_rank(n: int) -> int:
    """Returns the index, from 0, among n sorted values at which the 95 % confidence interval of the median starts; it
    ends at the mirrored index.

    By the binomial distribution, from 100 values on its normal approximation (Conover, Practical Nonparametric
    Statistics, 3.2). Below six values no interval reaches 95 %, and 0 selects all of them.
    """
    if n < 6:
        return 0
    if n >= 100:
        return math.floor((n - 1 - Z95 * math.sqrt(n)) / 2)
    tail, rank = 0.0, 0
    while (tail := tail + math.comb(n, rank) * 0.5**n) <= 0.025:
        rank += 1
    return max(0, rank - 1)


def measured_again(
    initial: Measurement, throughputs: Sequence[float], failure: Measurement | None = None
) -> Measurement:
    """Returns a trial's first, successful measurement updated by its re-measurements.

    The throughput becomes their median, and step time, samples and tokens per second, FLOPs and MFU change
    accordingly, and so does the interval. The variance of the re-measurements is moderated by that within
    the first measurement (Smyth 2004, Linear models and empirical Bayes methods, section 3), so that a few that agree
    by chance do not make it too narrow. Memory, losses and times spent are those of `initial`.

    Args:
        initial: the first measurement, an `ok`.
        throughputs: of the re-measurements that completed, in the unit of `initial`.
        failure: the re-measurement that failed, if any; the result then has its status, and no throughput or step time.
            If it has a text in `unconfirmed`, the result is the first measurement with that text.
    """
    if failure is not None and failure.unconfirmed:
        reason = "; ".join(filter(None, [initial.reason, f"unconfirmed: {failure.unconfirmed}"]))
        return replace(initial, reason=reason, unconfirmed=failure.unconfirmed)
    if failure is not None:
        first_speed = speed(initial.reached, initial.unit)
        explanation = f"when measured again: {failure.reason or failure.status}; the first time {first_speed}"
        return replace(
            initial,
            status=failure.status,
            reason=explanation,
            throughput=None,
            samples_per_second=None,
            tokens_per_second=None,
            step_ms=None,
            step_ms_spread=None,
            throughput_spread=None,
            tflops_per_device=None,
            mfu=None,
            # The peak of a success is below the limit, which an `oom` exceeded.
            peak_memory_mib=failure.peak_memory_mib if failure.status is Status.OOM else initial.peak_memory_mib,
            log=failure.log or initial.log,
        )
    if not throughputs:
        return initial
    middle = median(throughputs)
    ratio = middle / initial.throughput if initial.throughput else 1.0
    many = f"{len(throughputs)} re-measurements" if len(throughputs) > 1 else "the re-measurement"
    note = (
        f"{'median of ' if len(throughputs) > 1 else ''}{many}; the first time {speed(initial.reached, initial.unit)}"
    )
    again = replace(
        initial,
        throughput=middle,
        reason=f"{note} ({initial.reason})" if initial.reason else note,
        samples_per_second=_times(initial.samples_per_second, ratio),
        tokens_per_second=_times(initial.tokens_per_second, ratio),
        tflops_per_device=_times(initial.tflops_per_device, ratio),
        mfu=_times(initial.mfu, ratio),
    )
    spread = _spread(throughputs, initial.spread)
    if initial.step_ms is None or ratio == 0:
        return replace(again, throughput_spread=None if spread is None else abs(middle) * spread)
    step_ms = initial.step_ms / ratio
    return replace(again, step_ms=step_ms, step_ms_spread=None if spread is None else step_ms * spread)


def _spread(throughputs: Sequence[float], within: float | None) -> float | None:
    """Returns the relative half-width of the 95 % interval of the median of re-measurements; None if unknown.

    Args:
        throughputs: of the re-measurements.
        within: relative half-width of the 95 % interval of one measurement.
    """
    n = len(throughputs)
    if n < 2 or not fmean(throughputs):
        return within
    error = stdev(throughputs) / abs(fmean(throughputs))
    wider = MEDIAN if n > 2 else 1.0  # of two values both are the same
    if within is None:
        return wider * Z95 * error / math.sqrt(n)
    degrees = n - 1 + PRIOR_DEGREES
    variance = ((n - 1) * error**2 + PRIOR_DEGREES * (within / Z95) ** 2) / degrees
    return wider * t95(degrees) * math.sqrt(variance / n)


def t95(degrees: float) -> float:
    """97.5 % quantile of Student's t, to 1 % from five degrees of freedom on (Abramowitz and Stegun, 26.7.5)."""
    z = Z95
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def _times(value: float | None, ratio: float) -> float | None:
    return None if value is None else value * ratio


def judged(
    trial: Trial,
    throughputs: Sequence[float],
    failure: Measurement | None = None,
    *,
    initial: Measurement | None = None,
) -> Trial:
    """Returns the trial updated by its re-measurements; without any, as it was measured first.

    Args:
        trial: the trial; measured once, unless `initial` is given.
        throughputs: see `measured_again`.
        failure: see `measured_again`.
        initial: its first measurement; None for `trial.measured`.
    """
    initial = initial or trial.measured
    changed = bool(throughputs) or (failure is not None and not failure.unconfirmed)
    return replace(
        trial,
        measurement=measured_again(initial, throughputs, failure),
        remeasured=tuple(throughputs),
        first=initial.throughput if changed else None,
    )
