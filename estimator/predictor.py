"""Predictions of configurations of a training under the conventions of its trainer, and faster ones on the same devices: a few
knobs changed, as lines of its files."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from ..base.errors import UsageError
from ..frameworks.registry import find_framework
from ..frameworks.trainer_config import Change, TrainerConfig
from ..knobs.rules import RULES, RuleContext, refusal
from ..knobs.strategy import Strategy
from ..space import Config
from .document import FullestRank, fullest_rank
from .estimate import Z80, Estimate, EstimateTable, joined
from .estimator import Estimator
from .facts.derived import low_rank_share
from .facts.model_facts import ModelFacts
from .hardware import Hardware
from .knob_arrays import knob_arrays
from .rank import BYTES, formats
from .trainers import Trainer


@dataclass(frozen=True)
class Predictor:
    """Predicts configurations of a training under the conventions of its trainer."""

    trainer: TrainerConfig
    facts: Trainer
    instead: bool
    """True if these facts replace the file's."""
    estimator: Estimator
    """Estimator of a training without conventions."""
    assume: Mapping[str, Any]
    """Facts that replace the trainer's and the file's."""

    def conventions(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of the setup that the trainer sets for a configuration."""
        own = self.facts.setup if self.instead else {**self.facts.own, **self.trainer.conventions_with(config)}
        return {**own, **self.assume}

    def setup(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """These fields, with the states of the optimizer, and the memory that no other field describes."""
        setup = {**self.conventions(config), "further_mib": self.further_mib(config)}
        if self.trainer.low_rank is not None:
            setup["state_share"] = low_rank_share(self._model_facts(config, setup), self.trainer.low_rank)
        return setup

    def _model_facts(self, config: Mapping[str, Any], conventions: Mapping[str, Any]) -> ModelFacts:
        """Facts of the model in a configuration."""
        return self.estimator.facts_of(knob_arrays([self._estimated(config, conventions)], self.estimator.training), 0)

    def __call__(self, config: Mapping[str, Any]) -> Estimate:
        setup = self.setup(config)
        return self._by(setup)(self._estimated(config, setup))

    def fullest(self, config: Mapping[str, Any]) -> FullestRank:
        """The rank with the most memory."""
        setup = self.setup(config)
        return fullest_rank(self._by(setup), self._estimated(config, setup))

    def further_mib(self, config: Mapping[str, Any]) -> float:
        """Memory of a rank that the estimator has no term for, MiB: embeddings that are not quantized or are in fp32, copies that
        are trained beside adapters, the reference model, and the gradients of a model that is one unit of FSDP, which are whole
        before they are reduced."""
        conventions, trainer = self.conventions(config), self.trainer
        bits = conventions.get("frozen_bits") or 16
        if bits >= 16 and not (trainer.reference_model or trainer.one_unit or trainer.copied_ends or trainer.wide_ends):
            return 0.0
        strategy = Strategy.of(config)
        facts = self._model_facts(config, conventions)
        inner = strategy.tp * strategy.pp
        shards = inner * (strategy.replicas if strategy.zero == 3 else 1)
        sizes = {
            role: sum(part.parameters for part in facts.parts if part.role == role) for role in ("embedding", "head")
        }
        precision = conventions.get("precision", strategy.precision)
        # DeepSpeed's engine casts what it gets.
        loaded = None if conventions.get("deepspeed_update") else trainer.loaded_dtype
        size = 0.0
        if bits < 16:
            size += sum(sizes.values()) * (BYTES[loaded or "bf16"] - bits / 8) / shards

        def state_bytes(dtype: str | None) -> float:
            """Bytes on a rank of a trained weight of a dtype (None: as others), its gradient and its states."""
            given = {} if dtype is None or loaded is None else {"parameter_dtype": dtype}
            form = formats(self.estimator.training.replace(**{**conventions, **given}), precision)
            cut = [strategy.replicas if strategy.zero >= stage else 1 for stage in (1, 2, 3)]
            return ((form.optimizer + form.master) / cut[0] + form.gradient / cut[1] + form.parameter / cut[2]) / inner

        size += sum(
            (sizes[role] or sizes["embedding"]) * state_bytes(dtype) for role, dtype in trainer.copied_ends.items()
        )
        if trainer.wide_ends:
            size += sum(sizes.values()) * (state_bytes("fp32") - state_bytes(None))
        if trainer.reference_model:
            size += (BYTES[loaded] if loaded else 2 if precision == "bf16_pure" else 4) * facts.parameters / shards
        if trainer.one_unit and strategy.grad_accum == 1 and strategy.zero == 2:
            half = strategy.precision in ("bf16", "fp16", "bf16_pure")
            size += (2 if half else 4) * facts.parameters / inner
        return float(size) / 2**20

    def table(self, configs: Sequence[Mapping[str, Any]]) -> tuple[EstimateTable, np.ndarray]:
        """Predictions under the trainer's conventions, and the index of the configuration of each row."""
        groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
        for index, config in enumerate(configs):
            setup = self.setup(config)
            groups.setdefault(repr(sorted(setup.items())), (setup, []))[1].append(index)
        tables = [
            self._by(setup).table([self._estimated(configs[index], setup) for index in indices])
            for setup, indices in groups.values()
        ]
        return reduce(joined, tables), np.concatenate([np.array(indices) for _, indices in groups.values()])

    def _by(self, setup: Mapping[str, Any]) -> Estimator:
        return self.estimator.on(self.estimator.training.replace(**setup), self.estimator.hardware)

    def _estimated(self, config: Mapping[str, Any], conventions: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration in the estimator's terms: formats that a framework's conventions replace are left to the setup, and a
        sample of several sequences is as many samples."""
        values = {name: value for name, value in config.items() if value is not None and name not in conventions}
        if values.get("attention") not in (None, "eager", "sdpa"):
            values["attention"] = "sdpa"  # a fused kernel of the same cost
        if "micro_batch" in values:
            values["micro_batch"] *= self.trainer.sequences
        return values


MOST_CHANGES = 3
"""Maximum number of faster configurations that are shown, and of knobs that one of them changes."""
SURE = 0.8
"""Minimum chance to fit of a faster configuration."""
GAIN = 1.02
"""Minimum ratio of throughput by which a change counts as faster."""


@dataclass(frozen=True, kw_only=True)
class Faster:
    """A configuration with higher predicted throughput that fits."""

    config: Config
    changes: tuple[Change, ...]
    estimate: Estimate
    gain: float
    """Its throughput as a multiple of that of the file; NaN if the file's configuration does not fit."""


def faster_configurations(
    predictor: Predictor, shape: Mapping[str, Any], estimate: Estimate, hardware: Hardware, context: RuleContext
) -> tuple[Faster, ...]:
    """The fastest configurations that change one, two and three knobs, each if it is faster than the previous one."""
    trainer = predictor.trainer
    neighbours = _neighbours(trainer, shape, hardware, context)
    if not neighbours:
        return ()
    configs = [dict(trainer.config), *(config for config, _ in neighbours)]
    table, taken = predictor.table(configs)
    row_of = {configuration: row for row, configuration in enumerate(taken.tolist())}
    rows = [row_of[number] for number in range(1, len(configs))]
    surely_faster = _surely_faster(table, row_of[0]) if estimate.fits else np.ones(len(table), bool)
    good = table.fits & np.isfinite(table.step_ms) & (table.probability_fits >= SURE) & surely_faster
    order = sorted(
        (number for number, row in enumerate(rows) if good[row]), key=lambda number: -table.preference[rows[number]]
    )
    faster: list[Faster] = []
    least = estimate.throughput * GAIN if estimate.fits else 0.0
    for count in range(1, MOST_CHANGES + 1):
        for number in [number for number in order if neighbours[number][1] == count][:40]:
            if table.throughput[rows[number]] <= least:
                break
            config = _without_idle(predictor, neighbours[number][0], float(table.throughput[rows[number]]))
            changes, again = trainer.changed(config) or ((), trainer)
            if not changes or any(known.config == again.config for known in faster):
                continue
            # Its conventions may differ from those of the unchanged file.
            predicted = replace(predictor, trainer=replace(trainer, sources=again.sources, config=again.config))(
                again.config
            )
            if not predicted.fits or predicted.probability_fits < SURE or predicted.throughput <= least:
                continue
            gain = predicted.throughput / estimate.throughput if estimate.fits else float("nan")
            faster.append(Faster(config=again.config, changes=changes, estimate=predicted, gain=gain))
            least = predicted.throughput * GAIN
            break
    return tuple(sorted(faster, key=lambda configuration: -configuration.estimate.throughput))


def _surely_faster(table: EstimateTable, row: int) -> np.ndarray:
    """True where a configuration is faster than that of a row by more than the 80 % interval of their difference: factors of the
    machine that both depend on alike cancel out."""
    with np.errstate(divide="ignore"):
        ratio = np.log(table.throughput) - np.log(table.throughput[row])
    differences = table.log_throughput_effects - table.log_throughput_effects[row]
    return np.asarray(ratio > Z80 * np.linalg.norm(differences, axis=1))


def _without_idle(predictor: Predictor, config: dict[str, Any], throughput: float) -> dict[str, Any]:
    """A configuration without the changes that buy nothing: without one of them it is as fast and fits."""
    trainer = predictor.trainer
    base, devices, total = dict(trainer.config), trainer.devices or 1, trainer.global_batch or 1

    def changed(configuration: Mapping[str, Any]) -> list[str]:
        knobs = (configuration.keys() | base.keys()) - {"dp", "grad_accum"}
        return sorted(knob for knob in knobs if configuration.get(knob) != base.get(knob))

    for knob in changed(config):
        fewer = {
            **{name: value for name, value in config.items() if name != knob},
            **({knob: base[knob]} if knob in base else {}),
        }
        completed = _completed(fewer, devices, total) if "micro_batch" in fewer else None
        if completed is None or completed == _completed(base, devices, total):
            continue
        if len(changed(completed)) >= len(changed(config)):  # what follows from the other knobs brings the change back
            continue
        try:
            table, _ = predictor.table([completed])
        except UsageError:  # it does not go together without this change
            continue
        if table.fits[0] and table.probability_fits[0] >= SURE and table.throughput[0] >= 0.995 * throughput:
            return _without_idle(predictor, completed, throughput)
    return config


def _neighbours(
    trainer: TrainerConfig, shape: Mapping[str, Any], hardware: Hardware, context: RuleContext
) -> list[tuple[dict[str, Any], int]]:
    """Configurations on the same devices with the same global batch that differ in up to three knobs, and the number of changed
    knobs."""
    base, now = dict(trainer.config), trainer.strategy()
    heads, kv_heads, layers = (
        shape.get("heads", 1),
        shape.get("kv_heads") or shape.get("heads", 1),
        shape.get("layers", 1),
    )
    host = min(trainer.per_host or hardware.devices_per_node, hardware.devices_per_node)
    devices, total = trainer.devices or 1, trainer.global_batch or 1
    powers = [1 << power for power in range(10)]
    settable = {knob for source in trainer.sources for knob in source.stated} | trainer.given.keys()
    for framework in (find_framework(source.framework) for source in trainer.sources):
        settable |= framework.knobs.keys() - framework.needs_code
    axes: dict[str, list[Any]] = {
        "tp": [degree for degree in powers if degree <= host and heads % degree == 0 and kv_heads % degree == 0],
        "pp": [degree for degree in powers if degree <= min(16, devices) and layers % degree == 0],
        "cp": [degree for degree in powers if degree <= min(8, devices)],
        "ep": [degree for degree in powers if (shape.get("experts") or 1) % degree == 0],
        "zero": [0, 1, 2, 3],
        "micro_batch": [size for size in powers if size <= 64 and total % size == 0],
        "checkpoint_ratio": [0, 0.25, 0.5, 1],
        "fusion": [True],
        "kernels": [True],
        "sequence_parallel": [True],
        "offload": ["none"],
    }
    alternatives = {
        knob: [value for value in values if value != getattr(now, knob)]
        for knob, values in axes.items()
        if knob in settable
    }
    rules = [rule for rule in RULES if rule.general or rule.name == "replicas that share experts"]
    neighbours: list[tuple[dict[str, Any], int]] = []
    for count in range(1, MOST_CHANGES + 1):
        for knobs in itertools.combinations(alternatives, count):
            for values in itertools.product(*(alternatives[knob] for knob in knobs)):
                config = {**base, **dict(zip(knobs, values))}
                if (completed := _completed(config, devices, total)) is None:
                    continue
                strategy = Strategy.of(completed)
                if all(getattr(strategy, knob) == value for knob, value in zip(knobs, values)) and not refusal(
                    strategy, context, rules
                ):
                    neighbours.append((completed, count))
    return neighbours


def _completed(config: dict[str, Any], devices: int, total: int) -> dict[str, Any] | None:
    """A configuration with the replicas and accumulation that follow from devices and global batch; None if they do not
    divide."""
    split = config.get("tp", 1) * config.get("sp", 1) * config.get("cp", 1) * config.get("pp", 1)
    if devices % split or total % (config["micro_batch"] * (devices // split)):
        return None
    dp = devices // split
    completed = {**config, "dp": dp, "grad_accum": total // config["micro_batch"] // dp}
    if completed.get("hsdp", 1) > 1 and (
        dp % completed["hsdp"] or dp == completed["hsdp"] or completed.get("zero", 0) < 2
    ):
        return None
    if completed.get("pp", 1) == 1:
        completed = {
            name: value for name, value in completed.items() if name not in ("pipeline_schedule", "virtual_stages")
        }
    elif completed["grad_accum"] < completed["pp"]:
        return None
    return completed
