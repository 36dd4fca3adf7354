"""Measures step times: warm-up until they are steady, then steps until their median is known precisely enough."""

import itertools
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...results.summary import median_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingPlan:
    """Durations of warm-up and measurement."""

    compile_max_steps: int = 10
    """Number of steps that may be left out because something compiles in them. Further compilation counts as step time."""
    warmup_min_steps: int = 2
    """Steps that never count, since the first ones allocate."""
    warmup_max_steps: int = 10
    """Steps after which warm-up ends even if step times still change."""
    warmup_seconds: float = 10.0
    """Time after which warm-up ends even if step times still change (never before `warmup_min_steps`), s."""
    steady_within: float = 0.05
    """Relative difference of two successive steps below which they are steady."""
    min_steps: int = 3
    max_steps: int = 200
    seconds: float = 3.0
    """Time budget of the measurement (never fewer than `min_steps`), s."""
    precision: float = 0.02
    """Relative half-width of the median's 95 % confidence interval at which the measurement ends."""
    settle_seconds: float = 0.0
    """Longest time of unmeasured steps before the measurement, until step times no longer change, s. A GPU lowers its
    clocks as it gets warm and reaches its power limit.
    """
    slow_factor: float = 1.5
    """A candidate whose steady step takes more than this many times the best so far stops after the warm-up."""


WINDOW_S, WINDOWS, SETTLED_WITHIN = 2.0, 3, 0.005
"""Clocks have settled when the median step times of the last `WINDOWS` windows of `WINDOW_S` seconds differ by at
most this (relative).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The step time of one candidate."""

    step_ms: float
    """Median, ms."""
    spread_ms: float | None
    """Half-width of the 95 % confidence interval of the median, ms; None if only one step was measured."""
    steps: int
    """Number of measured steps."""
    warmup_steps: int
    """Number of steps before them."""
    seconds_warmup: float
    seconds_measure: float
    seconds_settle: float = 0.0
    """Time until clocks had settled, part of the warm-up, s."""
    seconds_compile: float = 0.0
    """Wall time of steps in which any rank compiled, part of neither warm-up nor measurement, s."""
    stopped_early: str | None = None
    """Why the measurement was cut short; None if it was not."""


def median_interval(times: Sequence[float]) -> tuple[float, float]:
    """Returns the median and the half-width of its distribution-free 95 % confidence interval, in the unit of
    `times`.

    The interval is between two order statistics whose ranks come from the binomial distribution (`median_rank`). Below
    six values no such interval reaches 95 %, and the whole range is used.
    """
    ordered = sorted(times)
    n = len(ordered)
    if n == 0:
        raise ValueError("median_interval needs at least one value")
    low = median_rank(n)
    return statistics.median(ordered), (ordered[n - 1 - low] - ordered[low]) / 2


class Clock(ABC):
    """Marks moments on a device and measures the milliseconds between them."""

    chunk_seconds: float = 0.0
    """Amount of work that may be queued between two readings, s."""

    @abstractmethod
    def mark(self) -> Any:
        """Returns a mark after all work issued so far."""

    @abstractmethod
    def read(self, marks: Sequence[Any]) -> list[float]:
        """Returns the milliseconds between successive marks; waits until the last one has passed."""


