"""Results of `redline estimate`: configurations with their predictions and their fullest rank, as data."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from ..base.errors import UsageError
from ..knobs.lossy import lossy_in, lossy_values
from ..knobs.rules import RuleContext
from ..models.spaces import lossy_of_space
from ..space import Config, Space
from .estimate import Estimate
from .estimator import Estimator
from .facts.model_facts import ModelFacts
from .knob_arrays import knob_arrays
from .layerwise import Layerwise, followed, refine, relatives
from .memory import of_stages
from .plans import Plan, choose
from .request import EstimateRequest
from .stages import staged
from .survey import Ranked, Survey, checked_config, device_of

NOTICED = 0.01
"""Smallest difference between ranks that is stated, as a share of the peak."""


@dataclass(frozen=True, kw_only=True)
class FullestRank:
    """The pipeline rank with the most memory."""

    rank: int
    """Its place in the pipeline, from 0."""
    pp: int
    """Ranks of the pipeline."""
    mib: float
    """Its peak, MiB."""
    least_mib: float
    """Peak of the pipeline rank with the least memory, MiB."""
    ep: int
    """Ranks that share experts, of which it gets the most rows; 1 if none do."""

    def __str__(self) -> str:
        places = []
        if self.least_mib < (1 - NOTICED) * self.mib:
            more = (self.mib - self.least_mib) / 1024
            places.append(f"pipeline rank {self.rank} of {self.pp}, with {more:.1f} GiB more than the emptiest")
        if self.ep > 1:
            places.append(f"the one of {self.ep} ranks whose experts get the most rows")
        return ", ".join(places) or "all ranks alike"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"rank": self.rank, "pp": self.pp, "mib": self.mib, "least_mib": self.least_mib, "why": str(self)}


def fullest_rank(estimator: Estimator, config: Mapping[str, Any]) -> FullestRank:
    """The fullest rank of a configuration, by predictions that trials do not correct.

    Ranks of different stages differ in their blocks, in the parts outside blocks, and in the micro-batches that they hold. Ranks
    that share experts differ in the rows that their experts get.
    """
    setup, constants = estimator.training, estimator.constants
    cols = knob_arrays([config], setup)
    facts = estimator.trained_facts(next(cols.variants())[0])
    split, _ = next(cols.splits())
    cut = staged(facts, split, setup.balance, cols)
    peaks = of_stages([groups for groups, _ in cut], facts, setup, constants)
    sums = [float(reduce(np.add, terms.values())[0]) for terms in peaks]
    most = int(np.argmax(sums))
    return FullestRank(
        rank=int(cut[most][1].ranks[0]),
        pp=split.pp,
        mib=sums[most],
        least_mib=min(sums),
        ep=int(cols.ep[0]) if facts.experts else 1,
    )


@dataclass(frozen=True, kw_only=True)
class EstimateDocument:
    """A request and its predictions."""

    request: EstimateRequest
    ranked: tuple[Ranked, ...]
    """The configurations to show, the best plans first; empty where none fits."""
    survey: Survey | None
    """Survey of the whole space; None if one configuration was requested."""
    facts: ModelFacts
    """The model's facts, in the variant of the first configuration."""
    layerwise: Layerwise | None = None
    """The winner refined block by block, if requested."""
    plans: Sequence[Plan] = ()
    """The distinct plans to choose among, `ranked` included; empty if one configuration was requested."""
    baseline: Ranked | None = None
    """The configuration that a user would run without tuning; None if one configuration was requested."""
    reference: Ranked | None = None
    """The configuration that needs the least memory, if none fits."""
    fullest: FullestRank
    """The rank with the most memory in the first configuration."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; NaN and infinity become None."""
        document: dict[str, Any] = {
            "model": self.request.name,
            "parameters": self.facts.parameters,
            "hardware": self.request.hardware.name,
            "devices": self.request.devices,
            "seq_len": self.request.estimator.training.seq_len,
            "global_batch": self.request.global_batch,
            "memory_limit_mib": finite(self.request.estimator.memory_limit_mib),
            "assumed_of": self.request.framework.name,
            "assumed": list(self.request.framework.facts),
            "best": [entry(ranked, self.request.devices) for ranked in self.ranked],
            "notes": [*self.request.notes, *self.facts.notes],
        }
        document["fullest_rank"] = self.fullest.to_dict()
        if self.survey is not None:
            document |= {
                "valid": self.survey.valid,
                "predicted": self.survey.predicted,
                "fitting": self.survey.fitting,
            }
        if self.survey is not None and self.survey.best_exact is not None:
            document["best_exact"] = entry(self.survey.best_exact, self.request.devices)
        if self.plans:
            document["plans"] = [
                {"role": plan.role, "devices": self.request.devices, **entry(plan.ranked, self.request.devices)}
                for plan in self.plans
            ]
        if self.baseline is not None:
            document["untuned"] = entry(self.baseline, self.request.devices)
        if self.reference is not None:
            document["least_memory"] = entry(self.reference, self.request.devices)
        if self.layerwise is not None:
            document["layerwise"] = self.layerwise.to_dict()
        return document


def entry(ranked: Ranked, devices: int) -> dict[str, Any]:
    """A configuration with its estimate on `devices` devices, as plain data."""
    estimate = ranked.estimate
    return {
        "config": ranked.config.to_dict(),
        "lossy": lossy_values(ranked.config, ranked.lossy),
        **numbers(estimate),
        "fits": estimate.fits,
        "throughput_per_device": finite(estimate.throughput / devices),
        "breakdown": {name: finite(value) for name, value in estimate.breakdown.items()},
    }


