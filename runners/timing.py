"""When a step time is steady, and when it is known well enough."""

import itertools
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..results.again import median_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingPlan:
    """How long to warm up and to measure."""

    compile_max_steps: int = 10
    """Steps in which something compiles and that are left out; what goes on compiling is as slow as that."""
    warmup_min_steps: int = 2
    """Steps that never count; the first ones allocate."""
    warmup_max_steps: int = 10
    """Steps after which a time that still moves is measured as it is."""
    warmup_seconds: float = 10.0
    """Warm-up ends after this long even if unsteady (never before `warmup_min_steps`)."""
    steady_within: float = 0.05
    """Two successive steps this close (relative) are steady."""
    min_steps: int = 3
    """Steps measured at least."""
    max_steps: int = 200
    """Steps measured at most."""
    seconds: float = 3.0
    """Budget of the measurement (never fewer than `min_steps`)."""
    precision: float = 0.02
    """Relative half-width of the median's 95 % confidence interval at which measuring ends."""
    slow_factor: float = 1.5
    """A candidate whose steady step takes this many times the best so far stops after the warm-up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The step time of one candidate."""

    step_ms: float
    """Median, ms."""
    spread_ms: float
    """Half-width of the 95 % confidence interval of the median, ms."""
    steps: int
    """Steps measured."""
    warmup_steps: int
    """Steps before them."""
    seconds_warmup: float
    """Wall time of the warm-up, s."""
    seconds_measure: float
    """Wall time of the measured steps, s."""
    seconds_compile: float = 0.0
    """Wall time of the steps in which some rank compiled, which are part of neither, s."""
    stopped_early: str = ""
    """Why the measurement was cut short; empty if it was not."""
    turns_ms: tuple[float, ...] = ()
    """Median step of each turn, where the candidate took turns with others, ms."""


def median_interval(times: Sequence[float]) -> tuple[float, float]:
    """Median and half-width of its distribution-free 95 % confidence interval, in the unit of `times`.

    The interval runs between two order statistics whose ranks come from the binomial distribution
    (`median_rank`). Below six values no such interval reaches 95 % and the whole range stands in.
    """
    ordered = sorted(times)
    n = len(ordered)
    if n == 0:
        raise ValueError("median_interval needs at least one value")
    low = median_rank(n)
    return statistics.median(ordered), (ordered[n - 1 - low] - ordered[low]) / 2


class Clock(ABC):
    """Marks moments on a device and tells the milliseconds between them."""

    chunk_seconds: float = 0.0
    """How much work may be queued between two readings, s."""

    @abstractmethod
    def mark(self) -> Any:
        """A moment, after all work issued so far."""

    @abstractmethod
    def read(self, marks: Sequence[Any]) -> list[float]:
        """Milliseconds between successive marks; waits until the last one has passed."""


