"""A uniform winner refined block by block: which blocks are recomputed, and which ZeRO-3 gathers only once.

Miao et al., Galvatron, arXiv:2211.13878, section 3.3: under a memory limit the choices of the layers of a
stage are a knapsack, solved by dynamic programming over layers and memory. A checkpoint ratio is the same for
all stages, though the first holds the most micro-batches, and its steps are coarse; and ZeRO-3 gathers all
blocks again for backward, though some memory may be left to keep a few of them whole.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ..base.errors import SpaceError
from ..knobs.rules import SPLITTING
from ..knobs.strategy import BLOCK_KNOBS
from ..models import Workload
from ..models.families.standard import StandardSchedule
from ..space import Config, Space, Value
from .calibration import MEMORY_GROUPS, TIME_GROUPS
from .estimator import Estimator
from .facts.model_facts import ModelFacts
from .knob_arrays import KnobArrays, knob_arrays
from .memory import stage_peak
from .stages import Stage, stages
from .survey import Ranked
from .time import stage_times

CHECKPOINT_KNOB, GATHERED_KNOB = BLOCK_KNOBS
BUCKETS = 2000
"""Steps into which a stage's memory is divided."""
MARGIN = 0.98
"""Share of the memory limit that may be filled: predictions of the rest differ from rank to rank."""
SHARES = (1.0, 0.98, 0.95, 0.92, 0.88, 0.82)
"""Shares of what may be filled that assignments are made for."""


@dataclass(frozen=True, kw_only=True)
class Layerwise:
    """A winner refined block by block, beside the uniform one."""

    uniform: Ranked
    """The uniform winner."""
    config: Mapping[str, Any]
    """The knobs of the refined configuration."""
    step_ms: float
    """Its predicted step, ms."""
    throughput: float
    """Its predicted throughput, in the unit of the uniform one."""
    peak_memory_mib: float
    """Its predicted peak on the fullest rank, MiB."""
    checkpointed: tuple[int, ...]
    """Indices of the recomputed blocks."""
    gathered: tuple[int, ...]
    """Indices of the blocks that are kept whole."""

    @property
    def gain(self) -> float:
        """Predicted throughput over that of the uniform winner, less 1."""
        return self.throughput / self.uniform.estimate.throughput - 1

    def amounts_to(self, blocks: int) -> dict[str, Any] | None:
        """The uniform configuration that does the same; None where the `blocks` are treated unlike each other."""
        if any(0 < len(indices) < blocks for indices in (self.checkpointed, self.gathered)):
            return None
        knobs = {name: value for name, value in self.config.items() if name not in (CHECKPOINT_KNOB, GATHERED_KNOB)}
        knobs["checkpoint_ratio"] = 1.0 if self.checkpointed else 0.0
        return {**knobs, "zero": 2} if self.gathered else knobs

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "config": dict(self.config),
            "step_ms": self.step_ms,
            "throughput": self.throughput,
            "peak_memory_mib": self.peak_memory_mib,
            "checkpointed": list(self.checkpointed),
            "gathered": list(self.gathered),
            "gain": self.gain,
        }

    def lines(self) -> list[str]:
        """As text."""
        uniform = self.uniform.estimate
        if self.gain <= 0:
            return ["layer by layer: nothing is gained over the uniform winner"]
        words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in self.config.items()}
        knobs = " ".join(f"{name}={value}" for name, value in words.items())
        return [
            f"layer by layer: {self.throughput:,.0f} {uniform.unit}, {100 * self.gain:+.1f} % over the "
            f"uniform winner, at {self.peak_memory_mib / 1024:.1f} GiB instead of "
            f"{uniform.peak_memory_mib / 1024:.1f} GiB",
            f"  {knobs}",
        ]


def refine(
    estimator: Estimator,
    winner: Ranked,
    facts: ModelFacts,
    others: Iterable[Config] = (),
    margin: float = MARGIN,
) -> Layerwise:
    """Refines a uniform winner, and others like it, and returns the fastest.

    Args:
        estimator: predicts.
        winner: the uniform winner.
        facts: of its variant.
        others: further uniform configurations to start from, such as larger micro-batches that only fit with
            everything recomputed.
        margin: share of the memory limit that may be filled.
    """
    best: Layerwise | None = None
    for config in dict.fromkeys((winner.config, *others)):
        made = _refined(estimator, winner, config, facts, margin)
        if made is not None and (best is None or made.throughput > best.throughput):
            best = made
    if best is None or best.throughput <= winner.estimate.throughput:
        return Layerwise(
            uniform=winner,
            config=dict(winner.config),
            step_ms=winner.estimate.step_ms,
            throughput=winner.estimate.throughput,
            peak_memory_mib=winner.estimate.peak_memory_mib,
            checkpointed=(),
            gathered=(),
        )
    return best


