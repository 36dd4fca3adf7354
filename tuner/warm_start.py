"""What earlier runs say of this one: how far off the estimate was, not what it was.

Runs on the same devices, of which the estimate can be made again, say first how far off its groups of terms are, which
holds whatever is trained (`Estimator.carrying`), and then what single knobs did beside that. Of others the second is all.

How much each counts begins with how alike it is (`task_similarity`), and the search learns it from its own trials.
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
"""How far off the level may be where the estimate beneath is not held to its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmEstimate:
    """An estimate that earlier runs corrected."""

    throughput: float
    """In the unit of the estimate beneath; without one only ratios mean anything."""
    peak_memory_mib: float | None
    """MiB; None where the estimate beneath has none."""
    fits: bool | None
    """As the estimate beneath has it."""


class WarmStart(Correction):
    """A prior that multiplies an estimate by what earlier trials measured over what was expected of them.

    What was expected is what its run's own estimate says of a trial, or the trial's `predicted_throughput`, or else the
    estimate beneath; without an estimate, its run's mean. So a run at another sequence length, size or number of devices
    says which knobs pay, and by how much; how fast this workload is, and what fits, only its own trials say.

    Args:
        space: of this search.
        taken: what counts of each earlier run, one at least.
        base: the estimate beneath, `prior(config)`; None for none.
        warn: told of what is wrong with the estimate, once.
        calibrated: for each earlier run the estimator of what it trained, calibrated by its trials; None where there
            is none. The estimate beneath is an `Estimator` then.
    """

    def __init__(
        self,
        space: Space,
        taken: Sequence[Transferred],
        base: Callable[[Config], Any] | None = None,
        warn: Callable[[str], None] | None = None,
        calibrated: "Sequence[Estimator | None]" = (),
    ) -> None:
        self._space = space
        self.beneath = base
        self.weight = max(each.weight for each in taken)
        known = [each for each in calibrated if each is not None]
        told: Any = base
        self._base = None if base is None else Prior(told.carrying(known) if known else base, warn=warn)
        self._features = Features(Encoding(space))
        self._weights = np.array([each.weight for each in taken])
        points = np.concatenate([self._features.numeric(each.configs) for each in taken])
        owner = np.repeat(np.arange(len(taken)), [len(each.trials) for each in taken])
        own = calibrated or [None] * len(taken)
        speed, memory = zip(*(self._residuals(*each) for each in zip(taken, own, strict=True)))
        self._speed = Transfer(points, np.concatenate(speed), owner, self._weights)
        self._memory = Transfer(points, np.concatenate(memory), owner, self._weights)

    def __call__(self, config: Config) -> WarmEstimate:
        """The corrected estimate of a configuration of this search's space."""
        table = self.table([config])
        peak, fits = float(table.peak_memory_mib[0]), float(table.probability_fits[0])
        return WarmEstimate(
            throughput=float(table.throughput[0]),
            peak_memory_mib=None if math.isnan(peak) else peak,
            fits=None if math.isnan(fits) else fits >= 0.5,
        )

    def table(self, configs: Sequence[Config]) -> Any:
        """Corrected estimates of many: an object with `throughput`, `peak_memory_mib`, `fullest_memory_mib`,
        `probability_fits` and what is unsure of them (see `samplers.prior`); arrays of shape (n,), effects
        (n, factors).
        """
        at = self._features.numeric(configs)
        parts = self._speed.parts(at)
        speed, memory = np.exp(parts.sum(axis=1)), np.exp(self._memory.parts(at).sum(axis=1))
        # How much a run really counts: a factor that the search finds out.
        unsure = self._weights < 1
        weights = self._weights[unsure]
        effects = parts[:, unsure] * np.sqrt(1 - weights**2) / weights
        if self._base is None:
            unknown = np.full(len(configs), np.nan)
            told = SimpleNamespace(
                throughput=speed, peak_memory_mib=unknown, fullest_memory_mib=unknown, probability_fits=unknown
            )
            own = np.zeros((len(configs), 0))
        else:
            found = self._base.predict(configs)
            told = SimpleNamespace(
                throughput=np.exp(found.log_throughput) * speed,
                peak_memory_mib=np.exp(found.log_memory) * memory,
                fullest_memory_mib=np.exp(found.log_need) * memory,
                probability_fits=found.fits,
                log_throughput_std=np.sqrt(found.log_std**2 + (effects**2).sum(axis=1)),
            )
            own = found.effects
        if effects.shape[1] and not own.shape[1]:
            own = np.full((len(configs), 1), LEVEL)
        told.log_throughput_effects = np.column_stack([own, effects])
        return told

    def _residuals(self, taken: Transferred, own: "Estimator | None") -> tuple[np.ndarray, np.ndarray]:
        """Logs of what was measured over what was expected: throughputs, the run's own mean taken off since
        the level says nothing here, and peak memories; NaN where that is not known; shape (n,) each."""
        trials = taken.trials
        speed = np.log([trial.throughput for trial in trials])
        memory = np.log([trial.measured.peak_memory_mib or math.nan for trial in trials])
        if self._base is None:
            return speed - speed.mean(), np.full(len(trials), np.nan)
        told = np.log([trial.predicted_throughput or math.nan for trial in trials])
        held = np.log([trial.predicted_memory_mib or math.nan for trial in trials])
        if own is not None:
            # What the run stated was corrected by those before it, and by what of these there was then.
            found = own.table([trial.config for trial in trials])
            told, held = np.log(found.throughput), np.log(found.peak_memory_mib)
        elif not np.isfinite(told).all():
            told, held = self._predicted(self._base, taken.configs)
        speed = speed - told
        return speed - (np.nanmean(speed) if np.isfinite(speed).any() else 0.0), memory - held

    def _predicted(self, base: Prior, configs: Sequence[Config]) -> tuple[np.ndarray, np.ndarray]:
        """Log throughput and log memory that the estimate beneath, `base`, states of these, of which only the free
        knobs count; NaN where they are not valid here; shape (n,) each."""
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
