"""Summaries of trials: of the measurements of one, and of a study with its winner, ties, gain and failures."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev

from ..knobs import lossy
from .columns import number, speed
from .measurement import DEFAULT, Measurement, Status, Trial

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


EQUAL = 0.01
"""Relative difference within which two throughputs count as equal."""
NOISE = 0.02
"""Relative difference beyond which two throughputs are never tied, whatever the spread of their measurements."""
WORTH_HAVING = 0.02
"""Difference in the share of free memory that decides between tied trials."""


def leaders(trials: Sequence[Trial], count: int | None = None) -> list[Trial]:
    """Returns the `ok` trials, best first, at most `count` of them.

    Trials that were measured again come before the others, since they led and are confirmed. Among those `tied` with
    the fastest, the one that leaves more memory free is first, then the one closest to the default configuration.
    Among equal ones the earlier is first.
    """
    successes = [trial for trial in trials if trial.ok]
    successes.sort(key=lambda trial: (not trial.remeasured, *_slowness(trial)))
    equal = _tied(successes)
    if equal:
        most = max(_room(trial) for trial in equal)
        base = default(trials)
        roomy = [trial for trial in equal if _room(trial) >= most - WORTH_HAVING]
        winner = min(roomy, key=lambda trial: _distance(trial, base))
        successes.remove(winner)
        successes.insert(0, winner)
    return successes[:count]


def tied(trials: Sequence[Trial]) -> list[Trial]:
    """Returns the re-measured trials that cannot be distinguished from the winner; empty if it is ahead."""
    winner = best(trials)
    successes = sorted((trial for trial in trials if trial.ok and trial.remeasured), key=_slowness)
    return [trial for trial in _tied(successes) if trial is not winner]


def _slowness(trial: Trial) -> tuple[float, int]:
    return -trial.throughput, trial.number


def _tied(successes: Sequence[Trial]) -> list[Trial]:
    """Returns the first trial and those tied with it; empty if it was not measured again."""
    return [trial for trial in successes if _ties(trial, successes[0])] if successes and successes[0].remeasured else []


def _distance(trial: Trial, base: Trial | None) -> int:
    """Returns the number of knobs in which a trial differs from the default configuration."""
    if base is None:
        return 0
    names = {*trial.config, *base.config}
    return sum(trial.config.get(name) != base.config.get(name) for name in names)


def _ties(trial: Trial, leader: Trial) -> bool:
    """True if both throughputs count as equal, or their re-measurements overlap and differ by at most `NOISE`."""
    if trial is leader:
        return True
    if len(trial.remeasured) < 2 or len(leader.remeasured) < 2:
        return False
    if not leader.throughput:
        return False
    ratio = trial.throughput / leader.throughput
    if ratio >= 1 - EQUAL:
        return True
    low, high = median_rank(len(leader.remeasured)), -1 - median_rank(len(trial.remeasured))
    return ratio >= 1 - NOISE and sorted(trial.remeasured)[high] >= sorted(leader.remeasured)[low]


def _room(trial: Trial) -> float:
    """Returns the share of memory that a trial left free; 0 if unknown."""
    peak, limit = trial.measured.peak_memory_mib, trial.measured.memory_limit_mib
    return 1.0 - peak / limit if peak and limit else 0.0


def best(trials: Sequence[Trial]) -> Trial | None:
    """Returns the winner; None if no trial succeeded and was confirmed."""
    return next(iter(leaders(trials, 1)), None)


def best_exact(trials: Sequence[Trial]) -> Trial | None:
    """Returns the best trial without a lossy value; None if none succeeded and was confirmed."""
    return best([trial for trial in trials if not trial.lossy])


def exactness(trials: Sequence[Trial]) -> str:
    """Returns the label of the trials without a lossy value; empty if no trial has one."""
    return lossy.exactness(name for trial in trials for name in trial.lossy)


def default(trials: Sequence[Trial]) -> Trial | None:
    """Returns the first trial of the default configuration; None if there is none."""
    return next((trial for trial in trials if trial.sampler == DEFAULT), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """The winner's throughput over the default configuration's, with its 95 % interval."""

    ratio: float
    half_width: float | None
    """Half-width of the ratio's interval; None if a throughput has no interval, or both belong to the same trial."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Lower and upper end."""
        return None if self.half_width is None else (self.ratio - self.half_width, self.ratio + self.half_width)

    @property
    def shown(self) -> bool:
        """True if the measurements show a gain: the interval, if there is one, is above 1."""
        return self.ratio - (self.half_width or 0.0) > 1

    def __str__(self) -> str:
        if self.half_width is None:
            return f"{self.ratio:.2f}x"
        ratio_text = f"{self.ratio:.2f}x ± {self.half_width:.2f}"
        return ratio_text if self.shown else f"no measurable gain ({ratio_text})"