def relatives(space: Space, config: Config) -> list[Config]:
    """Configurations that differ in what a finer choice of checkpointing may allow: the micro-batch and
    ZeRO's stage."""
    found = []
    varied = [name for name in ("micro_batch", "zero") if name in config and name in {k.name for k in space.free}]
    values = {name: space[name].values for name in varied}
    fixed = {knob.name: config[knob.name] for knob in space.free if knob.name in config}
    for combination in product(*values.values()):
        changed: dict[str, Value] = {**fixed, **dict(zip(values, combination))}
        with suppress(SpaceError):  # not valid with the others
            found.append(space.config(changed))
    return found


def followed(workload: Workload) -> bool:
    """Whether a workload's schedule looks at the knobs that name blocks; one of somebody's own need not."""
    return workload.schedule is None or isinstance(workload.schedule, StandardSchedule)


def blocks_text(indices: Iterable[int]) -> str:
    """Indices as text, neighbours as a range; `none` for none.

    >>> blocks_text([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


@dataclass(frozen=True)
class _Choice:
    """What one block can do: seconds and MiB against being recomputed and gathered twice."""

    seconds: float
    mib: float
    checkpointed: bool
    gathered: bool


def _refined(
    estimator: Estimator, winner: Ranked, config: Config, facts: ModelFacts, margin: float
) -> Layerwise | None:
    """The fastest of the assignments that fit, as the estimator predicts them; None where none does."""
    limit = estimator.memory_limit_mib
    if not np.isfinite(limit) or config.get("pipeline_schedule") in SPLITTING:  # recomputes nothing
        return None
    # A block's own share of time and memory is what the program adds up. What blocks share, such as one that
    # is rebuilt at a time, it cannot, and a full device has the allocator ask again: so several limits are
    # tried.
    shares = (margin * share for share in SHARES)
    found = {made: None for share in shares if (made := _assigned(estimator, config, facts, share * limit))}
    if not found:
        return None
    configs = [_named(config, *made) for made in found]
    table = estimator.table(configs)
    fits = table.fullest_memory_mib <= margin * limit
    if not fits.any():
        return None
    at = int(np.argmax(np.where(fits, table.throughput, -np.inf)))
    checkpointed, gathered = list(found)[at]
    row = table.row(at)
    return Layerwise(
        uniform=winner,
        config=configs[at],
        step_ms=row.step_ms,
        throughput=row.throughput,
        peak_memory_mib=row.peak_memory_mib,
        checkpointed=checkpointed,
        gathered=gathered,
    )


def _named(config: Config, checkpointed: tuple[int, ...], gathered: tuple[int, ...]) -> dict[str, Any]:
    """A uniform configuration with the blocks by their indices."""
    knobs = {name: value for name, value in config.items() if name != "checkpoint_ratio"}
    knobs[CHECKPOINT_KNOB] = blocks_text(checkpointed)
    if gathered:
        knobs[GATHERED_KNOB] = blocks_text(gathered)
    return knobs


def _assigned(
    estimator: Estimator, config: Config, facts: ModelFacts, limit: float
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Which blocks are recomputed and which stay gathered, where every stage is to stay below `limit` MiB;
    None where one cannot."""
    setup = estimator.training
    cols = knob_arrays([{**config, "checkpoint_ratio": 0.0}, {**config, "checkpoint_ratio": 1.0}], setup)
    pp = int(cols.pp[0])
    split, _ = next(cols.splits())
    cut = stages(facts, pp, setup.balance, chunks=split.chunks, v_shaped=split.v_shaped, distinct=False)
    checkpointed: list[int] = []
    gathered: list[int] = []
    for stage in cut:
        (kept, least), again = _ends(estimator, stage, pp, facts, cols)
        (whole, _), fewer = _ends(estimator, stage, pp, facts, cols.of_stage(None, 1.0))
        # Behind a further stage blocks would be gathered anew for each micro-batch in flight.
        saved = max(again[0] - fewer[0], 0.0) if pp == 1 and int(cols.zero[0]) >= 3 else 0.0
        choices = _choices(kept - least, again[1] - again[0], stage.count, whole - kept, saved)
        if kept <= limit and not saved:
            taken = [each[0] for each in choices]
        elif (picked := knapsack(choices, limit - least)) is not None:
            taken = picked[2]
        else:
            return None
        # A stage's blocks have the same choices; what the last ones keep is needed first, and is freed first.
        taken = sorted(taken, key=lambda each: (not each.checkpointed, each.gathered))
        checkpointed += [at for at, each in zip(stage.indices, taken, strict=True) if each.checkpointed]
        gathered += [at for at, each in zip(stage.indices, taken, strict=True) if each.gathered]
    return (tuple(checkpointed), tuple(gathered)) if cut else None


