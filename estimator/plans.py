"""Plans to choose among: the fastest, and alternatives that are safer or need less memory; changes that help where none fits."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.errors import RedlineError, UsageError
from ..knobs.lossy import lossy_in
from ..models.spaces import lossy_of_space
from ..space import Config, Space
from .estimate import EstimateTable
from .estimator import Estimator
from .request import EstimateRequest
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


def choose(estimator: Estimator, space: Space, *, top: int = 1) -> tuple[Survey, list[Plan]]:
    """Predicts a space and picks the plans to show: the fastest configuration of each of the best plans, then the most certain to
    fit among those with `CLOSE` of the best throughput, and the one with the least memory among those with `HALF` of it.

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
    plans = [
        Plan(role="fastest" if place == 0 else ordinal(place + 1), ranked=ranked) for place, ranked in enumerate(best)
    ]
    for role, index, most_memory in (("safest", safest, 1 / CLOSE), ("least memory", small, 1 + ALIKE)):
        if index is not None:
            plain = without_idle(estimator, space, predicted.ranked(index), most_memory)
            plans.append(Plan(role=role, ranked=plain))
    return surveyed(predicted, ranks, best), distinct_plans(plans)


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


SHORTEST = 256
"""Tokens below which a shorter sequence is not proposed."""
HALVINGS = 3
DOUBLINGS = 6
"""Numbers of shorter sequences and of larger numbers of devices that are tried."""
ADAPTERS = "r=16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change with which a configuration is predicted to fit."""

    options: str
    """As options of the command line."""
    memory_mib: float
    """Predicted memory of the fastest configuration."""

    def __str__(self) -> str:
        return f"{self.options} ({self.memory_mib / 1024:.1f} GiB)"


def helpful(
    ask: Callable[[Mapping[str, Any]], EstimateRequest],
    base_arguments: Mapping[str, Any],
    *,
    devices: int,
    seq_len: int | None,
) -> list[Change]:
    """Returns the changes that make something fit, the least intrusive first; of shorter sequences and more devices the first
    that does.

    Args:
        ask: returns the request with some of its arguments replaced.
        base_arguments: the arguments of the request.
        devices, seq_len: those of the request.
    """
    changes = []
    for family in _families(base_arguments, devices, seq_len):
        for options, arguments in family:
            try:
                request = ask(arguments)
                best = fastest(request.estimator, request.space)
            except RedlineError:  # this change is not possible for the model
                continue
            if best is not None:
                changes.append(Change(options=options, memory_mib=best.estimate.peak_memory_mib))
                break
    return changes


def _families(
    base_arguments: Mapping[str, Any], devices: int, seq_len: int | None
) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Yields lists of changes of one kind, by their options and their arguments."""
    if "lossy" not in (base_arguments.get("allow") or ()):
        yield [("--allow lossy", {"allow": (*(base_arguments.get("allow") or ()), "lossy")})]
    if seq_len is not None:
        lengths = [seq_len >> halving for halving in range(1, HALVINGS + 1)]
        yield [(f"--seq-len {length}", {"seq_len": length}) for length in lengths if length >= SHORTEST]
    adapters = base_arguments.get("lora")
    if not adapters:
        texts = (ADAPTERS, f"{ADAPTERS},quantize=4bit")
        yield [(f"--lora {adapter}", {"lora": adapter}) for adapter in texts]
    elif "quantize" not in str(adapters):
        yield [(f"--lora {adapters},quantize=4bit", {"lora": f"{adapters},quantize=4bit"})]
    counts = [devices << doubling for doubling in range(1, DOUBLINGS + 1)]
    yield [(f"--devices {count}", {"devices": count}) for count in counts]