class HostClock(Clock):
    """A clock for the CPU, where work is done when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def read(self, marks: Sequence[float]) -> list[float]:
        return [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(marks)]


class CudaClock(Clock):
    """A clock of CUDA events, so that measuring never drains the queue between steps."""

    chunk_seconds = 0.25

    def __init__(self) -> None:
        import torch

        self._event = torch.cuda.Event

    def mark(self) -> Any:
        event = self._event(enable_timing=True)
        event.record()
        return event

    def read(self, marks: Sequence[Any]) -> list[float]:
        marks[-1].synchronize()
        return [earlier.elapsed_time(later) for earlier, later in itertools.pairwise(marks)]


def measure(
    step: Callable[[], object],
    clock: Clock,
    plan: TimingPlan,
    *,
    best_step_ms: float | None = None,
    agree: Callable[[list[float]], list[float]] = lambda values: values,
    compiled: Callable[[], float] = lambda: 0.0,
    mean: Callable[[list[float]], list[float]] = lambda values: values,
    settled: Callable[[], None] = lambda: None,
    measuring: Callable[[], None] = lambda: None,
) -> Timing:
    """Runs `step` until its time is known.

    Steps in which any rank compiles count neither as warm-up nor as measured; their time is recorded separately.

    Args:
        step: one optimizer step.
        clock: marks its beginning and end on the device.
        plan: durations and precision.
        best_step_ms: the time of the best candidate so far for the same work, ms.
        agree: elementwise maximum over all ranks, so that every rank counts the slowest and makes the same decisions
            (each rank must run the same number of steps).
        mean: elementwise mean over all ranks.
        compiled: returns the time that this rank has compiled so far, s.
        settled: called once, when every rank has made a step without compiling.
        measuring: called when the measured steps begin.
    """
    timed = _Timed(step, clock, agree, mean, compiled, plan.compile_max_steps)
    warm = _warm_up(timed, plan, best_step_ms, settled)
    seconds_warmup = timed.seconds
    steady = warm[1:] or warm  # the first step allocates
    if best_step_ms is not None and min(steady) > plan.slow_factor * best_step_ms:
        median, half_width = median_interval(steady)
        return Timing(
            step_ms=median,
            spread_ms=half_width if len(steady) > 1 else None,
            steps=len(steady),
            warmup_steps=len(warm) - len(steady),
            seconds_warmup=seconds_warmup,
            seconds_measure=0.0,
            seconds_compile=timed.seconds_compile,
            stopped_early=f"stopped early: {min(steady) / best_step_ms:.1f} times the step time of the best so far",
        )
    # Restarted before each part: a rank's lead in one must not scale the steps of the next.
    timed.restart()
    seconds_settle = _settle(timed, plan, clock.chunk_seconds, warm[-1])
    seconds_warmup = timed.seconds
    timed.restart()
    measuring()
    step_times = _measure(timed, plan, clock.chunk_seconds, warm[-1])
    median, half_width = median_interval(step_times)
    return Timing(
        step_ms=median,
        spread_ms=half_width if len(step_times) > 1 else None,
        steps=len(step_times),
        warmup_steps=len(warm),
        seconds_warmup=seconds_warmup,
        seconds_measure=timed.seconds - seconds_warmup,
        seconds_settle=seconds_settle,
        seconds_compile=timed.seconds_compile,
    )


class _Timed:
    """Runs steps and measures them, without compilation; see `measure`."""

    def __init__(
        self,
        step: Callable[[], object],
        clock: Clock,
        agree: Callable[[list[float]], list[float]],
        mean: Callable[[list[float]], list[float]],
        compiled: Callable[[], float],
        compile_max_steps: int,
    ) -> None:
        self._step, self._clock, self._agree, self._mean, self._compiled = step, clock, agree, mean, compiled
        self._compile_steps_left, self._previous_elapsed = compile_max_steps, 0.0
        self._begin = time.perf_counter()
        self._total_ms, self._mean_total_ms = 0.0, 0.0
        self.seconds = 0.0
        """Time from the beginning to the last step, without steps in which any rank compiled, s."""
        self.seconds_compile = 0.0
        """Time of the steps in which any rank compiled, s."""

    def __call__(self, count: int) -> list[float]:
        """Runs `count` steps and returns the milliseconds of each. Their sum is that of the slowest rank.

        Each is the mean over ranks, scaled by the ratio of the slowest rank's total since `restart` to the mean total.
        The maximum over ranks of each step would count a delay that passes from rank to rank, as between stages of a
        pipeline, once for every rank.
        """
        while True:
            compiled_before = self._compiled()
            marks = [self._clock.mark()]
            for _ in range(count):
                self._step()
                marks.append(self._clock.mark())
            times = self._clock.read(marks)  # waits for the device
            elapsed, compile_s = time.perf_counter() - self._begin, self._compiled() - compiled_before
            total_ms, means = self._total_ms + sum(times), self._mean(times)
            slowest_ms, elapsed, compile_s = self._agree([total_ms, elapsed, compile_s])
            previous_elapsed, self._previous_elapsed = self._previous_elapsed, elapsed
            if compile_s > 0 and self._compile_steps_left > 0:  # all ranks decide alike
                self._compile_steps_left -= count
                self.seconds_compile += elapsed - previous_elapsed
                continue
            self.seconds = elapsed - self.seconds_compile
            self._total_ms, self._mean_total_ms = total_ms, self._mean_total_ms + sum(means)
            scale = slowest_ms / max(self._mean_total_ms, 1e-12)
            return [mean * scale for mean in means]

    def restart(self) -> None:
        """Resets the totals by which steps are scaled."""
        self._total_ms = self._mean_total_ms = 0.0


def _warm_up(timed: _Timed, plan: TimingPlan, best_step_ms: float | None, settled: Callable[[], None]) -> list[float]:
    """Runs steps until their time is steady, and returns their times, ms."""
    warm = timed(1)
    settled()
    while True:
        if len(warm) >= plan.warmup_min_steps:
            if len(warm) >= plan.warmup_max_steps or timed.seconds >= plan.warmup_seconds:
                return warm
            if len(warm) > 1 and abs(warm[-1] - warm[-2]) <= plan.steady_within * warm[-1]:
                return warm
            # Far slower than the best: further warm-up cannot make it the winner.
            if best_step_ms is not None and min(warm[-2:]) > 3 * best_step_ms and len(warm) > plan.warmup_min_steps:
                return warm
        warm += timed(1)


def _settle(timed: _Timed, plan: TimingPlan, chunk_seconds: float, expected_ms: float) -> float:
    """Runs steps until their time no longer changes or `settle_seconds` are over, and returns their total time, s."""
    total_ms, medians = 0.0, list[float]()
    while total_ms < plan.settle_seconds * 1e3:
        window: list[float] = []
        while sum(window) < WINDOW_S * 1e3:
            window += timed(max(1, min(50, int(chunk_seconds * 1e3 / max(expected_ms, 1e-6)))))
        total_ms += sum(window)
        expected_ms = statistics.median(window)
        medians = [*medians, expected_ms][-WINDOWS:]
        if len(medians) == WINDOWS and max(medians) - min(medians) <= SETTLED_WITHIN * expected_ms:
            break
    return total_ms / 1e3


def _measure(timed: _Timed, plan: TimingPlan, chunk_seconds: float, expected_ms: float) -> list[float]:
    """Runs steps until their median is known, and returns their times, ms."""
    begin, step_times = timed.seconds, list[float]()
    while True:
        # As many steps as the device may have queued: reading the clock after each would drain the queue.
        chunk = max(1, min(50, int(chunk_seconds * 1e3 / max(expected_ms, 1e-6))))
        step_times += timed(min(chunk, plan.max_steps - len(step_times)))
        expected_ms, half_width = median_interval(step_times)
        if len(step_times) < plan.min_steps:
            continue
        if len(step_times) >= plan.max_steps or timed.seconds - begin >= plan.seconds:
            return step_times
        if len(step_times) >= 6 and half_width <= plan.precision * expected_ms:
            return step_times
