"""What an emulated rank of a trial does: it builds, warms up and steps as a real one, alone, and hands over what it recorded."""

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from ..training import Training
from .compiling import Compilation
from .dry_run import DryRun
from .rank import RankContext
from .timing import Clock, CudaClock, TimingPlan, measure

if TYPE_CHECKING:
    import torch

    from ..training.emulation import Recorder, StepTrace

MOST_STEPS = 12
"""Measured steps that are recorded: a training of a thousand communications takes 0.05 MiB a step to note."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedReport:
    """What an emulated rank found out."""

    traces: "tuple[StepTrace, ...]"
    """Of the measured steps; empty where only memory was asked for."""
    samples_per_step: int
    """Samples of one optimizer step over all ranks."""
    tokens_per_step: int | None
    """Tokens of it; None where the data has none."""
    flops_per_step: float | None
    """Model FLOPs of it over all ranks; None where they could not be counted."""
    seconds_build: float
    seconds_compile: float
    seconds_warmup: float
    seconds_measure: float
    peak_memory_mib: float
    peak_allocated_mib: float | None
    allocation_retries: int
    build_memory_mib: float
    messages: int
    """Collectives in all."""
    groups: int
    """Groups in which it communicated."""
    finite: bool
    """Whether what it computed stayed finite, as it has to for kernels to run at their speed."""


@dataclass(frozen=True, kw_only=True)
class EmulatedDryRun(DryRun):
    """A program for one rank of a trial whose other ranks do not exist."""

    memory_only: bool = False
    """Whether it takes no more steps than the peak of memory needs."""

    def __call__(self, context: RankContext) -> EmulatedReport:  # type: ignore[override]
        import torch

        from ..training.emulation import Recorder, WithoutProducts, join_emulated

        begin = time.perf_counter()
        compilation = Compilation(context.compiling, elsewhere=False)
        on_cpu = context.device_type == "cpu"
        device = torch.device(context.device_type, None if on_cpu else context.local_rank)
        # With several threads the thread that steps waits for the others of its rank.
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        recorder = Recorder(context.rank, device, clock)
        join_emulated(context.rank, context.world_size, recorder)
        training = self._built(context)
        seconds_build = time.perf_counter() - begin
        build_memory_mib = context.memory.peak_mib()
        retries_before = context.memory.allocation_retries()
        if not self.memory_only:
            self._probe(training, context, compilation)
        context.phase("first steps")
        steps = _Recorded(training, recorder, FEW if self.memory_only else None)
        # Compiled code runs as it is.
        skips = self.memory_only and on_cpu and not training.compiled
        with recorder.watching_streams(), WithoutProducts() if skips else nullcontext():
            timing = measure(
                steps,
                CudaClock() if not on_cpu else _RecorderClock(recorder),
                SHORTEST if self.memory_only else self.plan_of(self.plan),
                compiled=lambda: compilation.seconds,
                settled=compilation.settled,
                measuring=recorder.forget,
            )
        return EmulatedReport(
            traces=() if self.memory_only else recorder.traces(),
            samples_per_step=training.samples_per_step,
            tokens_per_step=training.tokens_per_step,
            flops_per_step=training.flops_per_step(),
            seconds_build=seconds_build,
            seconds_compile=timing.seconds_compile,
            seconds_warmup=timing.seconds_warmup,
            seconds_measure=timing.seconds_measure,
            peak_memory_mib=context.memory.peak_mib(),
            peak_allocated_mib=context.memory.peak_allocated_mib(),
            allocation_retries=context.memory.allocation_retries() - retries_before,
            build_memory_mib=build_memory_mib,
            messages=recorder.messages,
            groups=len(recorder.groups),
            finite=steps.finite,
        )

    @staticmethod
    def plan_of(plan: TimingPlan) -> TimingPlan:
        """A plan whose recorded steps take little memory."""
        return replace(plan, max_steps=min(plan.max_steps, MOST_STEPS))

    def _probe(self, training: Training, context: RankContext, compilation: Compilation) -> None:
        """What a real rank computes before its first step. A CPU's peak contains it, so an emulated rank computes it too; what
        comes of it means nothing, as its peers' parts are missing."""
        from ..training.first_step import first_step
        from ..training.probe import take

        context.phase("probe")
        compilation.expected()
        with context.memory.aside():
            take(training)
        first_step(training)

    def _join(self, context: RankContext) -> None:
        """The group is there already."""


SHORTEST = TimingPlan(warmup_min_steps=1, warmup_max_steps=1, min_steps=1, max_steps=1)
"""Two steps: the optimizer's states come with the first, so that the second has the peak."""


FEW = 2
"""Micro-batches of a step of which memory alone is measured: gradients of the first are there while the second is computed."""


class _Recorded:
    """Steps of a training, recorded."""

    def __init__(self, training: Training, recorder: "Recorder", micro_batches: int | None = None) -> None:
        self._training, self._recorder, self._few = training, recorder, micro_batches
        self._loss: torch.Tensor | None = None

    def __call__(self) -> None:
        self._recorder.begin_step()
        self._loss = self._training.step() if self._few is None else self._training.short_step(self._few)
        self._recorder.end_step()

    @property
    def finite(self) -> bool:
        """Whether the last loss and all weights are finite; waits for the device."""
        import torch

        held = [each.detach() for each in self._training.model.parameters() if not each.is_meta]
        local = [each.to_local() if hasattr(each, "to_local") else each for each in held]
        found = [bool(torch.isfinite(each).all()) for each in (*local, self._loss) if each is not None]
        return all(found)


class _RecorderClock(Clock):
    """The clock by which steps are recorded, so that they are steady by the same one."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder

    def mark(self) -> float:
        return float(self._recorder.now())

    def read(self, marks: "list[float]") -> list[float]:  # type: ignore[override]
        return [(after - before) * 1e3 for before, after in pairwise(marks)]
