"""The effect of each knob on the throughput, separated from the others."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...results.measurement import Trial

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
