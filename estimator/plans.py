"""Plans to choose among: the fastest, and alternatives that are safer or need less memory."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.errors import UsageError
from ..knobs.lossy import lossy_in
from ..models.spaces import lossy_of_space
from ..space import Config, Space
from .estimate import EstimateTable
from .estimator import Estimator
from .survey import DRAWN, Predicted, Ranked, Survey, climbed, predict, ranking, surveyed

LOOKED_AT, AT_ONCE = 20_000, 500
"""Number of configurations that are searched for different plans, and the number that are created at once."""
CLOSE, HALF = 0.97, 0.5
"""Shares of the highest throughput that the safest plan and the one with the least memory have. A safest plan with the same
chance to fit has at most `CLOSE` of the memory."""
SAVERS: Mapping[str, Any] = {"offload": "none", "checkpoint_ratio": 0.0}
"""Settings that save memory and cost time, with the value that does neither."""
ALIKE = 0.01
"""Relative difference of throughput and of memory within which two plans are shown as one."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A configuration to choose, with its role."""

    role: str
    """`fastest`, `safest`, `least memory`, or its rank (`2nd`)."""
    ranked: Ranked


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The plans of a space on its devices."""

    best: tuple[Ranked, ...]
    """The fastest configuration of each of the best plans, the best first."""
    safest: Ranked | None
    """The most certain to fit among those with `CLOSE` of the best throughput, with the least memory."""
    least_memory: Ranked | None
    """The one with the least memory among those with `HALF` of the best throughput."""
    survey: Survey
    """All predictions."""


def choose(estimator: Estimator, space: Space, *, top: int = 1) -> Chosen:
    """Predicts a space and picks the plans to show.

    A large space is sampled; then the neighbours of the best configurations are predicted, until none is better.

    Raises:
        UsageError: `top` is less than 1.
    """
    if top < 1:
        raise UsageError(f"top must be at least 1, but got {top}")
    predicted = _searched(
        estimator, space, lambda predictions, count: _to_improve(predictions, count if count == 1 else max(top, count))
    )
    ranks = by_expected_throughput(predicted.table)
    found_best = [predicted.ranked(index) for index in distinct(predicted, ranks, top)]
    safest, small = _safer_plans(predicted.table, ranks)
    best = tuple({(plain := without_idle(estimator, space, ranked)).config: plain for ranked in found_best}.values())

    def alternative(index: int | None, most_memory: float) -> Ranked | None:
        return None if index is None else without_idle(estimator, space, predicted.ranked(index), most_memory)

    return Chosen(
        best=best,
        safest=alternative(safest, 1 / CLOSE),
        least_memory=alternative(small, 1 + ALIKE),
        survey=surveyed(predicted, ranks, best),
    )


def fastest(estimator: Estimator, space: Space) -> Ranked | None:
    """The first of the plans that `choose` picks, found with fewer predictions; None if none fits."""
    predicted = _searched(
        estimator,
        space,
        lambda predictions, count: distinct(predictions, by_expected_throughput(predictions.table), count),
    )
    ranks = by_expected_throughput(predicted.table)
    return without_idle(estimator, space, predicted.ranked(int(ranks[0]))) if len(ranks) else None


def without_idle(estimator: Estimator, space: Space, plan: Ranked, most_memory: float = math.inf) -> Ranked:
    """The plan without the `SAVERS` that have no benefit: without them it is as fast and as likely to fit.

    Args:
        estimator: predicts configurations of the space.
        space: the space.
        plan: a configuration of it that fits.
        most_memory: ratio to the plan's memory that it may need without them.
    """
    for name, neutral in SAVERS.items():
        # Which optimizer runs on the device has no effect while that is offloaded.
        fused = {"fused_optimizer": True} if name == "offload" and "fused_optimizer" in plan.config else {}
        config = Config({**plan.config, name: neutral, **fused})
        if plan.config.get(name, neutral) == neutral or config not in space:
            continue
        estimate, current = estimator(config), plan.estimate
        if (
            estimate.throughput >= (1 - ALIKE) * current.throughput
            and estimate.probability_fits >= current.probability_fits - ALIKE
            and estimate.peak_memory_mib <= most_memory * current.peak_memory_mib
        ):
            plan = Ranked(config=config, estimate=estimate, lossy=lossy_in(config, lossy_of_space(space)))
    return plan


def _searched(estimator: Estimator, space: Space, wanted: Callable[[Predicted, int], Sequence[int]]) -> Predicted:
    """Predictions of a space, or of a sample and the neighbours of its wanted configurations, as for `climbed`."""
    predicted = predict(estimator, space, most=DRAWN)
    return predicted if predicted.complete else climbed(predicted, wanted)


def _to_improve(predicted: Predicted, count: int) -> list[int]:
    """The best configurations of different plans; with several also the alternatives to the best."""
    ranks = by_expected_throughput(predicted.table)
    alternatives = _safer_plans(predicted.table, ranks) if count > 1 else ()
    return [*distinct(predicted, ranks, count), *(index for index in alternatives if index is not None)]


def _safer_plans(table: EstimateTable, ranks: np.ndarray) -> tuple[int | None, int | None]:
    """The safest plan with nearly the best throughput, if it is safer than the best, and the one with the least memory at half of
    the best throughput or more."""
    if not len(ranks):
        return None, None
    speed, memory = table.throughput[ranks], table.fullest_memory_mib[ranks]
    fastest_speed = table.throughput[ranks[0]]
    # Chances are shown in percent; smaller differences count as equal, and less memory is safer.
    chance = np.where(speed >= CLOSE * fastest_speed, np.round(table.probability_fits[ranks], 2), -1.0)
    safest = np.lexsort((memory, -chance))[0]
    small = np.argmin(np.where(speed >= HALF * fastest_speed, memory, np.inf))
    safer = chance[safest] > np.round(table.probability_fits[ranks[0]], 2) or memory[safest] < CLOSE * memory[0]
    return int(ranks[safest]) if safer else None, int(ranks[small])


def distinct_plans(plans: Iterable[Plan]) -> list[Plan]:
    """Removes plans that are as good as an earlier one."""
    kept_plans: list[Plan] = []
    for plan in plans:
        if not any(_alike(plan.ranked, earlier.ranked) for earlier in kept_plans):
            kept_plans.append(plan)
    return kept_plans


def _alike(plan: Ranked, earlier: Ranked) -> bool:
    estimate, earlier_estimate = plan.estimate, earlier.estimate
    return (
        abs(estimate.throughput / earlier_estimate.throughput - 1) < ALIKE
        and abs(estimate.peak_memory_mib / earlier_estimate.peak_memory_mib - 1) < ALIKE
        and round(estimate.probability_fits, 2) == round(earlier_estimate.probability_fits, 2)
    )


def by_expected_throughput(table: EstimateTable) -> np.ndarray:
    """Indices of the configurations that fit, by throughput times the chance to fit, the highest first."""
    fits = ranking(table)
    expected = table.throughput[fits] * table.probability_fits[fits]
    return fits[np.argsort(-expected, kind="stable")]


def plan_of(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Key of how a configuration divides the model and saves memory, without the degrees: configurations with equal keys are
    variants of one plan."""
    shared = (config.get(name, 1) > 1 for name in ("tp", "sp", "cp", "pp", "ep"))
    return (*shared, config.get("zero", 0), config.get("offload", "none"), bool(config.get("checkpoint_ratio", 0)))


