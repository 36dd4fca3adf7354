"""The estimator: predicts configurations from model, hardware and training setup."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import UsageError, unknown
from ..knobs.rules import RULES, RuleContext
from .calibration import (
    MEMORY_GROUPS,
    Correction,
    corrected_memory,
    corrected_time,
    fit,
    leaves_node,
    memory_groups,
    time_groups,
    time_names,
)
from .constants import CPU, Constants
from .estimate import Z80, Estimate, EstimateTable
from .facts.derived import modules_of, with_loss, with_modules
from .facts.model_facts import FactsSource, ModelFacts, Variant
from .hardware import Hardware, find_hardware
from .kernels import kinship
from .knob_arrays import KnobArrays, knob_arrays
from .memory import MEMORY_TERMS, peak_memory
from .setup import TrainingSetup
from .stages import divided
from .time import BINDS, SLOW_HOST, TIME_TERMS, stall_chance, stall_seconds, step_time
from .trainers import find_trainer, has_early_kernels, under_facts

if TYPE_CHECKING:
    from ..models.workload import Workload
    from ..results import Trial


ALLOCATED_MIB = 64.0
"""Workspaces of cuBLAS, MiB: the part of the libraries' memory that the allocator counts as allocated."""
_Raw = tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]


class Estimator:
    """Predicts step time and peak memory of configurations, without a device.

    A call with a configuration returns an `Estimate`; `table` predicts many at once; `calibrate` learns from trials.

    Args:
        model: a Workload, the name of a preset (or anything that `redline.workload` takes), `ModelFacts`, a
            `Shape`, or shape numbers by name.
        hardware: a name in `DEVICES`, a YAML file, or `Hardware`.
        training: settings that all configurations share; by default one device.
        constants: replace the efficiencies of the framework.
        framework: the trainer, which sets kernels and conventions; see `estimator.trainers`.

    Raises:
        UsageError: one of these is unknown or impossible.
    """

    def __init__(
        self,
        model: "Workload | str | Path | FactsSource | Mapping[str, Any]",
        hardware: str | Path | Hardware,
        training: TrainingSetup | Mapping[str, Any] | None = None,
        *,
        constants: Constants | None = None,
        framework: str = "redline",
    ) -> None:
        setup = training if isinstance(training, TrainingSetup) else _setup(training or {})
        self.hardware = find_hardware(hardware)
        self.source, setup, self.unit = _source(model, setup, self.hardware)
        self.training = setup
        base = CPU if self.hardware.kind == "cpu" else Constants()
        self._trainer_constants = constants or find_trainer(framework).constants_on(base)
        self.constants = self._constants_of_setup()
        """The constants of the trainer under the facts of the setup."""
        if setup.seq_len is None:
            self.unit = "samples/s"
        self._facts: dict[Variant, ModelFacts] = {}
        self._time = Correction.none(self._time_prior())
        self._memory = Correction.none(self._memory_prior())
        self._context_mib: float | None = None
        self._measured_nodes: float | None = None

    def __call__(self, config: Mapping[str, Any]) -> Estimate:
        """The estimate of one configuration: a mapping of knobs; missing knobs have the setup's values.

        Raises:
            UsageError: a value is impossible, or there are more pipeline stages than blocks.
        """
        table = self.table([config])
        if not np.isfinite(table.step_ms[0]):
            cols = knob_arrays([config], self.training)
            chunks = int(cols.virtual_stages[0])
            name = "pp" if chunks == 1 else "pp * virtual_stages"
            raise UsageError(
                f"configuration {dict(config)}: {name} = {int(cols.pp[0]) * chunks} must be at most the "
                f"number of blocks of the model, {self.facts_of(cols, 0).blocks}"
            )
        return table.row(0)

    def table(self, configs: Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any] | np.ndarray]) -> EstimateTable:
        """Estimates of many configurations: mappings, or one mapping (or DataFrame) of columns.

        Those with more pipeline stages than blocks get infinite time and memory.

        Raises:
            UsageError: a value is impossible; names the first such configuration.
        """
        cols = knob_arrays(configs, self.training)
        return self._tabled(cols, self._raw(cols))

    def _tabled(self, cols: KnobArrays, raw: "_Raw") -> EstimateTable:
        """Estimates from uncorrected terms."""
        from scipy.special import ndtr

        (time, memory, fullest, flops), noise = raw, self.constants.memory_noise
        features = self._features(cols)
        memory_residuals = self._memory.interpolate(features, noise)
        peak, memory_std = self._memory.apply(memory_groups(memory), noise, memory_residuals)
        full, full_std = self._memory.apply(memory_groups(fullest), noise, memory_residuals)
        retries = _retry_chance(fullest, full, full_std, self.memory_limit_mib)
        far = leaves_node(cols, self.hardware.devices_per_node)
        groups = time_groups(time, far)
        time_noise = self._time_noise(cols)
        time_residuals = self._time.interpolate(features, time_noise)
        step, time_std = self._time.apply(groups, time_noise, time_residuals)
        if not self.calibrated:
            # Where the device barely hides the host's launches, a slower host is one that the device waits for.
            time_std = np.hypot(time_std, np.log1p(np.nan_to_num(time[SLOW_HOST] / step)))
        corrected = corrected_time(time, far, step, self._time, time_residuals)
        corrected |= corrected_memory(memory, self._memory, memory_residuals)
        stalls = stall_chance(cols, self.hardware, self.constants)
        with np.errstate(invalid="ignore"):
            smooth = step - corrected["time.stalls"]
            stalled = np.log1p(stall_seconds(cols, self.constants) * 1e3 / smooth)
        # It is unknown if a run stalls: the step is that of the likelier outcome, and the other one is a risk. Retries are always
        # a risk: a run on a full device that is worth choosing does not retry.
        low, high, risk, variance = -Z80 * time_std, Z80 * time_std, np.zeros(len(step)), time_std**2
        retried = np.log(self.constants.retry_factor)
        for chance, cost, charged in (
            (retries, retried, np.zeros(len(step), bool)),
            (stalls, np.nan_to_num(stalled), stalls > 0.5),
        ):
            other_chance = np.where(charged, 1 - chance, chance)
            widening = _beyond(other_chance, cost, time_std)
            low, high = low - np.where(charged, widening, 0.0), high + np.where(charged, 0.0, widening)
            risk += (chance - charged) * cost
            # What is all but certain is no uncertainty: with the square of the cost instead, searches preferred what cannot fit.
            variance += chance * (1 - chance) * cost**2
        samples = cols.micro_batch * cols.grad_accum * cols.dp
        units = samples * (self.training.seq_len or 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            throughput = np.where(np.isfinite(step), units / (step * 1e-3), 0.0)
            devices = cols.tp * cols.pp * cols.replicas
            rate_of = {precision: self.hardware.rate(precision) for precision in set(cols.precision.tolist())}
            rates = np.array([rate_of[precision] for precision in cols.precision.tolist()])
            mfu = throughput * flops / (devices * rates)
        limit = self.memory_limit_mib
        chance = ndtr((np.log(limit) - np.log(np.where(np.isfinite(full), full, 1.0))) / full_std)
        chance = np.where(np.isfinite(full), chance, 0.0)
        kinds = sorted(set(BINDS.values()))
        sums = np.stack(
            [sum(corrected[f"time.{name}"] for name in TIME_TERMS if BINDS[name] == kind) for kind in kinds]
        )
        binds = np.array(kinds, object)[np.argmax(np.nan_to_num(sums, posinf=0.0), axis=0)]
        return EstimateTable(
            step_ms=step,
            throughput=throughput,
            peak_memory_mib=peak,
            fullest_memory_mib=full,
            step_ms_low=step * np.exp(low),
            step_ms_high=step * np.exp(high),
            log_throughput_std=np.sqrt(variance),
            log_throughput_risk=risk,
            log_throughput_effects=-self._time.effects(groups),
            log_memory_std=memory_std,
            probability_fits=chance,
            probability_runs=chance * (1 - self.constants.stall_fatal * stalls),
            fits=full <= limit,
            mfu=mfu,
            breakdown=corrected,
            binds=binds,
            unit=self.unit,
            memory_limit_mib=limit,
        )

    def calibrate(self, trials: "Iterable[Trial]", *, interpolate: bool = True) -> "Estimator":
        """Returns an estimator that is corrected by these trials; this one does not change.

        Successes correct time and memory. Out-of-memory failures are lower bounds of the peak: the limit, or the requested amount
        if known. Other trials are ignored. Pass all trials of a run each time: calibrations do not add up.

        Args:
            trials: of this model on these devices.
            interpolate: True to also correct configurations near the trials by the residuals after the factors.
        """
        finished = [trial for trial in trials if not trial.pending]
        calibrated = self._copy()
        if not finished:
            return calibrated
        calibrated._context_mib = max(
            (rank.outside_mib for trial in finished for rank in trial.measured.ranks if rank.outside_mib is not None),
            default=None,
        )
        ok = [trial for trial in finished if trial.ok]
        timed = [(trial.config, value) for trial in ok if (value := self._step_of(trial)) is not None and value > 0]
        sized = [(trial.config, peak, False) for trial in ok if (peak := trial.measured.peak_memory_mib)]
        for trial in finished:
            if trial.measured.did_not_fit:
                limit = trial.measured.memory_limit_mib
                sized.append((trial.config, max(self.memory_limit_mib if limit is None else limit, 0.0), True))
        prior, noise = self._memory_prior(), self.constants.memory_noise
        calibrated._memory = Correction.none(prior)
        if sized:
            cols = knob_arrays([config for config, _, _ in sized], self.training)
            _, memory, fullest, _ = self._raw(cols)
            bound = np.array([is_bound for _, _, is_bound in sized])
            groups = np.where(bound[:, None], memory_groups(fullest), memory_groups(memory))
            peaks = np.array([value for _, value, _ in sized], float)
            calibrated._memory = fit(groups, peaks, prior, noise, bound, cols.features if interpolate else None)
        prior = self._time_prior()
        calibrated._time = Correction.none(prior)
        if timed:
            cols = knob_arrays([config for config, _ in timed], self.training)
            time, _, _, _ = self._raw(cols)
            groups = time_groups(time, leaves_node(cols, self.hardware.devices_per_node))
            calibrated._measured_nodes = float(self._nodes(cols).max())
            steps = np.array([value for _, value in timed])
            interpolated = cols.features if interpolate else None
            calibrated._time = fit(groups, steps, prior, self._time_noise(cols), features=interpolated)
        return calibrated

    def on(self, training: TrainingSetup, hardware: Hardware) -> "Estimator":
        """An estimator of the same model and calibration for another setup, with the devices of that setup."""
        moved = self._copy()
        moved.training, moved.hardware = training, hardware
        moved.constants = moved._constants_of_setup()
        return moved

    def _copy(self) -> "Estimator":
        copy = object.__new__(Estimator)
        copy.__dict__.update(self.__dict__)
        return copy

    def _constants_of_setup(self) -> Constants:
        constants = self._trainer_constants
        return constants.replace(**under_facts(self.training, self.hardware, constants))

    @property
    def memory_limit_mib(self) -> float:
        """Memory that the allocator of a rank can use, MiB: the setup's limit, or the device's memory less its context."""
        if self.training.memory_limit_mib is not None:
            return float(self.training.memory_limit_mib)
        return max(1.0, self.hardware.memory_mib - self.context_mib)

    @property
    def context_mib(self) -> float:
        """Memory of a rank on its device outside the allocator, MiB: the maximum that trials measured, otherwise the assumed
        value."""
        return self.constants.context_mib if self._context_mib is None else self._context_mib

    @property
    def calibrated(self) -> int:
        """Number of trials whose step times it is calibrated by."""
        return self._time.trials

    @property
    def factors(self) -> Mapping[str, float]:
        """Factor of each group of terms after calibration, for time and memory."""
        return {
            **{f"time.{name}": float(np.exp(value)) for name, value in zip(time_names(), self._time.theta)},
            **{f"memory.{name}": float(np.exp(value)) for name, value in zip(MEMORY_GROUPS, self._memory.theta)},
        }

    def facts(self, precision: str, attention: str, fusion: bool, kernels: bool = False) -> ModelFacts:
        """The model's facts in one variant."""
        key: Variant = (precision, attention, bool(fusion), bool(kernels))
        if key not in self._facts:
            self._facts[key] = self.source.facts(
                precision=precision, attention=attention, fusion=bool(fusion), kernels=bool(kernels)
            )
        return self._facts[key]

    def trained_facts(self, variant: Variant) -> ModelFacts:
        """The model's facts in one variant under the setup's loss and recomputed modules."""
        facts = with_loss(self.facts(*variant), self.training.loss)
        return with_modules(facts, modules_of(self.training.recompute_modules))

    def facts_of(self, cols: KnobArrays, index: int) -> ModelFacts:
        """The facts that a configuration of `cols` uses."""
        return self.facts(cols.precision[index], cols.attention[index], cols.fusion[index], cols.kernels[index])

    def _raw(self, cols: KnobArrays) -> "_Raw":
        """Uncorrected terms of time, terms of the reported rank's and the fullest rank's memory, and FLOPs of a unit."""
        size = len(cols)
        time = {name: np.zeros(size) for name in (*TIME_TERMS, SLOW_HOST)}
        memory = {name: np.zeros(size) for name in MEMORY_TERMS}
        fullest = {name: np.zeros(size) for name in MEMORY_TERMS}
        flops = np.zeros(size)
        for variant, indices in cols.variants():
            facts = self.trained_facts(variant)
            variant_cols = cols.take(indices)
            _check_experts(facts, variant_cols)
            division = divided(facts, variant_cols, self.training.balance)
            taken = step_time(facts, variant_cols, self.training, self.hardware, self.constants, division)
            for name, value in taken.items():
                time[name][indices] = value
            full = peak_memory(facts, variant_cols, self.training, self.constants, division=division)
            for name, value in full.items():
                fullest[name][indices] = value
            if (reported := self.training.reported_rank) != "fullest":
                # Its experts need not be those with the most rows.
                even = self.constants.replace(expert_spread=0.0)
                full = peak_memory(facts, variant_cols, self.training, even, reported, division)
            if not self.training.reserved_memory:
                none = np.zeros(len(variant_cols))
                full = {**full, "slack": none, "context": np.minimum(full["context"], ALLOCATED_MIB)}
            for name, value in full.items():
                memory[name][indices] = value
            flops[indices] = facts.model_flops(self.training.seq_len or 1)
        return time, memory, fullest, flops

    def _features(self, cols: KnobArrays) -> np.ndarray | None:
        """Features of configurations; None if no correction interpolates."""
        return None if self._time.residual is None and self._memory.residual is None else cols.features

    def _time_prior(self) -> np.ndarray:
        c = self.constants
        device = {"sibling": c.sibling_std, "foreign": c.foreign_std}.get(kinship(self.hardware), 0.0)
        early = c.early_std if has_early_kernels(self.training, self.hardware) else 0.0
        compute = float(np.linalg.norm([c.compute_std, device, early, c.software_std]))
        return np.array([compute, c.launch_std, c.link_std, c.stall_std, c.network_std])

    def _time_noise(self, cols: KnobArrays) -> np.ndarray:
        """Standard deviation of the logarithm of a single step time: larger over several nodes, and on more nodes than were
        measured."""
        nodes = self._nodes(cols)
        noise = np.where(nodes > 1, self.constants.network_noise, self.constants.time_noise)
        if len(cols) and self.facts_of(cols, 0).experts:
            noise = np.hypot(noise, self.constants.experts_std)
        if self._measured_nodes is None:
            return noise
        doublings = np.log2(np.maximum(nodes / max(self._measured_nodes, 1.0), 1.0))
        return np.hypot(noise, self.constants.scale_std * doublings)

    def _nodes(self, cols: KnobArrays) -> np.ndarray:
        """Nodes of the devices of each configuration; less than 1 for a part of a node."""
        return cols.tp * cols.pp * cols.replicas / self.hardware.devices_per_node

    def _memory_prior(self) -> np.ndarray:
        c = self.constants
        return np.array([c.static_std, c.activation_std, c.overhead_std])

    def _step_of(self, trial: "Trial") -> float | None:
        measured = trial.measured
        if measured.step_ms:
            return float(measured.step_ms)
        rate = measured.tokens_per_second if self.unit == "tokens/s" else measured.samples_per_second
        rate = rate or measured.throughput
        if not rate:
            return None
        cols = knob_arrays([trial.config], self.training)
        samples = float(cols.micro_batch[0] * cols.grad_accum[0] * cols.dp[0])
        return samples * ((self.training.seq_len or 1) if self.unit == "tokens/s" else 1) / rate * 1e3


def _retry_chance(fullest: Mapping[str, np.ndarray], peak: np.ndarray, std: np.ndarray, limit_mib: float) -> np.ndarray:
    """Chance that the allocator of a run that survives had to free and allocate again, shape (n,).

    There was room for its tensors, but not for slack.

    Args:
        fullest: terms of the fullest rank's peak, MiB.
        peak: the corrected peak, MiB; infinite for what cannot run.
        std: standard deviation of its logarithm.
        limit_mib: memory of the allocator.
    """
    from scipy.special import log_ndtr

    is_finite = np.isfinite(peak)
    live = 1 - np.where(is_finite, fullest["slack"], 0.0) / np.where(is_finite, sum(fullest.values()), 1.0)
    room = np.log(limit_mib / np.where(is_finite, peak, 1.0))
    # Far beyond the limit both chances vanish; their ratio is computed from logarithms.
    ratio = log_ndtr(room / std) - log_ndtr((room - np.log(live)) / std)
    return np.where(is_finite, -np.expm1(ratio), 0.0)


def _beyond(chance: np.ndarray, cost: np.ndarray | float, std: np.ndarray) -> np.ndarray:
    """Distance by which an outcome of that chance, `cost` away in log time, moves the end of an 80 % interval, shape (n,)."""
    from scipy.special import ndtri

    chance = np.clip(chance, 1e-9, 1.0)
    # A tenth is left beyond the end: part of the other outcome, or all of it and part of this one.
    end = np.where(
        chance > 0.1,
        cost + std * ndtri(1 - 0.1 / np.maximum(chance, 0.1)),
        std * ndtri(np.minimum(0.9 / (1 - chance), 1 - 1e-9)),
    )
    return np.clip(end - Z80 * std, 0.0, cost)


def _setup(values: Mapping[str, Any]) -> TrainingSetup:
    field_names = {field.name for field in fields(TrainingSetup)}
    for name in values:
        if name not in field_names:
            raise UsageError(f"training: {unknown('field', name, field_names)}")
    return TrainingSetup(**values)


def _source(
    model: "Workload | str | Path | FactsSource | Mapping[str, Any]", setup: TrainingSetup, hardware: Hardware
) -> tuple[FactsSource, TrainingSetup, str]:
    """The source of the model's facts, the setup completed from the workload, and the unit of throughput."""
    from ..models.workload import Workload

    if isinstance(model, Mapping):
        return ModelFacts.from_shape(**model), setup, "tokens/s"
    if isinstance(model, (str, Path)):
        from ..models import workload

        model = workload(model, seq_len=setup.seq_len, global_batch=setup.global_batch)
    if isinstance(model, Workload):
        from .facts.traced import TracedFacts

        setup = replace(
            setup, seq_len=setup.seq_len or model.seq_len, global_batch=setup.global_batch or model.global_batch
        )
        return TracedFacts(model, hardware.operators, hardware.liger), setup, model.unit
    if hasattr(model, "facts"):
        return model, setup, getattr(getattr(model, "workload", None), "unit", "tokens/s")
    raise UsageError(
        f"model must be a workload, a preset's name, ModelFacts or shape numbers, but got {type(model).__name__}"
    )


def _check_experts(facts: ModelFacts, cols: KnobArrays) -> None:
    """Rejects configurations whose knobs of experts the model does not allow.

    Raises:
        UsageError: names the rule.
    """
    if (cols.ep == 1).all() and not cols.capacity_factor.any() and not cols.etp.any():
        return
    context = RuleContext(experts=facts.experts)
    for rule in RULES:
        if rule.knobs not in (("ep",), ("etp",), ("capacity_factor",)):
            continue
        if (bad := np.broadcast_to(rule.broken(cols, context), len(cols))).any():
            (knob,) = rule.knobs
            raise UsageError(f"{knob}={getattr(cols, knob)[bad][0]:g}: {rule.reason(context)}")
