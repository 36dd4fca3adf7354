"""A uniform winner refined block by block: which blocks are recomputed, and which ZeRO-3 gathers only once.

Miao et al., Galvatron, arXiv:2211.13878, section 3.3: under a memory limit the choices of the layers of a stage are a
knapsack, solved by dynamic programming over layers and memory. A checkpoint ratio is the same for all stages, though
the first holds the most micro-batches, and its steps are coarse; and ZeRO-3 gathers all blocks again for backward,
though some memory may be left to keep a few of them whole.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...space import Config
from .columns import Columns, columns
from .estimator import Estimator
from .groups import MEMORY_GROUPS, TIME_GROUPS
from .memory import MIB, formats, stage_peak
from .model_facts import ModelFacts, Part
from .planning import Ranked
from .stages import Stage, stages
from .time import stage_times

CHECKPOINT_KNOB = "checkpoint_blocks"
"""Names the recomputed blocks, in place of `checkpoint_ratio`."""
GATHERED_KNOB = "gathered_blocks"
"""Names the blocks that ZeRO-3 keeps whole from forward to backward."""
BUCKETS = 2000
"""Steps into which a stage's memory is divided."""
MARGIN = 0.98
"""Share of the memory limit that may be filled: predictions of the rest differ from rank to rank."""


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
            f"layer by layer: {self.throughput:,.0f} {uniform.unit}, {100 * self.gain:+.1f} % over the uniform winner, "
            f"at {self.peak_memory_mib / 1024:.1f} GiB instead of {uniform.peak_memory_mib / 1024:.1f} GiB",
            f"  {knobs}",
        ]


def refine(
    estimator: Estimator, winner: Ranked, facts: ModelFacts, others: Iterable[Config] = ()
) -> Layerwise:
    """Refines a uniform winner, and others like it, and returns the fastest.

    Args:
        estimator: predicts.
        winner: the uniform winner.
        facts: of its variant.
        others: further uniform configurations to start from, such as larger micro-batches that only fit with
            everything recomputed.
    """
    best: Layerwise | None = None
    for config in dict.fromkeys((winner.config, *others)):
        made = _refined(estimator, winner, config, facts)
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


def _refined(estimator: Estimator, winner: Ranked, config: Config, facts: ModelFacts) -> Layerwise | None:
    setup = estimator.training
    plain = {**config, "checkpoint_ratio": 0.0}
    cols = columns([plain, {**config, "checkpoint_ratio": 1.0}], setup)
    pp = int(cols.pp[0])
    table = estimator.table([plain, {**config, "checkpoint_ratio": 1.0}])
    limit = estimator.memory_limit_mib * MARGIN
    if not np.isfinite(table.step_ms).all() or not np.isfinite(limit):
        return None
    times = [
        _corrected(each, TIME_GROUPS, estimator, "time.") for each in _stage_times(estimator, facts, cols)
    ]
    checkpointed: list[int] = []
    gathered: list[int] = []
    slowest, fullest, first = 0.0, 0.0, 0
    for stage, seconds in zip(stages(facts, pp, setup.balance, distinct=False), times, strict=True):
        count = round(sum(number for _, number in stage.blocks))
        memory = _corrected(
            stage_peak(stage, pp, facts, cols, setup, estimator.constants),
            MEMORY_GROUPS,
            estimator,
            "memory.",
        )
        full, least = (sum(each[at] for each in memory.values()) for at in (0, 1))
        total0, total1 = (sum(each[at] for each in seconds.values()) for at in (0, 1))
        whole = _whole_block_mib(stage, facts, cols, setup.but(), count)
        saved = _saved_by_gathering(seconds, count, cols, pp)
        choices = _choices(full - least, total1 - total0, count, whole, saved)
        if full <= limit and not saved:
            picked: tuple[float, float, list[_Choice]] | None = (
                sum(each[0].seconds for each in choices), full - least, [each[0] for each in choices]
            )  # fmt: skip
        else:
            picked = knapsack(choices, limit - least)
        if picked is None:
            return None
        gain, used, taken = picked
        # A stage's blocks have the same choices; what the last ones keep is needed first, and is freed first.
        taken = sorted(taken, key=lambda each: (not each.checkpointed, each.gathered))
        checkpointed += [first + index for index, each in enumerate(taken) if each.checkpointed]
        gathered += [first + index for index, each in enumerate(taken) if each.gathered]
        slowest = max(slowest, total1 + gain)
        fullest = max(fullest, least + used)
        first += count
    # What the table says beyond its slowest stage, such as calibration's scale, holds for the refined one too.
    scale = table.step_ms[1] / max(sum(each[1] for each in seconds.values()) for seconds in times) / 1e3
    step_ms = float(slowest * scale * 1e3)
    units = table.throughput[1] * table.step_ms[1]
    knobs = {name: value for name, value in config.items() if name != "checkpoint_ratio"}
    knobs[CHECKPOINT_KNOB] = blocks_text(checkpointed)
    if gathered:
        knobs[GATHERED_KNOB] = blocks_text(gathered)
    return Layerwise(
        uniform=winner,
        config=knobs,
        step_ms=step_ms,
        throughput=float(units / step_ms),
        peak_memory_mib=float(fullest),
        checkpointed=tuple(checkpointed),
        gathered=tuple(gathered),
    )