def plan_file(document: EstimateDocument, command: str) -> dict[str, Any]:
    """Contents of the file that `redline estimate -o` writes: the plans in the format of a winner in best.yaml, for `redline
    tune`, `export` and `train`.

    Args:
        document: an estimate with a plan.
        command: the command that printed it.
    """
    request, machine = document.request, document.request.hardware
    plans = [plan for plan in document.plans if plan.ranked is not document.ranked[0]]
    base, devices = document.baseline, request.devices
    return {
        "simulated": True,
        "best": _planned("fastest", document.ranked[0], devices),
        "alternatives": [_planned(plan.role, plan.ranked, devices) for plan in plans],
        "default": None if base is None else _planned("untuned", base, devices),
        "trains": {
            **request.trains,
            "seq_len": request.estimator.training.seq_len,
            "global_batch": request.global_batch,
            "memory_limit_mib": request.estimator.training.memory_limit_mib,
            "devices": {
                "type": device_of(machine).type,
                "name": machine.name,
                "used": devices,
                "per_host": machine.devices_per_node,
                "memory_mib": int(machine.memory_gib * 1024),
            },
        },
        "reproduce": command,
    }


def _planned(role: str, ranked: Ranked, devices: int) -> dict[str, Any]:
    estimate = ranked.estimate
    return {
        "role": role,
        "devices": devices,
        "configuration": ranked.config.to_dict(),
        **({"lossy": lossy_values(ranked.config, ranked.lossy)} if ranked.lossy else {}),
        "prediction": {
            "throughput": finite(estimate.throughput),
            "unit": estimate.unit,
            "step_ms": finite(estimate.step_ms),
            "memory_mib": finite(estimate.peak_memory_mib),
            "probability_fits": finite(estimate.probability_fits),
        },
    }


_NUMBERS = (
    "throughput", "step_ms", "step_ms_low", "step_ms_high", "peak_memory_mib", "memory_low", "memory_high", "probability_fits",
    "mfu",
)  # fmt: skip


def numbers(estimate: Estimate) -> dict[str, Any]:
    """An estimate's numbers, with the unit of the throughput and what binds, as plain data."""
    values = {name: finite(getattr(estimate, name)) for name in _NUMBERS}
    return {**values, "unit": estimate.unit, "binds": estimate.binds}


def finite(value: float) -> float | None:
    """A number for JSON; None for NaN and infinity."""
    return float(value) if math.isfinite(value) else None


def estimate_document(
    request: EstimateRequest,
    *,
    config: Mapping[str, Any] | None = None,
    top: int = 1,
    layerwise: bool = False,
    untuned: Callable[[Space, Estimator], Config] = lambda space, estimator: space.default(),
    say: Callable[[str], None] = lambda message: None,
    show: "Callable[[EstimateDocument], None]" = lambda document: None,
) -> EstimateDocument:
    """Predicts the configurations of a request.

    Args:
        request: the request.
        config: one configuration, which may leave out knobs; None for the best of the space.
        top: number of the best.
        layerwise: True to refine the first one block by block.
        untuned: the configuration that a user would run without tuning; it is shown beside the best.
        say: called with progress messages.
        show: called with the document before plans for each block are looked for.

    Raises:
        SpaceError: the configuration is not in the space.
        WorkloadError: the model cannot be traced.
        UsageError: no configuration of the space can be predicted.
    """
    estimator = request.estimator
    survey, reference, baseline = None, None, None
    plans: Sequence[Plan] = ()
    if config is not None:
        chosen = checked_config(request.space, config)
        lossy = lossy_in(chosen, lossy_of_space(request.space))
        ranked: tuple[Ranked, ...] = (Ranked(config=chosen, estimate=estimator(chosen), lossy=lossy),)
    else:
        say("tracing the model and predicting configurations")
        survey, plans = choose(estimator, request.space, top=top)
        ranked = survey.best
        reference = survey.smallest if not ranked else None
        usual = untuned(request.space, estimator)
        baseline = Ranked(config=usual, estimate=estimator(usual), lossy=lossy_in(usual, lossy_of_space(request.space)))
    shown_first = ranked[0] if ranked else reference
    if shown_first is None:
        raise UsageError("the space holds no configuration that can be predicted")
    facts = estimator.facts_of(knob_arrays([shown_first.config], estimator.training), 0)
    document = EstimateDocument(
        request=request,
        ranked=ranked,
        survey=survey,
        facts=facts,
        reference=reference,
        baseline=baseline,
        plans=plans,
        fullest=fullest_rank(estimator, shown_first.config),
    )
    show(document)
    if not ranked or config is not None:
        return document
    if _plans_layers(request):
        say("looking for plans for each block")
        context = request.space.beyond if isinstance(request.space.beyond, RuleContext) else None
        related = relatives(request.space, shown_first.config)
        refined = refine(estimator, shown_first, facts, related, context=context)
        document = replace(document, layerwise=refined if layerwise or refined.clear else None)
    return document


def _plans_layers(request: EstimateRequest) -> bool:
    """True if the model of a request can follow a strategy for each block and the space leaves choices open."""
    workload = getattr(request.estimator.source, "workload", None)
    free = {knob.name for knob in request.space.free}
    return (workload is None or followed(workload)) and bool(free & {"checkpoint_ratio", "zero", "tp"})