class HostClock(Clock):
    """The CPU: work is done when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def read(self, marks: Sequence[float]) -> list[float]:
        return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]


class CudaClock(Clock):
    """CUDA events, so that measuring never drains the queue between steps."""

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
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


class Turns(Protocol):
    """When a candidate may run that takes turns with others."""

    seconds: float
    """How long a turn is, s."""

    def wait(self) -> bool:
        """Blocks until its next turn; False when all are over."""

    def begin(self) -> None:
        """Every rank has its turn."""

    def end(self) -> None:
        """The turn is over; the first one with the warm-up."""


def measure(
    step: Callable[[], object],
    clock: Clock,
    plan: TimingPlan,
    *,
    best_step_ms: float | None = None,
    agree: Callable[[list[float]], list[float]] = lambda values: values,
    compiled: Callable[[], float] = lambda: 0.0,
    settled: Callable[[], None] = lambda: None,
    turns: Turns | None = None,
) -> Timing:
    """Runs `step` until its time is known, or in turns with other candidates until these are over.

    Steps in which any rank compiles count neither as warm-up nor as measured, and their time is kept apart.

    Args:
        step: one optimizer step.
        clock: marks its beginning and end on the device.
        plan: how long and how precisely.
        best_step_ms: the time of the best candidate so far for the same work, ms.
        agree: elementwise maximum over all ranks, so that every rank counts the slowest and takes the
            same decisions (each rank must run the same number of steps).
        compiled: seconds that this rank has compiled so far.
        settled: called once, when every rank has made a step without compiling.
        turns: when it may run; it warms up as it would alone.
    """
    begin = time.perf_counter()
    compiling = _Compiling(plan.compile_max_steps)

    def timed(count: int) -> tuple[list[float], float]:
        """Milliseconds of so many steps without compilation, and seconds of all such steps so far."""
        while True:
            before = compiled()
            marks = [clock.mark()]
            for _ in range(count):
                step()
                marks.append(clock.mark())
            *times, elapsed, within = agree([*clock.read(marks), time.perf_counter() - begin, compiled() - before])
            if not compiling.left_out(count, elapsed, within):
                return times, elapsed - compiling.seconds

    warm: list[float] = []
    while True:
        times, elapsed = timed(1)
        if not warm:
            settled()
        warm += times
        if len(warm) < plan.warmup_min_steps:
            continue
        if len(warm) >= plan.warmup_max_steps or elapsed >= plan.warmup_seconds:
            break
        if len(warm) > 1 and abs(warm[-1] - warm[-2]) <= plan.steady_within * warm[-1]:
            break
        # Far slower than the best even now: no further warming will make it the winner.
        if best_step_ms is not None and min(warm[-2:]) > 3 * best_step_ms and len(warm) > plan.warmup_min_steps:
            break
    seconds_warmup = elapsed

    if best_step_ms is not None:
        steady = min(warm[1:] or warm)
        if steady > plan.slow_factor * best_step_ms:
            tail = warm[1:] or warm
            median, half = median_interval(tail)
            return Timing(
                step_ms=median,
                spread_ms=half,
                steps=len(tail),
                warmup_steps=len(warm) - len(tail),
                seconds_warmup=seconds_warmup,
                seconds_measure=0.0,
                seconds_compile=compiling.seconds,
                stopped_early=f"stopped early: {steady / best_step_ms:.1f} times the step time of the best so far",
            )

    taken: list[float] = []
    in_turns: list[float] = []
    if turns is not None:
        turns.end()
    while turns is not None and not agree([0.0 if turns.wait() else 1.0])[0]:
        turns.begin()
        expected_ms = statistics.median(taken or warm[-1:])
        times, elapsed = timed(max(1, round(turns.seconds * 1e3 / max(expected_ms, 1e-6))))
        turns.end()
        taken += times
        in_turns.append(statistics.median(times))
        median, half = median_interval(taken)
    while turns is None:
        expected_ms = statistics.median(taken or warm[-1:])
        chunk = max(1, min(50, int(clock.chunk_seconds * 1e3 / max(expected_ms, 1e-6))))
        times, elapsed = timed(min(chunk, plan.max_steps - len(taken)))
        taken += times
        median, half = median_interval(taken)
        if len(taken) < plan.min_steps:
            continue
        if len(taken) >= plan.max_steps or elapsed - seconds_warmup >= plan.seconds:
            break
        if len(taken) >= 6 and half <= plan.precision * median:
            break
    return Timing(
        step_ms=median,
        spread_ms=half,
        steps=len(taken),
        warmup_steps=len(warm),
        seconds_warmup=seconds_warmup,
        seconds_measure=elapsed - seconds_warmup,
        seconds_compile=compiling.seconds,
        turns_ms=tuple(in_turns),
    )


class _Compiling:
    """The steps that are left out because some rank compiled in them."""

    def __init__(self, most: int) -> None:
        self.seconds = 0.0
        self._left, self._until = most, 0.0

    def left_out(self, steps: int, elapsed: float, compiled: float) -> bool:
        """Whether the last steps, up to `elapsed` seconds, are left out; as every rank decides."""
        out = compiled > 0 and self._left > 0
        if out:
            self._left -= steps
            self.seconds += elapsed - self._until
        self._until = elapsed
        return out
