"""Program of an emulated rank: it builds, warms up and steps like a real rank, without peers, and returns its record."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from ...training import Training
from ...training.training import SHORT_STEPS
from .compiling import Compilation
from .dry_run import DryRun
from .rank import RankContext
from .timing import Clock, CudaClock, TimingPlan, measure

if TYPE_CHECKING:
    import torch

    from ...training.emulation import Recorder, StepTrace

MOST_STEPS = 12
"""Maximum number of recorded steps: a step of a thousand communications takes 0.05 MiB to record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedReport:
    """Results of an emulated rank."""

    traces: "tuple[StepTrace, ...]"
    """One for each measured step; empty if only memory was measured."""
    samples_per_step: int
    """Samples of one optimizer step over all ranks."""
    tokens_per_step: int | None
    """Tokens of one optimizer step over all ranks; None if the data has no tokens."""
    flops_per_step: float | None
    """Model FLOPs of one optimizer step over all ranks; None if they could not be counted."""
    seconds_build: float
    seconds_compile: float
    seconds_warmup: float
    seconds_measure: float
    peak_memory_mib: float
    peak_allocated_mib: float | None
    allocation_retries: int
    build_memory_mib: float
    messages: int
    """Number of collectives."""
    groups: int
    """Number of groups that the rank communicated in."""
    finite: bool
    """True if the results stayed finite, which kernels need to run at their usual speed."""


@dataclass(frozen=True, kw_only=True)
class EmulatedDryRun(DryRun):
    """Program of one rank of a trial without its peers."""

    memory_only: bool = False
    """True to take only as many steps as the peak of memory needs."""

    def __call__(self, context: RankContext) -> EmulatedReport:  # type: ignore[override]
        import torch

        from ...training.emulation import Recorder, WithoutProducts, join_emulated

        begin = time.perf_counter()
        compilation = Compilation(context.compiling, elsewhere=False)
        on_cpu = context.device_type == "cpu"
        device = torch.device(context.device_type, None if on_cpu else context.local_rank)
        # With several threads, the stepping thread waits for the others of its rank.
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        recorder = Recorder(context.rank, device, clock)
        join_emulated(context.rank, context.world_size, recorder)
        training = self._built(context)
        seconds_build = time.perf_counter() - begin
        build_memory_mib = context.memory.peak_mib()
        retries_so_far = context.memory.allocation_retries()
        if not self.memory_only:
            self._probe(training, context, compilation)
        context.phase("first steps")
        steps = _Recorded(training, recorder, SHORT_STEPS if self.memory_only else ())
        # Compiled code does not call the products that `WithoutProducts` replaces.
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
            allocation_retries=context.memory.allocation_retries() - retries_so_far,
            build_memory_mib=build_memory_mib,
            messages=recorder.messages,
            groups=len(recorder.groups),
            finite=steps.finite,
        )

    @staticmethod
    def plan_of(plan: TimingPlan) -> TimingPlan:
        """Returns a plan with at most `MOST_STEPS` measured steps, whose records take memory."""
        return replace(plan, max_steps=min(plan.max_steps, MOST_STEPS))

    def _probe(self, training: Training, context: RankContext, compilation: Compilation) -> None:
        """Runs the computation of a real rank before its first step. A CPU's peak contains it, so an emulated rank runs it too;
        the result is meaningless without the peers' parts."""
        from ...training.probe import first_step, take

        context.phase("probe")
        compilation.expected()
        with context.memory.aside():
            take(training)
        first_step(training)

    def _join(self, context: RankContext) -> None:
        """Does nothing: the group exists already."""


SHORTEST = TimingPlan(warmup_min_steps=1, warmup_max_steps=1, min_steps=1, max_steps=1)
"""One step of warm-up and one measured, as many as `SHORT_STEPS`: the second one has the peak of memory."""


class _Recorded:
    """Steps of a training, recorded; the first ones with few micro-batches if requested."""

    def __init__(self, training: Training, recorder: "Recorder", micro_batches: Sequence[int] = ()) -> None:
        self._training, self._recorder, self._short_steps = training, recorder, list(micro_batches)
        self._loss: torch.Tensor | None = None

    def __call__(self) -> None:
        self._recorder.begin_step()
        self._loss = self._training.short_step(self._short_steps.pop(0)) if self._short_steps else self._training.step()
        self._recorder.end_step()

    @property
    def finite(self) -> bool:
        """True if the last loss and all weights are finite; waits for the device."""
        import torch

        parameters = [parameter.detach() for parameter in self._training.model.parameters() if not parameter.is_meta]
        local = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in parameters]
        finite = [bool(torch.isfinite(tensor).all()) for tensor in (*local, self._loss) if tensor is not None]
        return all(finite)


class _RecorderClock(Clock):
    """The recorder's clock, so that the steady state is detected by the same clock that records the steps."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder

    def mark(self) -> float:
        return float(self._recorder.now())

    def read(self, marks: "list[float]") -> list[float]:  # type: ignore[override]
        return [(later - earlier) * 1e3 for earlier, later in pairwise(marks)]
