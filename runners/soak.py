"""The soak of a candidate: many steps over batches of varied lengths, as real data has them.

A dry run takes steps that are all alike. What a training meets later shows in none of them: an allocator whose cache is
cut up by pieces of many sizes, code that is compiled anew for another shape, whatever a model keeps of what it has seen.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from ..models.batches import batch_slice, make_batch, to_device
from ..models.data import TokenBatches
from ..models.workload import Batch, Workload
from .timing import TimingPlan

if TYPE_CHECKING:
    from ..training import Training

BEYOND = 1_000_000
"""Number of the step whose data the first step of a soak has: none of the measured steps has the same."""
SLACK = 3.0
"""How many times the measured step time each step of a soak may take, most of them being shorter ones."""
COMPILED_ANEW = 8
"""Lengths for which the same code is compiled, `torch.compiler.config.recompile_limit`; what has further ones runs
uncompiled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakPlan:
    """How long a candidate is soaked, and on what."""

    steps: int = 200
    """Steps of varied lengths, beside one of the longest before and another after them."""
    shortest: float = 0.125
    """The shortest length, as a share of the workload's sequence length."""
    compiling_s: float = 0.0
    """What the candidate's compilations took when it was measured, s."""

    @property
    def compile_timeout_s(self) -> float:
        """What compilations may take on top of those of a dry run, s."""
        return COMPILED_ANEW * self.compiling_s

    def lengths(self, workload: Workload, seed: int, multiple: int = 1) -> list[int | None]:
        """Tokens of a sample in each step; None where the workload's samples are all alike.

        The longest come first, when nothing is in the allocator's cache, and last, when it is cut up.

        Args:
            workload: what is trained.
            seed: of the lengths.
            multiple: of what they must be multiples.
        """
        if not varies(workload):
            return [None] * (self.steps + 2)
        assert isinstance(workload.batch, TokenBatches)
        longest = workload.batch.seq_len
        least = max(math.ceil(self.shortest * longest), 2)
        random = Random(seed)
        drawn = [random.randint(min(least, longest), longest) for _ in range(self.steps)]
        even = [min(longest, math.ceil(length / multiple) * multiple) for length in drawn]
        return [longest, *even, longest]

    def measuring(self, plan: TimingPlan) -> TimingPlan:
        """How the candidate is measured before, which it was at length already."""
        return replace(plan, seconds=0.0, max_steps=plan.min_steps)

    def seconds(self, step_ms: float) -> float:
        """What it may take on top of a dry run, compilation apart, s.

        Args:
            step_ms: what a step takes, measured.
        """
        return SLACK * (self.steps + 2) * step_ms / 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakReport:
    """What a rank found out in a soak."""

    steps: int
    """Steps made."""
    shortest: int | None
    """Tokens of the shortest sample; None where all are alike."""
    longest: int | None
    """Of the longest."""
    seconds: float
    """All of it, compilation included, s."""
    seconds_compile: float
    """Compilation, s."""
    compiled: int
    """Steps in which something was compiled."""
    refused: bool
    """Whether torch.compile gave up on some of it, which ran uncompiled from then on."""
    loss: float
    """Loss of the last step, or the sum of all where that is no finite number."""

    @property
    def words(self) -> str:
        """What was done."""
        of = f" of {self.shortest:,} to {self.longest:,} tokens" if self.longest is not None else " of fresh data"
        anew = f", {self.compiled} of which compiled for {self.seconds_compile:.0f} s" if self.compiled else ""
        refused = ", and further lengths ran uncompiled, as torch.compile gave up on them" if self.refused else ""
        return f"{self.steps} steps{of}{anew}{refused}"


def varies(workload: Workload) -> bool:
    """Whether its samples may have fewer tokens."""
    return isinstance(workload.batch, TokenBatches) and workload.batch.seq_len > 2


def soak(training: "Training", plan: SoakPlan, seed: int, compiled: Callable[[], float]) -> SoakReport:
    """Trains on batches of the plan's lengths. Every rank calls it alike.

    Args:
        training: the candidate, built.
        plan: how long, and on what.
        seed: of the lengths, the same on all ranks.
        compiled: seconds that this rank has compiled so far.
    """
    import torch

    from ..schedule.primitives.modules import refusals

    world = training.world
    multiple = (
        world.sp * world.cp * (2 if world.cp > 1 else 1) * (world.tp if training.config.get("sequence_parallel") else 1)
    )
    lengths = plan.lengths(training.workload, seed, multiple)
    begin, before, anew = time.perf_counter(), compiled(), 0
    given_up = refusals() if training.compiled else 0
    losses = []
    for number, length in enumerate(lengths):
        known = compiled()
        losses.append(training.passes(_batches(training, number, length)))
        training.update()
        anew += compiled() > known
    values = torch.stack(losses).double()
    last, total = float(values[-1]), float(values.sum())  # waits for the device
    told = [length for length in lengths if length is not None]
    return SoakReport(
        steps=len(lengths),
        shortest=min(told, default=None),
        longest=max(told, default=None),
        seconds=time.perf_counter() - begin,
        seconds_compile=compiled() - before,
        compiled=anew,
        refused=training.compiled and refusals() > given_up,
        loss=last if math.isfinite(total) else total,
    )


def _batches(training: "Training", number: int, length: int | None) -> list[Batch]:
    """This replica's micro-batches of a step, on the device; for a pipeline, these as one batch."""
    workload, world, micro = training.workload, training.world, training.micro_batch
    if length is not None:
        assert isinstance(workload.batch, TokenBatches)
        workload = replace(workload, seq_len=length, batch=replace(workload.batch, seq_len=length))
    whole = make_batch(workload, training.samples_per_step, training.seed_of(BEYOND + number))
    share = micro * training.grad_accum
    mine = to_device(batch_slice(whole, world.dp_rank * share, (world.dp_rank + 1) * share), training.device)
    if world.pp > 1:
        return [mine]
    return [batch_slice(mine, at * micro, (at + 1) * micro) for at in range(training.grad_accum)]
