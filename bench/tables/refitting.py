"""Leave-one-out check: the fitted constants are fitted to all sources but one, which is then predicted.

The free constants are the share of the rate of products that power leaves each generation of devices, the efficiency
of products in 8 bits, of memory, of links and of the network, and the overlap of communication block by block. The
logarithm of a step is linearised in their logarithms around the package's values, which is accurate within the few per
cent that they move; the fit minimises absolute deviations (Huber, 5 %) with equal weight for each source and a prior
at the package's values with an uncertainty of 10 %. The left-out source is then predicted exactly, without
linearisation.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from redline.estimator import Constants
from redline.estimator.hardware import device_name
from redline.estimator.kernels import products_of
from redline.estimator.trainers import find_trainer

from .form import Run
from .judging import Judged, judge
from .reading import Source, read_source

LARGEST = 0.5
"""Logarithm of a ratio above which a row is not used for the constants: a stall, or another convention."""
NEAR, DOUBT, STEP = 0.05, 0.10, 0.05
NOT_FITTED = ("megatron-golden",)
"""Sources that are predicted but not used in the fit, for the reasons in docs/estimator.md."""
OLDER, HOPPER, BLACKWELL = "A100 and older", "H100", "B200"
_GENERATIONS = {"h1": HOPPER, "h2": HOPPER, "b": BLACKWELL, "gb": BLACKWELL}


def generation(run: Run) -> str:
    chip = device_name(run.hardware.name).chip
    return next((found for start, found in _GENERATIONS.items() if chip.startswith(start)), OLDER)


Scales = Mapping[str, float]
"""Factors of the free constants by name; 1 for others."""
LIMITED = {each: f"power, {each}" for each in (OLDER, HOPPER, BLACKWELL)}
FIELDS = {
    "8 bits": "eight_bit_efficiency",
    "8 bits in blocks": "mxfp8_efficiency",
    "4 bits": "nvfp4_efficiency",
    "early kernels": "early_kernels",
    "memory": "bandwidth_efficiency",
    "links": "link_efficiency",
    "network": "network_efficiency",
    "hidden": "sharded_max_overlap",
}
FREE = (*LIMITED.values(), *FIELDS)


def constants_of(scales: Scales) -> Callable[[Run], Constants]:
    """Returns the constants for the prediction of a run."""

    def of(run: Run) -> Constants:
        base = find_trainer(run.framework).constants_on(Constants())
        limited = products_of(run.hardware).sustained * scales.get(LIMITED[generation(run)], 1.0)
        changes = {name: min(getattr(base, name) * scales.get(what, 1.0), 1.0) for what, name in FIELDS.items()}
        return base.replace(limited_rate=min(limited, 1.0), **changes)

    return of


@dataclass
class FittedSource:
    """A source with its information about the constants."""

    source: Source
    judged: Judged
    slopes: np.ndarray = field(default_factory=lambda: np.zeros((0, len(FREE))))
    """Derivatives of the logarithm of each step by that of each constant."""

    @property
    def error(self) -> np.ndarray:
        """Logarithm of predicted over measured."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(self.judged.predicted["step"].to_numpy(float) / self.judged.step)

    @property
    def usable(self) -> np.ndarray:
        found = self.error
        known = np.isfinite(self.slopes).all(axis=1)
        return known & np.isfinite(found) & (np.abs(found) < LARGEST) & ~self.judged.failed


def held(source: Source) -> FittedSource:
    """Predicts a source with the package's constants and with each of them slightly larger."""
    judged = judge(source, constants_of({}))
    # The choice of settings that a source does not state is fixed.
    taken = zip(judged.runs, judged.configs, strict=True)
    settled = Source(
        source.name,
        [replace(run, where=str(at), config=config, choices=()) for at, (run, config) in enumerate(taken)],
    )
    plain = _log_steps(settled, {})
    larger = [_log_steps(settled, {name: float(np.exp(STEP))}) for name in FREE]
    return FittedSource(source, judged, np.stack([(each - plain) / STEP for each in larger], axis=1))


def _log_steps(settled: Source, scales: Scales) -> np.ndarray:
    """Returns the logarithms of predicted steps, in the order of the runs."""
    judged = judge(settled, constants_of(scales))
    at = {run.where: step for run, step in zip(judged.runs, judged.predicted["step"], strict=True)}
    steps = np.array([at.get(run.where, np.nan) for run in settled.runs], float)
    return np.log(np.where(np.isfinite(steps), steps, np.nan))


def fitted(sources: Iterable[FittedSource], without: str | None = None) -> Scales:
    """Returns the factors that predict these sources best, without the rows of a device."""
    from scipy.optimize import minimize

    used = [
        (each, each.usable & (each.judged.groups != without)) for each in sources if each.source.name not in NOT_FITTED
    ]
    some = [(each.error[rows], each.slopes[rows]) for each, rows in used]
    some = [(error, slopes) for error, slopes in some if len(error)]

    def loss(x: np.ndarray) -> float:
        total = float(np.sum((x / DOUBT) ** 2)) * NEAR / 10
        for error, slopes in some:
            left = np.abs(error + slopes @ x)
            total += float(np.mean(np.where(left < NEAR, left**2 / NEAR / 2, left - NEAR / 2)))
        return total

    found = minimize(loss, np.zeros(len(FREE)), method="L-BFGS-B", bounds=[(-0.3, 0.3)] * len(FREE))
    return dict(zip(FREE, np.exp(found.x).tolist(), strict=True))


def by_trainer(folder: Path) -> list[Source]:
    """Returns a folder of tables of configurations as sources, one for each trainer."""
    whole = read_source(folder, folder.name)
    names = dict.fromkeys(run.framework for run in whole.runs)
    return [
        Source(f"{folder.name}: {name}", [run for run in whole.runs if run.framework == name], [], whole.inferred)
        for name in names
    ]


@dataclass(frozen=True)
class LeftOut:
    """A source or a device that is left out of the fit."""

    name: str
    rows: int
    plain: float
    """Median error of time with the package's constants."""
    together: float
    """The same with constants fitted to all sources."""
    out: float
    """The same with constants fitted to all others."""
    bias: float
    """Median of predicted over measured, less 1, with those."""
    cover: float
    """Share of the rows within their 80 % intervals, with those; a device is one without measured runs."""
    scales: Scales
    """Factors of the constants fitted to all others."""


def leave_out(sources: Iterable[Source]) -> tuple[list[LeftOut], Scales]:
    """Returns each source, then each device, predicted with constants fitted to the others, and the factors fitted to all."""
    found = [each for each in map(held, sources) if each.usable.any()]
    whole = fitted(found)
    parts = [(each.source, fitted(other for other in found if other is not each)) for each in found]
    devices = dict.fromkeys(run.hardware.name for each in found for run in each.source.runs if run.step_ms)
    for device in devices:
        runs = [
            replace(run, hardware=run.hardware.replace(measured_runs=0))
            for each in found
            for run in each.source.runs
            if run.hardware.name == device and each.source.name not in NOT_FITTED
        ]
        if runs:
            parts.append((Source(device, runs), fitted(found, without=device)))
    out = []
    for source, scales in parts:
        errors = [judge(source, constants_of(some)).errors() for some in ({}, whole, scales)]
        medians = [error["time_median"] for error in errors]
        last = errors[-1]
        out.append(
            LeftOut(source.name, int(last["time_rows"]), *medians, last["time_bias"], last["time_cover"], scales)
        )
    return out, whole