def _ends(
    estimator: Estimator, stage: Stage, pp: int, facts: ModelFacts, cols: KnobArrays
) -> tuple[np.ndarray, np.ndarray]:
    """MiB and seconds of a stage with nothing and with everything recomputed, as calibration corrects
    them."""
    setup, constants = estimator.training, estimator.constants
    memory = _corrected(stage_peak(stage, pp, facts, cols, setup, constants), MEMORY_GROUPS, estimator, "memory.")
    (seconds,) = stage_times([stage], pp, facts, cols, setup, estimator.hardware, constants)
    none = np.zeros(len(cols))
    return sum(memory.values(), none), sum(_corrected(seconds, TIME_GROUPS, estimator, "time.").values(), none)


def _choices(kept_mib: float, recompute_s: float, count: int, whole_mib: float, saved_s: float) -> list[list[_Choice]]:
    """The choices of each block of a stage, what keeps all first. Blocks of different kinds share evenly, as
    in a uniform configuration.

    Args:
        kept_mib, recompute_s: what all of them take more where they keep their activations, and longer where
            not.
        count: how many they are.
        whole_mib, saved_s: what all of them take more where they stay gathered, and what is saved then.
    """
    if not count:
        return []
    keep, again, whole_mib, saved_s = (each / count for each in (kept_mib, recompute_s, whole_mib, saved_s))
    options = [_Choice(-again, keep, False, False), _Choice(0.0, 0.0, True, False)]
    if saved_s > 0:
        options += [
            _Choice(-again - saved_s, keep + whole_mib, False, True),
            _Choice(-saved_s, whole_mib, True, True),
        ]
    return [options] * count


def knapsack(choices: list[list[_Choice]], budget: float) -> "tuple[float, float, list[_Choice]] | None":
    """The choices with the least time whose memory is within the budget: seconds, MiB, and one choice a
    block.

    Memory is rounded up to `BUCKETS` steps of the budget, so the result never exceeds it. None where nothing
    is within.
    """
    if budget < 0:
        return None
    unit = max(budget, 1e-9) / BUCKETS
    best = np.zeros(BUCKETS + 1)
    taken = np.zeros((len(choices), BUCKETS + 1), np.int16)
    for index, options in enumerate(choices):
        made = np.full((len(options), BUCKETS + 1), np.inf)
        for number, option in enumerate(options):
            step = int(np.ceil(option.mib / unit - 1e-9)) if option.mib > 0 else 0
            if step <= BUCKETS:
                made[number, step:] = best[: BUCKETS + 1 - step] + option.seconds
        taken[index] = np.argmin(made, axis=0)
        best = made[taken[index], np.arange(BUCKETS + 1)]
    if not np.isfinite(best[-1]):
        return None
    at, chosen = BUCKETS, []
    for index in range(len(choices) - 1, -1, -1):
        option = choices[index][taken[index, at]]
        chosen.append(option)
        at -= int(np.ceil(option.mib / unit - 1e-9)) if option.mib > 0 else 0
    chosen.reverse()
    return sum(each.seconds for each in chosen), sum(each.mib for each in chosen), chosen


def _corrected(
    terms: Mapping[str, np.ndarray], groups: Mapping[str, tuple[str, ...]], estimator: Estimator, prefix: str
) -> dict[str, np.ndarray]:
    """Terms with what calibration learnt."""
    factors = {name: estimator.factors[prefix + group] for group, names in groups.items() for name in names}
    return {name: value * factors.get(name, 1.0) for name, value in terms.items()}
