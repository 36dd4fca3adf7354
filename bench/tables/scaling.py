"""Accuracy of the predicted curve of scaling: from the runs on the fewest devices to those on more.

Tables of one model on different numbers of devices belong together. The estimate is corrected by `count` runs of the smallest,
as `redline scale` corrects it by the runs that were measured, and predicts the others.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from redline.estimator import Estimator
from redline.estimator.estimate import Z80
from redline.results import Measurement, Status, Trial

from .surfaces import Measured


@dataclass(frozen=True)
class Point:
    """One model on one number of devices."""

    model: str
    devices: int
    measured: float
    """Efficiency of the fastest run, relative to the fastest on the fewest devices."""
    predicted: float
    """The same of the predicted fastest."""
    low: float
    """Lower end of its 80 % interval."""
    high: float
    median: float
    """Median absolute error of the time of all runs."""
    bias: float
    cover: float
    """Share of runs inside the 80 % intervals."""


def points(surfaces: Iterable[Measured], count: int, seeds: int) -> Iterator[Point]:
    """Yields the points of each model with several numbers of devices, as means over seeds."""
    groups: dict[str, dict[int, Measured]] = {}
    for each in surfaces:
        if found := re.fullmatch(r"(.*?)-(\d+)gpu(.*)", each.name):
            groups.setdefault(found[1] + found[3], {})[int(found[2])] = each
    for model, tables in groups.items():
        fewest = min(tables)
        for devices in sorted(tables):
            if devices > fewest:
                found = [
                    _point(model, tables[fewest], fewest, tables[devices], devices, count, at) for at in range(seeds)
                ]
                numbers = {
                    name: float(np.mean([getattr(each, name) for each in found]))
                    for name in ("measured", "predicted", "low", "high", "median", "bias", "cover")
                }
                yield Point(model, devices, **numbers)


def _point(model: str, base: Measured, fewest: int, table: Measured, devices: int, count: int, seed: int) -> Point:
    known = _calibrated(base, count, seed)
    near, far = (
        known.table(base.configs),
        known.on(table.estimator.training, table.estimator.hardware).table(table.configs),
    )
    ok = table.ok & np.isfinite(far.step_ms)
    ratio, std = far.step_ms[ok] / table.step_ms[ok], far.log_throughput_std[ok]
    best, first = int(np.argmax(np.where(ok, far.throughput, 0))), np.argmax(np.where(base.ok, near.throughput, 0))
    predicted = far.throughput[best] / near.throughput[first] * fewest / devices
    wide = float(np.exp(Z80 * far.log_throughput_std[best]))
    return Point(
        model,
        devices,
        measured=_fastest(table) / _fastest(base) * fewest / devices,
        predicted=float(predicted),
        low=float(predicted / wide),
        high=float(predicted * wide),
        median=float(np.median(np.abs(ratio - 1))),
        bias=float(np.median(ratio) - 1),
        cover=float(np.mean(np.abs(np.log(ratio)) <= Z80 * std)),
    )


def _fastest(table: Measured) -> float:
    return float(table.table["throughput"].to_numpy(float)[table.ok].max())


def _calibrated(surface: Measured, count: int, seed: int) -> Estimator:
    """Returns the estimator of a table corrected by some of its runs, including the fastest, as in a search."""
    ok = np.flatnonzero(surface.ok)
    fastest = ok[np.argmax(surface.table["throughput"].to_numpy(float)[ok])]
    chosen = [fastest, *np.random.default_rng(seed).permutation(ok)[: count - 1]]
    rows = surface.configs.to_dict("records")
    return surface.estimator.calibrate(
        Trial(number=at, config=rows[at], measurement=Measurement(status=Status.OK, step_ms=float(surface.step_ms[at])))
        for at in map(int, chosen)
    )
