"""The soak of a candidate: many steps over batches of varied lengths, as in real data.

All steps of a dry run are alike. Some problems of a training do not show in them: a cache of the allocator fragmented
by blocks of many sizes, code that is recompiled for another shape, state that a model accumulates.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from ...models.batches import batch_slice, make_batch, to_device
from ...models.data import TokenBatches
from ...models.workload import Batch, Workload
from .timing import TimingPlan

if TYPE_CHECKING:
    from ...training import Training

BEYOND = 1_000_000
"""Step number of the first step of a soak, which determines its data: different from that of all measured steps."""
SLACK = 3.0
"""Time limit of a step of a soak as a multiple of the measured step time. Most steps are shorter."""
COMPILED_ANEW = 8
"""Number of lengths for which the same code is compiled, `torch.compiler.config.recompile_limit`; further ones run
uncompiled.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakPlan:
    """Length and data of a soak."""

    steps: int = 200
    """Steps of varied lengths, besides one of the longest before and another after them."""
    shortest: float = 0.125
    """The shortest length, as a share of the workload's sequence length."""
    compiling_s: float = 0.0
    """Time of the candidate's compilations when it was measured, s."""

    @property
    def compile_timeout_s(self) -> float:
        """Time limit of compilations in addition to those of a dry run, s."""
        return COMPILED_ANEW * self.compiling_s

    def lengths(self, workload: Workload, seed: int, multiple: int = 1) -> list[int | None]:
        """Returns the tokens per sample of each step, multiples of `multiple`; None if the workload's samples have a
        fixed length.

        The longest come first, when the allocator's cache is empty, and last, when it is fragmented.
        """
        if not varies(workload):
            return [None] * (self.steps + 2)
        assert isinstance(workload.batch, TokenBatches)
        longest = workload.batch.seq_len
        shortest = max(math.ceil(self.shortest * longest), 2)
        random = Random(seed)
        random_lengths = [random.randint(min(shortest, longest), longest) for _ in range(self.steps)]
        divisible = [min(longest, math.ceil(length / multiple) * multiple) for length in random_lengths]
        return [longest, *divisible, longest]

    def measuring(self, plan: TimingPlan) -> TimingPlan:
        """Returns a short timing plan for the measurement before the soak, since the candidate has been measured at
        length already.
        """
        return replace(plan, seconds=0.0, max_steps=plan.min_steps)

    def seconds(self, step_ms: float) -> float:
        """Returns the time limit in addition to that of a dry run, without compilation, s."""
        return SLACK * (self.steps + 2) * step_ms / 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakReport:
    """The results of one rank of a soak."""

    steps: int
    shortest: int | None
    """Tokens of the shortest sample; None if samples have a fixed length."""
    longest: int | None
    seconds: float
    """Total time, including compilation, s."""
    seconds_compile: float
    compiled: int
    """Number of steps in which code was compiled."""
    refused: bool
    """True if torch.compile gave up on some code, which ran uncompiled from then on."""
    loss: float
    """Loss of the last step, or the sum of all losses if that is not finite."""

    @property
    def summary(self) -> str:
        """One line for the notes of a measurement."""
        data = f" of {self.shortest:,} to {self.longest:,} tokens" if self.longest is not None else " of fresh data"
        compilations = (
            f", {self.compiled} of them with {self.seconds_compile:.0f} s of compilation" if self.compiled else ""
        )
        uncompiled = ", further lengths ran uncompiled because torch.compile gave up on them" if self.refused else ""
        return f"{self.steps} steps{data}{compilations}{uncompiled}"


def varies(workload: Workload) -> bool:
    """True if the workload's samples may have fewer tokens."""
    return isinstance(workload.batch, TokenBatches) and workload.batch.seq_len > 2


def soak(training: "Training", plan: SoakPlan, seed: int, compiled: Callable[[], float]) -> SoakReport:
    """Trains on batches of the plan's lengths. Every rank must call this.

    Args:
        training: the candidate, built.
        plan: length and data.
        seed: of the lengths, the same on all ranks.
        compiled: returns the time that this rank has compiled so far, s.
    """
    import torch

    from ...schedule.primitives.modules import refusals

    world = training.world
    multiple = (
        world.sp * world.cp * (2 if world.cp > 1 else 1) * (world.tp if training.config.get("sequence_parallel") else 1)
    )
    lengths = plan.lengths(training.workload, seed, multiple)
    begin, compiled_before, num_compiled = time.perf_counter(), compiled(), 0
    refusals_before = refusals() if training.compiled else 0
    losses = []
    for number, length in enumerate(lengths):
        compiled_so_far = compiled()
        losses.append(training.passes(_batches(training, number, length)))
        training.update()
        num_compiled += compiled() > compiled_so_far
    values = torch.stack(losses).double()
    last_loss, sum_of_losses = float(values[-1]), float(values.sum())  # waits for the device
    varied = [length for length in lengths if length is not None]
    return SoakReport(
        steps=len(lengths),
        shortest=min(varied, default=None),
        longest=max(varied, default=None),
        seconds=time.perf_counter() - begin,
        seconds_compile=compiled() - compiled_before,
        compiled=num_compiled,
        refused=training.compiled and refusals() > refusals_before,
        loss=last_loss if math.isfinite(sum_of_losses) else sum_of_losses,
    )


def _batches(training: "Training", number: int, length: int | None) -> list[Batch]:
    """Returns this replica's micro-batches of a step, on the device; for a pipeline, a single batch of all."""
    workload, world, micro = training.workload, training.world, training.micro_batch
    if length is not None:
        assert isinstance(workload.batch, TokenBatches)
        workload = replace(workload, seq_len=length, batch=replace(workload.batch, seq_len=length))
    global_batch = make_batch(workload, training.samples_per_step, training.seed_of(BEYOND + number))
    share = micro * training.grad_accum
    local_batch = to_device(
        batch_slice(global_batch, world.dp_rank * share, (world.dp_rank + 1) * share), training.device
    )
    if world.pp > 1:
        return [local_batch]
    return [batch_slice(local_batch, index * micro, (index + 1) * micro) for index in range(training.grad_accum)]
