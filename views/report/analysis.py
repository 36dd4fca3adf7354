"""The figures of a report: winner, ratio, spread, memory, the use of the device time, and the effect of each knob."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ...base.reading import tail_inside
from ...knobs.lossy import lossy_values
from ...results import summary
from ...results.columns import fold
from ...results.measurement import Status, Trial

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
        "unit": next((trial.measured.unit for trial in trials if trial.measured.unit), ""),
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
    measurement = trial.measured
    return {
        "trial": trial.number,
        "status": str(measurement.status),
        "throughput": measurement.throughput,
        "first": trial.first,
        "remeasured": list(trial.remeasured),
        "unconfirmed": measurement.unconfirmed,
        "spread": measurement.spread,
        "step_ms": measurement.step_ms,
        "peak_memory_mib": measurement.peak_memory_mib,
        "memory_limit_mib": measurement.memory_limit_mib,
        "mfu": measurement.mfu,
        "devices": measurement.devices,
        "config": dict(trial.config),
        "lossy": lossy_values(trial.config, trial.lossy),
    }


def memory_limit(trials: Sequence[Trial]) -> float | None:
    """Returns the memory that a rank could use, MiB: the most common value where trials differ."""
    limits = [trial.measured.memory_limit_mib for trial in trials if trial.measured.memory_limit_mib]
    return max(sorted(set(limits)), key=limits.count) if limits else None


def cost(trials: Sequence[Trial]) -> dict[str, Any] | None:
    """Returns device seconds by status, lost and overhead, and the wall-clock span; None if no trial recorded its time."""
    timed = [trial.measured for trial in trials if trial.measured.status in RAN and trial.measured.seconds_total]
    if not timed:
        return None
    seconds = {str(status): 0.0 for status in RAN}
    overhead = 0.0
    for measurement in timed:
        devices = measurement.devices or 1
        seconds[measurement.status] += (measurement.seconds_total or 0.0) * devices
        if measurement.ok:
            overhead += (measurement.seconds_overhead or 0.0) * devices
    spans = [measurement.span for measurement in timed if measurement.span is not None]
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
    points = [
        (trial.measured.peak_memory_mib, -trial.throughput, trial.number)
        for trial in trials
        if trial.ok and trial.measured.peak_memory_mib is not None
    ]
    best, front = -math.inf, []
    for _, slowness, number in sorted(points):
        if -slowness > best:
            best = -slowness
            front.append(number)
    return front


def predictions(trials: Sequence[Trial]) -> dict[str, Any]:
    """Returns the accuracy of the predictions of `throughput` and `memory`.

    Each is None or has the count, the median ratio of measured to predicted, the median absolute relative error, and
    Spearman's rank correlation.
    """
    speed = [
        (trial.predicted_throughput, trial.throughput) for trial in trials if trial.ok and trial.predicted_throughput
    ]
    memory = [
        (trial.predicted_memory_mib, trial.measured.peak_memory_mib)
        for trial in trials
        if trial.measured.status in (Status.OK, Status.OOM)
        and trial.predicted_memory_mib
        and trial.measured.peak_memory_mib
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
    import pandas

    correlation = float(pandas.DataFrame(pairs).rank().corr().iloc[0, 1])  # NaN if one side is constant
    return None if math.isnan(correlation) else correlation


LINES = 12
"""Largest number of lines of a log that are shown."""

GROUPS = 40
"""Largest number of groups that are shown with a log; further groups only have the number of trials."""

_TAIL_BYTES = 16 * 1024  # holds a traceback and what led to it
_RANK = re.compile(r"rank (\d+):")
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+(?:[.,]\d+)*")


def failures(trials: Sequence[Trial], folder: Path | None) -> list[dict[str, Any]]:
    """Returns groups of the trials that are not `ok`, largest first within a status, `skipped` last.

    Reasons that differ only in numbers belong to one group. An entry has `status`, `reason` (that of its last trial),
    `alike` (true if others differ) and `trials`. The last lines of a log come from its last trial with one (lines of
    the rank that its reason names, if any): `log`, `log_trial`, `log_path`, or `log_why` if it has none.

    Args:
        trials: finished trials.
        folder: the folder of the run, from which logs are read; None for no logs.
    """
    groups: dict[tuple[Status, str], list[Trial]] = {}
    for trial in trials:
        if trial.ok:
            continue
        reason = fold(trial.measured.reason)
        groups.setdefault((trial.measured.status, _VARYING.sub("#", reason)), []).append(trial)
    order = sorted(groups, key=lambda key: (key[0] is Status.SKIPPED, -len(groups[key]), groups[key][0].number))
    described_groups = []
    for place, key in enumerate(order):
        members = groups[key]
        reasons = {fold(trial.measured.reason) for trial in members}
        described = {
            "status": str(key[0]),
            "reason": fold(members[-1].measured.reason),
            "alike": len(reasons) > 1,
            "trials": [trial.number for trial in members],
        }
        if key[0] is not Status.SKIPPED and folder is not None and place < GROUPS:
            described |= _log(members, folder)
        described_groups.append(described)
    return described_groups


def _log(members: Sequence[Trial], folder: Path) -> dict[str, Any]:
    logged = [trial for trial in members if trial.measured.log]
    if not logged:
        return {"log_why": "no log is recorded"}
    latest = logged[-1]
    log_entry = {"log_trial": latest.number, "log_path": latest.measured.log}
    try:
        tail, _ = tail_inside(folder.resolve(), latest.measured.log, at_most=_TAIL_BYTES)
    except OSError as error:
        return log_entry | {"log_why": f"its log cannot be shown: {error.strerror or error}"}
    lines = [line.rstrip() for line in tail.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    # The last output of other ranks only shows how they noticed the failure.
    rank = _RANK.match(latest.measured.reason)
    lines = [line for line in lines if rank and line.startswith(f"[rank {rank[1]}]")] or lines
    if not lines:
        return log_entry | {"log_why": "it printed nothing"}
    return log_entry | {"log": "\n".join(line[:400] for line in lines[-LINES:])}


MANY = 12
"""Number of numeric values of a knob above which neighbours are grouped."""


def effects(trials: Sequence[Trial], knobs: Mapping[str, Sequence[Any] | None]) -> dict[str, Any]:
    """Returns main effects and importance of the knobs over the `ok` trials, JSON-ready.

    Log throughput is fitted as a sum of one term for each value of each knob, by ridge regression with penalty 1.
    `explained` is the share of the variance of log throughput that the fit explains, with each trial predicted from
    the others (leave-one-out, so that it is not too high with few trials). The `importance` of a knob is its part of
    that, in proportion to the variance of its own terms. Both are None without a fit.

    Each entry of `knobs`, most important first, has `name` and `values`. A value has a label, the number of its trials
    by status, the `low`, `median`, `high` (quartiles), `min` and `max` of its measured throughputs, and `effect`: the
    factor on the throughput with the other knobs held equal, with `effect_low` and `effect_high` one standard error
    away.

    Args:
        trials: finished trials.
        knobs: the knobs to separate, with their values in order where that is known; without derived ones, which
            depend on the others.
    """
    import numpy as np

    good = [trial for trial in trials if trial.ok and trial.throughput > 0]
    speeds = np.array([trial.throughput for trial in good], dtype=float)
    described: list[dict[str, Any]] = []
    blocks: list[Any] = []
    for name, declared in knobs.items():
        labels, group_of = _groups(name, trials, declared or ())
        if len(labels) < 2:
            continue
        groups = np.array([group_of[trial.number] for trial in good], dtype=int)
        counts: list[Counter[str]] = [Counter() for _ in labels]
        for trial in trials:
            counts[group_of[trial.number]][str(trial.measured.status)] += 1
        values = [
            {"label": label, "counts": dict(counts[index])} | _quartiles(speeds[groups == index])
            for index, label in enumerate(labels)
        ]
        described.append({"name": name, "importance": None, "values": values})
        blocks.append(np.eye(len(labels))[groups] if len(good) else np.zeros((0, len(labels))))
    explained = _fit(described, blocks, np.log(speeds)) if described and len(good) >= 3 else None
    described.sort(key=lambda knob: -(knob["importance"] or 0.0))
    return {"count": len(good), "explained": explained, "knobs": described}


def _fit(described: list[dict[str, Any]], blocks: list[Any], y: Any) -> float | None:
    """Fills in effects and importances; returns the explained share of the variance."""
    import numpy as np

    count = len(y)
    total = float(((y - y.mean()) ** 2).sum())
    if total <= 1e-18:  # all throughputs are equal, apart from rounding
        return None
    # The columns are centred so that the mean is not penalised.
    x = np.concatenate(blocks, axis=1)
    x = x - x.mean(axis=0)
    gram = x.T @ x
    inverse = np.linalg.inv(gram + np.eye(len(gram)))
    terms = inverse @ (x.T @ (y - y.mean()))
    residual = y - y.mean() - x @ terms
    leverage = np.einsum("ij,jk,ik->i", x, inverse, x) + 1 / count  # 1 / count: of the mean, which is fitted too
    left_out = residual / np.maximum(1 - leverage, 1e-9)
    # The total is that of predictions by the mean of the other trials.
    explained = 1 - float((left_out**2).sum()) / (total * (count / (count - 1)) ** 2)
    freedom = max(count - 1 - float(np.trace(inverse @ gram)), 1.0)
    covariance = inverse @ gram @ inverse * (float((residual**2).sum()) / freedom)
    variances, begin = [], 0
    for knob, block in zip(described, blocks):
        end = begin + block.shape[1]
        share = block.mean(axis=0)
        effect = terms[begin:end] - share @ terms[begin:end]
        variances.append(float(share @ effect**2))
        for index, value in enumerate(knob["values"]):
            if not block[:, index].any():
                continue
            # The error of the distance of a value from the mean of the knob.
            against = np.eye(end - begin)[index] - share
            error = math.sqrt(max(float(against @ covariance[begin:end, begin:end] @ against), 0.0))
            value["effect"] = math.exp(effect[index])
            value["effect_low"] = math.exp(effect[index] - error)
            value["effect_high"] = math.exp(effect[index] + error)
        begin = end
    if explained <= 0 or sum(variances) <= 0:
        return 0.0
    for knob, variance in zip(described, variances):
        knob["importance"] = explained * variance / sum(variances)
    return explained


def _groups(name: str, trials: Sequence[Trial], declared: Sequence[Any]) -> tuple[list[str], dict[int, int]]:
    """Returns the labels of the values of a knob in order, and the index of the label of each trial."""
    value_of = {trial.number: trial.config.get(name) for trial in trials}
    values = sorted(set(value_of.values()) - {None}, key=_order)
    numeric = values and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    if not numeric:
        values.sort(key=lambda value: declared.index(value) if value in declared else len(declared))
    labels, of_value = [_label(value) for value in values], {value: index for index, value in enumerate(values)}
    if numeric and len(values) > MANY:
        bins = 8
        of_value = {value: index * bins // len(values) for index, value in enumerate(values)}
        members = [[value for value in values if of_value[value] == bin_index] for bin_index in range(bins)]
        labels = [
            f"{_label(group[0])} to {_label(group[-1])}" if len(group) > 1 else _label(group[0]) for group in members
        ]
    if None in value_of.values():
        of_value[None] = len(labels)
        labels = [*labels, "not set"]
    return labels, {number: of_value[value] for number, value in value_of.items()}


def _order(value: Any) -> tuple[int, Any]:
    return (1, value) if isinstance(value, str) else (0, value)


def _label(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _quartiles(values: Any) -> dict[str, float]:
    import numpy as np

    if not len(values):
        return {}
    names = ("min", "low", "median", "high", "max")
    return {name: float(percentile) for name, percentile in zip(names, np.percentile(values, (0, 25, 50, 75, 100)))}
