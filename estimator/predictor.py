"""Predictions of configurations of a training under the conventions of its trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from ..frameworks.trainer_config import TrainerConfig
from ..knobs.strategy import Strategy
from .estimate import Estimate, EstimateTable, joined
from .estimator import Estimator
from .facts.derived import low_rank_share
from .facts.model_facts import ModelFacts
from .fullest import FullestRank, fullest_rank
from .knob_arrays import knob_arrays
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
        """Memory of a rank that the estimator has no term for, MiB: embeddings that are not quantized, the reference model, and
        the gradients of a model that is one unit of FSDP, which are whole before they are reduced."""
        conventions, trainer = self.conventions(config), self.trainer
        bits = conventions.get("frozen_bits") or 16
        if bits == 16 and not (trainer.reference_model or trainer.one_unit):
            return 0.0
        strategy = Strategy.of(config)
        facts = self._model_facts(config, conventions)
        shards = strategy.tp * strategy.pp * (strategy.replicas if strategy.zero == 3 else 1)
        size = sum(part.frozen for part in facts.parts if part.role in ("embedding", "head")) * (2 - bits / 8) / shards
        if trainer.reference_model:
            size += (2 if conventions.get("precision") == "bf16_pure" else 4) * facts.parameters / shards
        if trainer.one_unit and strategy.grad_accum == 1 and strategy.zero == 2:
            half = strategy.precision in ("bf16", "fp16", "bf16_pure")
            size += (2 if half else 4) * facts.parameters / (strategy.tp * strategy.pp)
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
