"""Simulates a cluster: trials return predictions with the noise and the failures of real ones.

The simulation differs from the estimator's prediction, or a search that begins with it would have nothing to learn. A
seed draws a world that is plausible under the estimator: global factors, and effects of single knobs and
configurations, come from the estimator's own uncertainty. Trials of that world scatter as measurements do, run out of
memory if its peak, with some fragmentation, is above the limit, and crash now and then.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import numpy as np

from ...estimator.estimator import Estimator
from ...estimator.knob_arrays import knob_arrays
from ...results import Measurement, Status
from ...space import Config
from ..runner import Runner, TrialRequest

SPREAD = 0.01
"""Standard deviation of the logarithm of a repeated measurement."""
DISTURBED = 0.03
"""Share of measurements that are slowed down by other load."""
CRASHES = 0.015
"""Share of configurations that crash, regardless of memory."""
FRAGMENTATION = 0.02
"""Scale of the memory lost to fragmentation, as a share of the peak."""
JOINT = 0.25
"""Share of the unexplained variance that is an effect of the whole configuration; the rest is additive in the knobs."""
START_S = 20.0
"""Time to start ranks and communicators, s; longer on more devices."""
COMPILE_S = 60.0
"""Time to compile the blocks of a configuration with fusion, s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationTerms:
    """Settings of all trials."""

    devices: int
    """Devices of a trial."""
    seed: int = 0
    """Seed of the world, its noise and its failures."""
    timeout_s: float | None = None
    """Deadline of a trial in simulated time, s; None for none."""
    measure_s: float = 3.0
    """Time to measure a candidate's steps, s."""
    begun: float | None = None
    """Unix time on the cluster's clock at which its first trial can start, s; None for now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phases:
    """Durations of the phases of a trial, s."""

    start: float
    build: float
    warmup: float
    measure: float

    @property
    def total(self) -> float:
        return sum((self.start, self.build, self.warmup, self.measure))


@dataclass
class SimulateRunner(Runner):
    """Returns measurements in a drawn world. The same seed gives the same results in any order.

    `started` and `seconds_*` of a measurement are those of the simulated cluster: a trial starts when one of the
    `slots` concurrent trials has ended. A result takes milliseconds.
    """

    estimator: Estimator
    terms: SimulationTerms
    slots: int = 1
    repeats: Counter[Config] = field(default_factory=Counter, repr=False)
    """Number of earlier measurements of each configuration: the noise of another one is drawn by it."""
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)

    name = "simulate"

    def __post_init__(self) -> None:
        self._world = self.estimator.sampled(self._random("world"))
        start = time.time() if self.terms.begun is None else self.terms.begun
        self._free_at = [start] * self.slots

    def run(self, request: TrialRequest) -> Measurement:
        """Returns the measurement of one trial in the drawn world."""
        with self._lock:
            self.repeats[request.config] += 1
            repeat = self.repeats[request.config]
        measured = self._outcome(request, repeat)
        return replace(measured, started=self._take(measured.seconds_total or 0.0))

    def _take(self, seconds: float) -> float:
        """Reserves the slot that is free first for `seconds` and returns when the trial starts."""
        with self._lock:
            slot = min(range(self.slots), key=self._free_at.__getitem__)
            started = self._free_at[slot]
            self._free_at[slot] = started + seconds
        return started

    def _outcome(self, request: TrialRequest, repeat: int) -> Measurement:
        """Returns the measurement when a configuration is tried for the `repeat`-th time, without its start."""
        config = request.config
        table = self._world.table([config])
        if not np.isfinite(table.step_ms[0]):
            return self._failed(request, Status.CRASH, "more pipeline stages than blocks", 0.0)
        estimate = table.row(0)
        constants = self.estimator.constants
        peak = float(table.fullest_memory_mib[0]) * np.exp(self._unexplained(config, "memory", constants.memory_noise))
        step = estimate.step_ms * np.exp(self._unexplained(config, "time", constants.time_noise))
        random = self._random("trial", config.id, repeat)
        measured_ms = step * float(np.exp(random.normal(0.0, SPREAD)))
        if random.random() < DISTURBED:
            measured_ms *= 1 + random.exponential(0.1)
        # Without the repeat: a configuration that runs out of memory or crashes does so every time.
        chance = self._random("failures", config.id)
        needed = peak * (1 + FRAGMENTATION * abs(chance.normal()))
        phases = self._phases(config, step)
        limit = estimate.memory_limit_mib
        if needed > limit:
            reason = f"out of memory: {needed:,.0f} MiB are needed, but {limit:,.0f} MiB are available"
            seconds = replace(phases, warmup=step / 1e3, measure=0.0).total
            failed = self._failed(request, Status.OOM, reason, seconds)
            return replace(failed, peak_memory_mib=needed, memory_limit_mib=limit)
        total = phases.total
        if chance.random() < CRASHES:
            return self._failed(request, Status.CRASH, "a rank was lost", total)
        compiling = _compile_s(config)
        if self.terms.timeout_s is not None and total - compiling > self.terms.timeout_s:
            reason = f"longer than the deadline of {self.terms.timeout_s:g} s: {total - compiling:,.0f} s"
            return self._failed(request, Status.TIMEOUT, reason, self.terms.timeout_s + compiling)
        cols = knob_arrays([config], self.estimator.training)
        samples = int(cols.micro_batch[0] * cols.grad_accum[0] * cols.dp[0])
        rate, unit = estimate.throughput * estimate.step_ms / measured_ms, estimate.unit
        mfu = estimate.mfu * estimate.step_ms / measured_ms
        peak_rate = self.estimator.hardware.rate(str(cols.precision[0]))
        self._log(request, "ran", estimate.breakdown)
        return Measurement(
            status=Status.OK,
            throughput=rate,
            unit=unit,
            samples_per_second=samples / (measured_ms * 1e-3),
            tokens_per_second=rate if unit == "tokens/s" else None,
            step_ms=measured_ms,
            step_ms_spread=1.96 * SPREAD * measured_ms / 3,
            tflops_per_device=mfu * peak_rate / 1e12,
            mfu=mfu,
            devices=self.terms.devices,
            samples_per_step=samples,
            seconds_total=total,
            seconds_overhead=phases.start,
            seconds_build=phases.build,
            seconds_warmup=phases.warmup,
            seconds_measure=phases.measure,
            log=request.log_name,
            peak_memory_mib=peak,
            memory_limit_mib=limit,
        )

    def _phases(self, config: Mapping[str, Any], step_ms: float) -> _Phases:
        """Returns the durations of a trial's phases."""
        ranks = np.log2(max(self.terms.devices, 2))
        return _Phases(
            start=START_S + 2.0 * ranks,
            build=5.0 + ranks + _compile_s(config),
            warmup=5 * step_ms / 1e3,
            measure=max(3 * step_ms / 1e3, self.terms.measure_s),
        )

    def _failed(self, request: TrialRequest, status: Status, reason: str, seconds: float) -> Measurement:
        self._log(request, f"{status}: {reason}", {})
        return Measurement(
            status=status,
            reason=f"simulated: {reason}",
            devices=self.terms.devices,
            seconds_total=seconds,
            log=request.log_name,
        )

    def _unexplained(self, config: Mapping[str, Any], quantity: str, noise: float) -> float:
        """Returns the effect of knobs and configuration that the estimator does not model, as a logarithm."""
        # dp and grad_accum follow from the other knobs.
        knobs = [(name, value) for name, value in config.items() if name not in ("dp", "grad_accum")]
        deviation = noise * np.sqrt((1 - JOINT) / max(1, len(knobs)))
        additive = sum(self._random(quantity, name, value).normal(0.0, deviation) for name, value in knobs)
        joint = self._random(quantity, *sorted(map(str, config.items()))).normal(0.0, noise * np.sqrt(JOINT))
        return float(additive + joint)

    def _random(self, *key: Any) -> np.random.Generator:
        seed = "|".join(map(str, (self.terms.seed, *key)))
        return np.random.default_rng(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8]))

    def _log(self, request: TrialRequest, outcome: str, breakdown: Mapping[str, float]) -> None:
        if request.log is None:
            return
        lines = [f"simulated, nothing was run: {dict(request.config)}", outcome]
        lines += [
            f"{name}: {value:,.3f} {'ms' if name.startswith('time.') else 'MiB'}" for name, value in breakdown.items()
        ]
        request.log.parent.mkdir(parents=True, exist_ok=True)
        request.log.write_text("\n".join(lines) + "\n")


def _compile_s(config: Mapping[str, Any]) -> float:
    return COMPILE_S if config.get("fusion") else 0.0