def gain(trials: Sequence[Trial]) -> Gain | None:
    """Returns the winner's gain over the default configuration; None if either has no throughput, or the default's is
    not positive, as a callable may return.
    """
    winner, base = best(trials), default(trials)
    if winner is None or base is None or not base.ok or base.throughput <= 0:
        return None
    ratio = winner.throughput / base.throughput
    winner_spread, base_spread = winner.measured.spread, base.measured.spread
    if winner is base or winner_spread is None or base_spread is None:
        return Gain(ratio=ratio, half_width=None)
    # The relative error of a ratio is the root of the sum of squares.
    return Gain(ratio=ratio, half_width=ratio * math.hypot(winner_spread, base_spread))


def only_default(trials: Sequence[Trial]) -> str | None:
    """Returns the reason why only the default configuration succeeded; None if other trials succeeded."""
    ran = [trial for trial in trials if not trial.pending and not trial.skipped]
    if not ran or any(trial.ok and trial.sampler != DEFAULT for trial in ran):
        return None
    if all(trial.sampler == DEFAULT for trial in ran):
        return "only the default configuration was tried"
    return "every other trial failed"


def failures(trials: Sequence[Trial]) -> str:
    """Returns the number of trials of each status and the reason of the first failure; empty if none failed.

    The first failure is the first one that is not `oom`, if there is one, since `oom` is expected in a search.
    """
    by_status = counts(trials)
    failed = [
        trial for trial in trials if not trial.pending and trial.measured.status not in (Status.OK, Status.SKIPPED)
    ]
    if not failed:
        return ""
    failure = next((trial for trial in failed if trial.measured.status is not Status.OOM), failed[0])
    listing = ", ".join(f"{count} {status}" for status, count in by_status.items() if count)
    reason = failure.measured.reason.strip()
    return f"{listing}; trial {failure.number} ended as {failure.measured.status}{f': {reason}' if reason else ''}"


def counts(trials: Sequence[Trial]) -> dict[Status, int]:
    """Returns the number of finished trials of each status, in the enum's order."""
    by_status = Counter(trial.measured.status for trial in trials if not trial.pending)
    return {status: by_status[status] for status in Status}


def best_so_far(trials: Sequence[Trial]) -> list[float | None]:
    """Returns for each finished trial, by number, the highest throughput up to and including it; None before the
    first success.
    """
    series: list[float | None] = []
    top: float | None = None
    for trial in trials:
        if trial.pending:
            continue
        if trial.ok and (top is None or trial.throughput > top):
            top = trial.throughput
        series.append(top)
    return series


def smallest_need(trials: Sequence[Trial]) -> Trial | None:
    """Returns the trial that needed the least memory among those that ran out of it, emulated ones included; None if no
    need is known.
    """
    by_need = {
        trial.measured.peak_memory_mib: trial
        for trial in reversed(trials)
        if not trial.pending and trial.measured.did_not_fit and trial.measured.peak_memory_mib is not None
    }
    return by_need[min(by_need)] if by_need else None


def fails_everywhere(trials: Sequence[Trial]) -> str | None:
    """Returns the reason for which every finished trial crashed, with the first one's log; None if they ended otherwise."""
    finished = [trial.measured for trial in trials if not trial.pending]
    reasons = {outcome.reason.strip() for outcome in finished if outcome.status is Status.CRASH}
    if len(finished) < 2 or len(reasons) != 1 or any(outcome.status is not Status.CRASH for outcome in finished):
        return None
    return f"{reasons.pop()}{f' ({log})' if (log := finished[0].log) else ''}"


def why_nothing(trials: Sequence[Trial]) -> str:
    """Returns the reason why there is no winner; empty if there is one.

    Includes the smallest memory need and the most common reason of other failures.
    """
    if best(trials) is not None:
        return ""
    finished = [trial for trial in trials if not trial.pending]
    if not finished:
        return "no trial has finished"
    again = [trial.measured for trial in finished if trial.first is not None]
    if again:
        logs = list(dict.fromkeys(measurement.log for measurement in again if measurement.log))
        logs_note = f"; {' and '.join(logs)} {'have' if len(logs) > 1 else 'has'} the details" if logs else ""
        return f"every trial that succeeded failed when it was measured again{logs_note}"
    by_status = counts(finished)
    listing = ", ".join(f"{count} {status}" for status, count in by_status.items() if count)
    sentences = [f"none of {len(finished)} trials succeeded: {listing}."]
    need = smallest_need(finished)
    if need is not None and need.measured.peak_memory_mib is not None:
        sentences.append(f"The smallest need seen is {_mib(need.measured.peak_memory_mib)} (trial {need.number}).")
        if need.measured.memory_limit_mib is not None:
            sentences.append(f"The limit is {_mib(need.measured.memory_limit_mib)}.")
    explained = {Status.OOM, Status.SKIPPED} if need is not None else set()
    reasons = Counter(
        f"{trial.measured.status}: {trial.measured.reason.strip()}"
        for trial in finished
        if trial.measured.status not in explained and trial.measured.reason.strip()
    )
    if reasons:
        reason, times = reasons.most_common(1)[0]
        sentences.append(f"Most common{f' ({times} times)' if times > 1 else ''}: {reason}")
    return " ".join(sentences)


def _mib(value: float) -> str:
    return f"{number(value, 5)} MiB"