def _choices(
    kept_mib: float, recompute_s: float, count: int, whole_mib: float, saved_s: float
) -> list[list[_Choice]]:
    """The choices of each block of a stage, what keeps all first. Blocks of different kinds share evenly, as in a
    uniform configuration."""
    if not count:
        return []
    keep, again = kept_mib / count, recompute_s / count
    options = [_Choice(-again, keep, False, False), _Choice(0.0, 0.0, True, False)]
    if saved_s > 0:
        options += [
            _Choice(-again - saved_s, keep + whole_mib, False, True),
            _Choice(-saved_s, whole_mib, True, True),
        ]
    return [options] * count


def knapsack(choices: list[list[_Choice]], budget: float) -> "tuple[float, float, list[_Choice]] | None":
    """The choices with the least time whose memory is within the budget: seconds, MiB, and one choice a block.

    Memory is rounded up to `BUCKETS` steps of the budget, so the result never exceeds it. None where nothing is
    within.
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


def _stage_times(estimator: Estimator, facts: ModelFacts, cols: Columns) -> list[dict[str, np.ndarray]]:
    pp = int(cols.pp[0])
    found = stages(facts, pp, estimator.training.balance, distinct=False)
    return stage_times(found, pp, facts, cols, estimator.training, estimator.hardware, estimator.constants)


def _corrected(
    terms: Mapping[str, np.ndarray], groups: Mapping[str, tuple[str, ...]], estimator: Estimator, prefix: str
) -> dict[str, np.ndarray]:
    """Terms with what calibration learnt."""
    factors = {name: estimator.factors[prefix + group] for group, names in groups.items() for name in names}
    return {name: value * factors.get(name, 1.0) for name, value in terms.items()}


def _whole_block_mib(stage: Stage, facts: ModelFacts, cols: Columns, setup: Any, count: int) -> float:
    """A block's weights whole, on a tensor-parallel rank, MiB."""
    if not count:
        return 0.0
    tp = float(cols.tp[0])

    def local(part: Part) -> float:
        return part.parameters - part.sharded + part.sharded / tp

    total = sum(number * local(part) for part, number in stage.blocks)
    return total / count * formats(setup, facts.precision).compute / MIB


def _saved_by_gathering(seconds: Mapping[str, np.ndarray], count: int, cols: Columns, pp: int) -> float:
    """Seconds a block saves where it is gathered once a micro-batch instead of twice; 0 where ZeRO-3 is not on."""
    if int(cols.zero[0]) < 3 or pp > 1 or not count:
        return 0.0
    return float(seconds["parameter gathers"][0]) / 2 / count
