"""Prior from earlier runs: it transfers the errors of their estimates, not their throughputs.

Runs on the same devices whose estimate can be made again first correct the estimator's groups of terms, which does not
depend on the workload (`Estimator.carrying`), and then the effects of single knobs. Other runs only do the latter.

The weight of each run starts from its similarity (`task_similarity`), and the search learns it from its own trials.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import SpaceError
from ..space import Config, Space
from .samplers.encoding import Encoding, Features
from .samplers.prior import Correction, Prior
from .transfer import Transfer, Transferred

if TYPE_CHECKING:
    from ..estimator import Estimator

LEVEL = 2.0
"""Prior deviation of the level if the base estimate does not keep its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmEstimate:
    """An estimate corrected by earlier runs."""

    throughput: float
    """In the unit of the base estimate; without one only ratios are meaningful."""
    peak_memory_mib: float | None
    """None if the base estimate has none."""
    fits: bool | None
    """Value of the base estimate."""


class WarmStart(Correction):
    """A prior that multiplies an estimate by the ratio of measured to expected throughput of earlier trials.

    The expected throughput is that of the earlier run's own estimate, or the trial's `predicted_throughput`, or that
    of the base estimate; without an estimate, the run's mean. A run at another sequence length, size or number of
    devices therefore shows which knobs pay, and by how much; the speed of this workload, and what fits, follow only
    from its own trials.

    Args:
        space: space of this search.
        runs: earlier runs, at least one.
        base: the base estimate, `prior(config)`, or None.
        warn: receives warnings about the estimate, once each.
        calibrated: estimator of each earlier run's workload, calibrated by its trials, or None. The base estimate
            is an `Estimator` then.
    """

    def __init__(
        self,
        space: Space,
        runs: Sequence[Transferred],
        base: Callable[[Config], Any] | None = None,
        warn: Callable[[str], None] | None = None,
        calibrated: "Sequence[Estimator | None]" = (),
    ) -> None:
        self._space = space
        self.base = base
        self.weight = max(each.weight for each in runs)
        known = [each for each in calibrated if each is not None]
        estimator: Any = base
        self._base = None if base is None else Prior(estimator.carrying(known) if known else base, warn=warn)
        self._features = Features(Encoding(space))
        self._weights = np.array([each.weight for each in runs])
        points = np.concatenate([self._features.numeric(each.configs) for each in runs])
        owner = np.repeat(np.arange(len(runs)), [len(each.trials) for each in runs])
        own = calibrated or [None] * len(runs)
        speed, memory = zip(*(self._residuals(*each) for each in zip(runs, own, strict=True)))
        self._speed = Transfer(points, np.concatenate(speed), owner, self._weights)
        self._memory = Transfer(points, np.concatenate(memory), owner, self._weights)

    def __call__(self, config: Config) -> WarmEstimate:
        """Corrected estimate of a configuration of this search's space."""
        table = self.table([config])
        peak, fits = float(table.peak_memory_mib[0]), float(table.probability_fits[0])
        return WarmEstimate(
            throughput=float(table.throughput[0]),
            peak_memory_mib=None if math.isnan(peak) else peak,
            fits=None if math.isnan(fits) else fits >= 0.5,
        )

    def table(self, configs: Sequence[Config]) -> Any:
        """Corrected estimates of many configurations: an object with `throughput`, `peak_memory_mib`,
        `fullest_memory_mib`, `probability_fits` and their uncertainty (see `samplers.prior`); arrays of shape
        (n,), effects (n, factors).
        """
        at = self._features.numeric(configs)
        parts = self._speed.parts(at)
        speed, memory = np.exp(parts.sum(axis=1)), np.exp(self._memory.parts(at).sum(axis=1))
        # The true weight of a run is a factor that the search learns.
        unsure = self._weights < 1
        weights = self._weights[unsure]
        effects = parts[:, unsure] * np.sqrt(1 - weights**2) / weights
        if self._base is None:
            unknown = np.full(len(configs), np.nan)
            corrected = SimpleNamespace(
                throughput=speed, peak_memory_mib=unknown, fullest_memory_mib=unknown, probability_fits=unknown
            )
            own = np.zeros((len(configs), 0))
        else:
            found = self._base.predict(configs)
            corrected = SimpleNamespace(
                throughput=np.exp(found.log_throughput) * speed,
                peak_memory_mib=np.exp(found.log_memory) * memory,
                fullest_memory_mib=np.exp(found.log_need) * memory,
                probability_fits=found.fits,
                log_throughput_std=np.sqrt(found.log_std**2 + (effects**2).sum(axis=1)),
                log_throughput_risk=found.risk,
            )
            own = found.effects
        if effects.shape[1] and not own.shape[1]:
            own = np.full((len(configs), 1), LEVEL)
        corrected.log_throughput_effects = np.column_stack([own, effects])
        return corrected

    def _residuals(self, run: Transferred, own: "Estimator | None") -> tuple[np.ndarray, np.ndarray]:
        """Logs of measured over expected values: throughputs without the run's own mean, since the level is not
        transferred, and peak memories; NaN if unknown; shape (n,) each.
        """
        trials = run.trials
        speed = np.log([trial.throughput for trial in trials])
        memory = np.log([trial.measured.peak_memory_mib or math.nan for trial in trials])
        if self._base is None:
            return speed - speed.mean(), np.full(len(trials), np.nan)
        expected_speed = np.log([trial.predicted_throughput or math.nan for trial in trials])
        expected_memory = np.log([trial.predicted_memory_mib or math.nan for trial in trials])
        if own is not None:
            # The predictions recorded in the run include corrections by the runs before it.
            found = own.table([trial.config for trial in trials])
            expected_speed, expected_memory = np.log(found.throughput), np.log(found.peak_memory_mib)
        elif not np.isfinite(expected_speed).all():
            expected_speed, expected_memory = self._predicted(self._base, run.configs)
        speed = speed - expected_speed
        return speed - (np.nanmean(speed) if np.isfinite(speed).any() else 0.0), memory - expected_memory

    def _predicted(self, base: Prior, configs: Sequence[Config]) -> tuple[np.ndarray, np.ndarray]:
        """Log throughput and log memory of the base estimate, `base`, for the free knobs of these configurations;
        NaN if they are not valid here; shape (n,) each.
        """
        speed, memory = np.full(len(configs), np.nan), np.full(len(configs), np.nan)
        rows, valid = [], []
        for row, config in enumerate(configs):
            with contextlib.suppress(SpaceError):
                free = [knob.name for knob in self._space.free]
                valid.append(self._space.config({name: config[name] for name in free if name in config}))
                rows.append(row)
        if rows:
            found = base.predict(valid)
            speed[rows], memory[rows] = found.log_throughput, found.log_memory
        return speed, memory
