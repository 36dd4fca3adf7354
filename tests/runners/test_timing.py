"""Warm-up ends when steps are steady, measurement when the median is known; slow candidates stop early."""

import itertools

import numpy as np
import pytest
from redline.runners.trial import timing as timing_module
from redline.runners.trial.timing import HostClock, TimingPlan, measure, median_interval


class ScriptedClock(HostClock):
    """A clock that advances by a script of step times in ms, so that decisions can be checked exactly."""

    def __init__(self, times):
        self._times = iter(times)
        self.now = 0.0
        self.steps = 0

    def mark(self):
        return self.now

    def step(self):
        self.steps += 1
        self.now += next(self._times) / 1e3


def run(times, **options):
    clock = ScriptedClock(times)
    plan = options.pop("plan", TimingPlan())
    return measure(clock.step, clock, plan, **options), clock


def test_warm_up_ends_when_two_steps_agree():
    timing, _ = run(itertools.chain([900, 300, 120, 101], itertools.repeat(100)))
    assert timing.warmup_steps == 5
    assert timing.step_ms == pytest.approx(100)


def test_measuring_ends_when_the_interval_is_narrow():
    timing, _ = run(itertools.repeat(100))
    assert timing.steps == 6
    assert timing.spread_ms == pytest.approx(0, abs=1e-9)


def test_a_clearly_slower_candidate_stops_after_its_warm_up_and_says_so():
    timing, clock = run(itertools.repeat(400), best_step_ms=100)
    assert clock.steps == 2
    assert timing.step_ms == 400
    assert timing.spread_ms is None, "one step has no interval"
    assert timing.stopped_early == "stopped early: 4.0 times the step time of the best so far"


def test_a_candidate_near_the_best_is_measured_in_full():
    timing, _ = run(itertools.repeat(120), best_step_ms=100)
    assert timing.stopped_early is None
    assert timing.steps >= 6


def test_every_rank_takes_the_slowest_ranks_decisions():
    """The other rank takes 70 ms a step."""
    timing, _ = run(
        itertools.repeat(50),
        agree=lambda values: [1.4 * values[0], *values[1:]],
        mean=lambda values: [(each + 70) / 2 for each in values],
    )
    assert timing.step_ms == pytest.approx(70)


@pytest.mark.parametrize("size", [6, 9, 15, 40])
def test_the_interval_covers_the_median_95_percent_of_the_time(size):
    generator = np.random.default_rng(size)
    covered = 0
    for _ in range(2000):
        sample = generator.normal(100, 5, size)
        ordered = np.sort(sample)
        median, half = median_interval(list(sample))
        assert median == pytest.approx(np.median(ordered))
        # The interval is reported by its half-width; its ends are order statistics symmetric in rank.
        low = next(i for i in range(size) if np.isclose((ordered[size - 1 - i] - ordered[i]) / 2, half))
        covered += ordered[low] <= 100 <= ordered[size - 1 - low]
    assert covered / 2000 >= 0.94


@pytest.fixture
def compiling(monkeypatch):
    """Measures steps on a scripted clock. `seconds` has the compile time of some steps by their number."""

    def measured(times, seconds, **options):
        def compiled():
            return sum(long for step, long in seconds.items() if step < clock.steps)

        longer = (each + 1e3 * seconds.get(step, 0.0) for step, each in enumerate(times))
        clock = ScriptedClock(longer)
        monkeypatch.setattr(timing_module.time, "perf_counter", lambda: clock.now)
        plan = options.pop("plan", TimingPlan())
        return measure(clock.step, clock, plan, compiled=compiled, **options), clock

    return measured


def test_compilation_is_timed_separately_from_warm_up(compiling):
    timing, clock = compiling(itertools.repeat(100), {0: 60.0, 1: 5.0})
    assert timing.seconds_compile == pytest.approx(65.2)
    assert (timing.warmup_steps, timing.steps) == (2, 6)
    assert timing.seconds_warmup == pytest.approx(0.2)
    assert timing.seconds_measure == pytest.approx(0.6)
    assert clock.steps == 10


def test_a_step_is_left_out_where_another_rank_compiles(compiling):
    slow = iter([40.0])
    timing, clock = compiling(
        itertools.repeat(100), {}, agree=lambda values: [*values[:-1], max(values[-1], next(slow, 0.0))]
    )
    assert clock.steps == 1 + timing.warmup_steps + timing.steps
    assert timing.seconds_compile == pytest.approx(0.1)


def test_settling_is_reported_once_all_ranks_ran_without_compiling(compiling):
    settled_at = []
    compiling(itertools.repeat(100), {0: 60.0}, settled=lambda: settled_at.append(timing_module.time.perf_counter()))
    assert settled_at == [pytest.approx(60.2)]


def test_clocks_settle_before_what_counts_is_measured():
    """A GPU that lowers its clocks while it warms up: 100 ms a step at first, 130 ms in the end."""
    warm_up, falling = [100, 100], np.linspace(100, 130, 60)
    started = []
    clock = ScriptedClock(itertools.chain(warm_up, falling, itertools.repeat(130)))
    plan = TimingPlan(settle_seconds=60)
    timing = measure(clock.step, clock, plan, measuring=lambda: started.append(clock.steps))
    assert timing.step_ms == pytest.approx(130, rel=1e-3)
    # Three equal windows of two seconds in a row, from where the steps are almost steady.
    assert 62 + 2 * 15 <= started[0] <= 62 + 4 * 17 and timing.seconds_settle < 20
    clock = ScriptedClock(itertools.chain(warm_up, falling, itertools.repeat(130)))
    assert measure(clock.step, clock, TimingPlan()).step_ms < 105


def test_a_delay_that_passes_from_rank_to_rank_counts_once():
    """Two stages' steps take 10 and 20 ms alternately, in opposite phase: two steps take 30 ms."""
    times = {0: itertools.cycle([10.0, 20.0]), 1: itertools.cycle([20.0, 10.0])}
    other = iter(times[1])
    chunks = []

    def agree(values):
        total, *rest = values
        return [max(total, sum(chunks[-1])), *rest]

    def mean(values):
        return [(a + b) / 2 for a, b in zip(values, chunks[-1], strict=True)]

    clock = ScriptedClock(times[0])
    real = clock.read

    def read(marks):
        mine = real(marks)
        chunks.append([next(other) for _ in mine])
        return mine

    clock.read = read
    timing = measure(clock.step, clock, TimingPlan(seconds=1e9, max_steps=40), agree=agree, mean=mean)
    assert timing.step_ms == pytest.approx(15, rel=0.02)


def test_a_step_time_that_never_settles_is_measured_after_the_limit():
    timing, _ = run(itertools.cycle([100, 200]))
    assert timing.warmup_steps == TimingPlan().warmup_max_steps
