"""The main figures of a report: winner, ratio, spread, memory, and the use of the device time."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from ...knobs.lossy import lossy_values
from ...results import summary
from ...results.measurement import Status, Trial

MOST_LANES = 64
"""Devices up to which a timeline draws one lane for each; above it has one lane for each trial."""

RAN = (Status.OK, Status.OOM, Status.TIMEOUT, Status.CRASH, Status.WRONG)
"""Statuses of trials that used device time."""


def headline(trials: Sequence[Trial]) -> dict[str, Any]:
    """Returns the result and the cost of the search, JSON-ready; None where the trials lack the data.

    `exact` is the best trial without lossy values; `exactness` describes its difference from lossy ones. `spread` is
    relative: the half-width of the 95 % interval of a throughput. The device seconds of a trial are its total time
    times its devices (1 where unknown); `lost` are those of trials that did not end as `ok`, `overhead` the time that
    successful ones spent outside build, warm-up and measurement.
    """
    winner, base = summary.best(trials), summary.default(trials)
    exact = summary.best_exact(trials)
    gain = summary.gain(trials)
    return {
        "trials": len(trials),
        "counts": {str(status): count for status, count in summary.counts(trials).items()},
        "unit": next((each.measured.unit for each in trials if each.measured.unit), ""),
        "winner": entry(winner) if winner else None,
        "default": entry(base) if base else None,
        "exact": entry(exact) if exact else None,
        "exactness": summary.exactness(trials),
        "gain": gain and gain.ratio,
        "gain_half_width": gain and gain.half_width,
        "gain_shown": gain is not None and gain.shown,
        "only_default": summary.only_default(trials),
        "failures": summary.failures(trials),
        "why": summary.why_nothing(trials),
        "limit_mib": memory_limit(trials),
        "cost": cost(trials),
    }


def entry(trial: Trial) -> dict[str, Any]:
    """Returns the figures of one trial."""
    found = trial.measured
    return {
        "trial": trial.number,
        "status": str(found.status),
        "throughput": found.throughput,
        "first": trial.first,
        "remeasured": list(trial.remeasured),
        "unconfirmed": found.unconfirmed,
        "spread": found.spread,
        "step_ms": found.step_ms,
        "peak_memory_mib": found.peak_memory_mib,
        "memory_limit_mib": found.memory_limit_mib,
        "mfu": found.mfu,
        "devices": found.devices,
        "config": dict(trial.config),
        "lossy": lossy_values(trial.config, trial.lossy),
    }


def memory_limit(trials: Sequence[Trial]) -> float | None:
    """Returns the memory that a rank could use, MiB: the most common value where trials differ."""
    limits = [each.measured.memory_limit_mib for each in trials if each.measured.memory_limit_mib]
    return max(sorted(set(limits)), key=limits.count) if limits else None


def cost(trials: Sequence[Trial]) -> dict[str, Any] | None:
    """Returns device seconds by status, lost and overhead, and the wall-clock span; None if no trial recorded its time."""
    timed = [each.measured for each in trials if each.measured.status in RAN and each.measured.seconds_total]
    if not timed:
        return None
    seconds = {str(status): 0.0 for status in RAN}
    overhead = 0.0
    for each in timed:
        devices = each.devices or 1
        seconds[each.status] += (each.seconds_total or 0.0) * devices
        if each.ok:
            overhead += (each.seconds_overhead or 0.0) * devices
    spans = [each.span for each in timed if each.span is not None]
    span = max(end for _, end in spans) - min(begin for begin, _ in spans) if spans else None
    total = sum(seconds.values())
    return {
        "device_seconds": total,
        "by_status": seconds,
        "lost": total - seconds[Status.OK],
        "overhead": overhead,
        "wall_seconds": span,
        "timed": len(timed),
    }


def frontier(trials: Sequence[Trial]) -> list[int]:
    """Returns the numbers of the `ok` trials on the Pareto front of throughput and memory, by memory."""
    known = [
        (each.measured.peak_memory_mib, -each.throughput, each.number)
        for each in trials
        if each.ok and each.measured.peak_memory_mib is not None
    ]
    best, kept = -math.inf, []
    for _, slowness, number in sorted(known):
        if -slowness > best:
            best = -slowness
            kept.append(number)
    return kept


def predictions(trials: Sequence[Trial]) -> dict[str, Any]:
    """Returns the accuracy of the predictions of `throughput` and `memory`.

    Each is None or has the count, the median ratio of measured to predicted, the median absolute relative error, and
    Spearman's rank correlation.
    """
    speed = [(each.predicted_throughput, each.throughput) for each in trials if each.ok and each.predicted_throughput]
    memory = [
        (each.predicted_memory_mib, each.measured.peak_memory_mib)
        for each in trials
        if each.measured.status in (Status.OK, Status.OOM)
        and each.predicted_memory_mib
        and each.measured.peak_memory_mib
    ]
    return {"throughput": _agreement(speed), "memory": _agreement(memory)}


def _agreement(pairs: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    pairs = [(predicted, measured) for predicted, measured in pairs if predicted > 0 and measured > 0]
    if not pairs:
        return None
    ratios = [measured / predicted for predicted, measured in pairs]
    return {
        "count": len(pairs),
        "ratio": median(ratios),
        "error": median(abs(predicted - measured) / measured for predicted, measured in pairs),
        "rank_correlation": _spearman(pairs),
    }


def _spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    if len(pairs) < 3:
        return None
    import numpy as np

    ranks = []
    for side in zip(*pairs):
        _, places, ties = np.unique(side, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(ties) - (ties - 1) / 2)[places])
    if any(np.ptp(side) == 0 for side in ranks):
        return None
    first, other = ranks
    return float(np.corrcoef(first, other)[0, 1])


def lanes(trials: Sequence[Trial]) -> dict[str, Any] | None:
    """Returns the times of the trials: `items` of [trial, first lane, lanes, start, end], s from the first start.

    A lane is a device; it is a trial where all trials use the same number of devices, or where more than `MOST_LANES`
    lanes would be needed (see `of`). The table does not record the devices of a trial: each is drawn on the lowest
    lanes that are free at its start. None if no trial recorded its start.
    """
    known = [(*each.measured.span, each) for each in trials if each.measured.span is not None]
    if not known:
        return None
    known.sort(key=lambda each: (each[0], each[2].number))
    origin = known[0][0]
    ran = [(begin - origin, end - origin, each.number) for begin, end, each in known]
    widths = [max(int(each.measured.devices or 1), 1) for _, _, each in known]
    alike = len(set(widths)) == 1 and widths[0] > 1
    by_device = None if alike else _placed(ran, widths, MOST_LANES)
    laid = by_device or _placed(ran, [1] * len(ran), len(ran))
    assert laid is not None, "as many lanes as trials are enough"
    items, count = laid
    return {"lanes": count, "of": "devices" if by_device else "trials", "origin": origin, "items": items}


def _placed(
    ran: Sequence[tuple[float, float, int]], widths: Sequence[int], most: int
) -> tuple[list[list[Any]], int] | None:
    """Returns the trials, given begin, end and number of each, placed on lanes, and the number of lanes.

    None if more than `most` lanes are needed.
    """
    busy: list[float] = []
    items = []
    for (begin, end, number), width in zip(ran, widths):
        # The end of a trial and the start of the next one come from different clocks.
        free = [until <= begin + 0.02 for until in busy]
        first = next((lane for lane in range(len(busy)) if all(free[lane : lane + width])), len(busy))
        if first + width > most:
            return None
        busy += [0.0] * (first + width - len(busy))
        busy[first : first + width] = [end] * width
        items.append([number, first, width, round(begin, 3), round(end, 3)])
    return items, len(busy)
