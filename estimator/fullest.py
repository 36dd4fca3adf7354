"""The rank with the most memory of a configuration, and the terms of which it has more than the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from .estimator import Estimator
from .experts import imbalance
from .knob_arrays import KnobArrays, knob_arrays
from .memory import of_stages
from .stages import Stage, in_flight, staged

NOTICED = 0.01
"""Smallest difference between ranks that is stated, as a share of the peak."""
_OF_MICRO_BATCHES = ("activations", "checkpoints")


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
    reasons: tuple[str, ...]
    """Terms of which it has more than that rank, and than its own replicas; empty if all ranks are equal."""

    def __str__(self) -> str:
        if not self.reasons:
            return "all ranks alike"
        place = [f"pipeline rank {self.rank} of {self.pp}"] if self.least_mib < (1 - NOTICED) * self.mib else []
        return ", ".join([*place, *self.reasons])

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
    groups, stages = [groups for groups, _ in cut], [stage for _, stage in cut]
    peaks = of_stages(groups, facts, setup, constants)
    sums = [float(reduce(np.add, terms.values())[0]) for terms in peaks]
    most, least = int(np.argmax(sums)), int(np.argmin(sums))
    reasons: list[str] = []
    if sums[least] < (1 - NOTICED) * sums[most]:
        excess = {name: float(value[0] - peaks[least][name][0]) for name, value in peaks[most].items()}
        (name, extra), *_ = sorted(excess.items(), key=lambda item: -item[1])
        reasons.append(
            f"{extra / 1024:.1f} GiB more {name} than the emptiest "
            f"{_reason_for(name, stages[most], stages[least], split.pp, cols)}"
        )
    if (ep := int(cols.ep[0])) > 1 and facts.experts:
        even = of_stages(groups, facts, setup, constants.replace(expert_spread=0.0))[most]
        extra = sums[most] - float(reduce(np.add, even.values())[0])
        share = float(imbalance(max(facts.experts), np.array([ep]), constants)[0]) - 1
        reasons.append(
            f"{extra / 1024:.1f} GiB as the one of {ep} ranks whose experts get the most rows, {100 * share:.0f} % above the mean"
        )
    return FullestRank(
        rank=int(stages[most].ranks[0]), pp=split.pp, mib=sums[most], least_mib=sums[least], reasons=tuple(reasons)
    )


def _reason_for(name: str, most: Stage, least: Stage, pp: int, cols: KnobArrays) -> str:
    """Why one stage has more of a term than another."""
    if name in _OF_MICRO_BATCHES:
        held, held_by_least = (float(in_flight(stage.ranks[0], pp, cols)[0]) for stage in (most, least))
        if held != held_by_least:
            return f"since it holds {held:g} micro-batches at once instead of {held_by_least:g}"
    ends = [part.name for part in most.ends if part not in least.ends and part.role != "norm"]
    if most.count != least.count:
        return f"since it has {most.count} blocks instead of {least.count}"
    return (
        f"since it has the {' and '.join(ends)}" if ends else "since its blocks are treated unlike those of the other"
    )