def distinct(predicted: Predicted, order: np.ndarray, top: int) -> list[int]:
    """The first configuration of each plan, in this order; fewer than `top` if the first `LOOKED_AT` have no more plans."""
    representatives: dict[tuple[Any, ...], int] = {}
    for begin in range(0, min(len(order), LOOKED_AT), AT_ONCE):
        indices = order[begin : begin + AT_ONCE]
        for index, config in zip(indices.tolist(), predicted.take(indices), strict=True):
            if len(representatives) == top:
                return list(representatives.values())
            representatives.setdefault(plan_of(config), index)
    return list(representatives.values())


def ordinal(number: int) -> str:
    """A rank in words.

    >>> [ordinal(each) for each in (2, 3, 4, 11, 22)]
    ['2nd', '3rd', '4th', '11th', '22nd']
    """
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def rows(chosen: Sequence[Ranked], safest: Ranked | None, least_memory: Ranked | None) -> list[Plan]:
    """The plans with their roles, without duplicates."""
    ranked = [
        Plan(role="fastest" if place == 0 else ordinal(place + 1), ranked=plan) for place, plan in enumerate(chosen)
    ]
    alternatives = [("safest", safest), ("least memory", least_memory)]
    ranked += [Plan(role=role, ranked=plan) for role, plan in alternatives if plan is not None]
    return distinct_plans(ranked)
