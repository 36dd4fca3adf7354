"""The program of a trial's ranks: builds the candidate, warms it up, times it and reports."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...models import Workload
from ...space import Config
from ...training import Training
from ...training.probe import ProbePart, StepPart, first_step, take
from .compiling import Compilation
from .rank import RankContext
from .timing import Clock, CudaClock, HostClock, TimingPlan, measure


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRunReport:
    """The measurements of one rank."""

    step_ms: float
    """Median time of one optimizer step of the slowest rank, ms."""
    spread_ms: float | None
    """Half-width of its 95 % confidence interval, ms; None if only one step was measured."""
    steps: int
    """Number of measured steps."""
    samples_per_step: int
    """Samples per optimizer step over all ranks."""
    tokens_per_step: int | None
    """Tokens per step over all ranks; None if the data has none."""
    flops_per_step: float | None
    """Model FLOPs per step over all ranks; None if they could not be counted."""
    loss: float
    """Mean loss of the first step."""
    last_loss: float
    """Loss of the last step."""
    probe: ProbePart
    """This rank's part of the probe, for the comparison with the reference."""
    first: StepPart | None
    """Values of the first step that was not skipped; None if all were."""
    seconds_build: float
    """Time to build model, schedule, weights and optimizer, s."""
    seconds_compile: float = 0.0
    """Time of the probe's compilations and of steps in which any rank compiled, s."""
    seconds_warmup: float
    """Time until steps were steady, s."""
    seconds_measure: float
    peak_memory_mib: float
    peak_allocated_mib: float | None
    """CUDA: peak of live tensors, MiB."""
    allocation_retries: int
    """CUDA: how often the allocator flushed its cache during steps, without build and probe."""
    build_memory_mib: float | None = None
    """Peak memory until model and optimizer were built, MiB."""
    outside_mib: float | None = None
    """CUDA: device memory used outside the allocator, MiB."""
    seconds_settle: float = 0.0
    """Time until the device's clocks had settled, part of the warm-up, s."""
    note: str | None = None
    """Why the measurement was cut short; None if it was not."""
    dropped: tuple[int, int] | None = None
    """Rows that experts dropped in training, and those that were routed; None without a capacity."""


class _Steps:
    """Runs optimizer steps of a training. Losses are converted to numbers only at the end, since that waits for the
    device.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self.first_loss: Any = None
        """Loss of the first step."""
        self.last_loss: Any = None
        """Loss of the latest step."""
        self.first_values: StepPart | None = None
        """Values of the first step that was not skipped."""

    def __call__(self) -> None:
        if self.first_values is None:
            self.last_loss, self.first_values = first_step(self._training)
        else:
            self.last_loss = self._training.step()
        if self.first_loss is None:
            self.first_loss = self.last_loss


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The program of the ranks of one trial. Called with the rank's context."""

    workload: Workload
    config: Config
    plan: TimingPlan = field(default_factory=TimingPlan)
    best_throughput: float | None = None
    """Best throughput so far, in the workload's unit, to stop slow candidates early."""
    seed: int = 0
    """Seed of weights and data."""

    def __call__(self, context: RankContext) -> DryRunReport:
        from ...schedule.parallel.experts import dropped_rows

        begin = time.perf_counter()
        compilation = Compilation(context.compiling, elsewhere=context.world_size > context.local_world_size)
        training = self._built(context)
        seconds_build = time.perf_counter() - begin
        build_memory_mib = context.memory.peak_mib()

        context.phase("probe")
        compilation.expected()
        # The probe needs memory that training does not.
        with context.memory.aside():
            probe = take(training)
        compiled_in_probe = compilation.seconds
        retries_so_far = context.memory.allocation_retries()

        steps = _Steps(training)
        context.phase("first steps")
        clock: Clock = CudaClock() if context.device_type == "cuda" else HostClock()
        agree, mean = _agreement(context.world_size)
        timing = measure(
            steps,
            clock,
            self.plan,
            best_step_ms=self._best_step_ms(training),
            agree=agree,
            mean=mean,
            compiled=lambda: compilation.seconds,
            settled=compilation.settled,
        )
        return DryRunReport(
            step_ms=timing.step_ms,
            spread_ms=timing.spread_ms,
            steps=timing.steps,
            samples_per_step=training.samples_per_step,
            tokens_per_step=training.tokens_per_step,
            flops_per_step=training.flops_per_step(),
            loss=float(steps.first_loss),
            last_loss=float(steps.last_loss),
            probe=probe,
            first=steps.first_values,
            seconds_build=seconds_build,
            seconds_compile=compiled_in_probe + timing.seconds_compile,
            seconds_warmup=timing.seconds_warmup,
            seconds_measure=timing.seconds_measure,
            seconds_settle=timing.seconds_settle,
            peak_memory_mib=context.memory.peak_mib(),
            build_memory_mib=build_memory_mib,
            peak_allocated_mib=context.memory.peak_allocated_mib(),
            outside_mib=context.outside_mib(),
            allocation_retries=context.memory.allocation_retries() - retries_so_far,
            note=timing.stopped_early,
            dropped=dropped_rows(training.model),
        )

    def _built(self, context: RankContext) -> Training:
        """Builds the training on this rank's device."""
        import torch

        device = torch.device(context.device_type, context.local_rank if context.device_type == "cuda" else None)
        if context.world_size > 1:
            context.phase("rendezvous")
            self._join(context)
        context.phase("build")
        training = Training(
            self.workload,
            self.config,
            device,
            seed=self.seed,
            rank=context.rank,
            world_size=context.world_size,
            collective_timeout_s=context.collective_timeout_s,
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return training

    def _join(self, context: RankContext) -> None:
        join(context)

    def _best_step_ms(self, training: Training) -> float | None:
        if not self.best_throughput:
            return None
        amount = training.tokens_per_step if self.workload.unit == "tokens/s" else training.samples_per_step
        return amount / self.best_throughput * 1e3 if amount else None


def join(context: RankContext) -> None:
    """Initialises `torch.distributed`: NCCL on GPUs, gloo on CPUs."""
    from datetime import timedelta

    import torch.distributed as dist

    seconds = context.collective_timeout_s
    dist.init_process_group(
        "nccl" if context.device_type == "cuda" else "gloo",
        init_method=context.init_method,
        rank=context.rank,
        world_size=context.world_size,
        timeout=None if seconds is None else timedelta(seconds=seconds),
    )


def _agreement(world_size: int) -> tuple[Callable[[list[float]], list[float]], Callable[[list[float]], list[float]]]:
    """Returns functions for the elementwise maximum and mean of a list over all ranks."""
    if world_size == 1:
        return (lambda values: values), (lambda values: values)
    import torch
    import torch.distributed as dist

    # NCCL needs a device tensor; reading the clock synchronises anyway.
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"

    def reduced(values: list[float], op: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()

    def mean(values: list[float]) -> list[float]:
        return [total / world_size for total in reduced(values, dist.ReduceOp.SUM)]

    return (lambda values: reduced(values, dist.ReduceOp.MAX)), mean
