"""Conformance tests of samplers: inherit the class and override its only fixture.

    class TestMine(SamplerConformance):
        @pytest.fixture
        def make(self):
            return MySampler                  # called as make(space, seed=...)

Needs pytest, which is in the `test` extra.
"""

import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ..base.errors import UsageError
from ..results import Measurement, Status, Trial
from ..space import Config, Space
from ..tuner.samplers.sampler import Sampler

Outcome = Callable[[Config], Measurement]
FAILURES = [Status.OOM, Status.CRASH, Status.TIMEOUT, Status.WRONG, Status.SKIPPED]


def small_space() -> Space:
    """Returns a space of 14 valid configurations out of 16."""
    space = Space()
    tp = space.choice("tp", [1, 2])
    micro = space.choice("micro_batch", [1, 2, 4, 8])
    space.flag("fusion")
    space.require(tp * micro <= 8, "room")
    return space


def wide_space() -> Space:
    """Returns a space of 210 configurations; one of the knobs has no order."""
    space = Space()
    space.choice("micro_batch", [1, 2, 4, 8, 16, 32, 64])
    space.choice("checkpoint_ratio", [0, 0.25, 0.5, 0.75, 1])
    space.choice("attention", ["eager", "sdpa", "flash_attention_2"])
    space.flag("fusion")
    return space


def conditional_space() -> Space:
    """Returns a space of 20 configurations with two conditional knobs."""
    space = Space()
    tp = space.choice("tp", [1, 2, 4])
    space.flag("sequence_parallel", when=tp > 1)
    checkpoint = space.flag("checkpoint")
    space.choice("offload", ["none", "optimizer", "all"], when=checkpoint)
    return space


def vast_space() -> Space:
    """Returns a space of about 12 million configurations."""
    space = Space()
    knobs = [space.integer(f"k{i}", 0, 15) for i in range(6)]
    space.require(knobs[0] + knobs[1] <= 20, "room")
    return space


def boundless_space() -> Space:
    """Returns a space that is too large to be listed: one constraint over ten knobs with sixteen values."""
    space = Space()
    knobs = [space.integer(f"k{i}", 0, 15) for i in range(10)]
    space.require(sum(knobs[1:], knobs[0]) <= 80, "room")
    return space


def ok(throughput: float | None, **more: float) -> Measurement:
    """Returns the measurement of a successful trial."""
    return Measurement(status=Status.OK, throughput=throughput, **more)


def failed(status: Status) -> Measurement:
    """Returns the measurement of a failed trial."""
    return Measurement(status=status, reason="failed by the test")


def plausible(config: Config) -> Measurement:
    """Returns a throughput that grows with the micro-batch until memory runs out, and some failures of every kind."""
    micro, digits = config.get("micro_batch", 1), int(config.id, 16)
    if micro * (1 - 0.5 * config.get("checkpoint_ratio", 0)) > 16:
        return failed(Status.OOM)
    if digits % 7 == 0:
        return failed(FAILURES[digits // 7 % len(FAILURES)])
    gain = (1 + 0.3 * config.get("fusion", 0)) * (1 - 0.2 * config.get("checkpoint_ratio", 0))
    return ok(100 * micro**0.7 * gain)


def finished(configs: Sequence[Config], outcome: Outcome, *, first: int = 0) -> list[Trial]:
    """Returns trials of these configurations with the measurements of `outcome`, numbered from `first`."""
    return [Trial(number=i, config=each, measurement=outcome(each)) for i, each in enumerate(configs, first)]


def search(sampler: Sampler, outcome: Outcome, trials: int, *, count: int = 1) -> list[Trial]:
    """Runs a search of at most `trials` trials in batches of `count`; it ends early if nothing is proposed."""
    done: list[Trial] = []
    while len(done) < trials and (batch := sampler.propose(done, count)):
        assert len(batch) <= count, "more proposals than requested"
        done += finished(batch, outcome, first=len(done))
    return done


class SamplerConformance:
    """Tests of everything a sampler must guarantee. Override `make`."""

    @pytest.fixture
    def make(self) -> Callable[..., Sampler]:
        """Returns the sampler under test, called as `make(space, seed=...)`."""
        raise NotImplementedError("override the fixture `make`; it returns your sampler")

    def test_name_space_and_seed_are_kept(self, make):
        space = small_space()
        sampler = make(space, seed=3)
        assert sampler.name and isinstance(sampler.name, str)
        assert sampler.space is space
        assert sampler.seed == 3

    @pytest.mark.parametrize("count", [1, 5])
    def test_the_whole_space_is_proposed_once_each_then_nothing(self, make, count):
        space = small_space()
        trials = search(make(space, seed=0), plausible, 2 * len(space), count=count)
        assert len(trials) == len(space)
        assert {trial.config for trial in trials} == set(space)
        assert make(space, seed=0).propose(trials, count) == []

    @pytest.mark.parametrize("status", FAILURES)
    def test_a_search_of_failures_runs_to_the_end(self, make, status):
        space = small_space()
        trials = search(make(space, seed=1), lambda config: failed(status), 2 * len(space), count=4)
        assert {trial.config for trial in trials} == set(space)
        assert len(trials) == len(space)

    def test_proposals_are_valid_and_new_in_a_long_search(self, make):
        space = wide_space()
        configs = [trial.config for trial in search(make(space, seed=2), plausible, 18, count=2)]
        assert len(set(configs)) == 18
        assert all(config in space for config in configs)

    def test_a_batch_is_full_and_without_duplicates(self, make):
        space = wide_space()
        batch = make(space, seed=0).propose(finished(space.sample(12, 0), plausible), 8)
        assert len(batch) == len(set(batch)) == 8

    def test_a_batch_is_cut_short_by_the_end_of_the_space(self, make):
        space = small_space()
        configs = list(space)
        batch = make(space, seed=0).propose(finished(configs[3:], plausible), 10)
        assert sorted(config.id for config in batch) == sorted(config.id for config in configs[:3])

    def test_pending_trials_are_not_proposed(self, make):
        space = small_space()
        configs = list(space)
        trials = finished(configs[:7], plausible)
        trials += [Trial(number=7 + i, config=config) for i, config in enumerate(configs[7:12])]
        batch = make(space, seed=0).propose(trials, 10)
        assert sorted(config.id for config in batch) == sorted(config.id for config in configs[12:])

    def test_it_works_while_every_trial_is_pending(self, make):
        space = small_space()
        trials = [Trial(number=i, config=config) for i, config in enumerate(space.sample(8, 0))]
        batch = make(space, seed=0).propose(trials, 3)
        assert len({*batch, *(trial.config for trial in trials)}) == 11

    def test_a_batch_is_what_asking_one_by_one_gives(self, make):
        space = wide_space()
        trials = finished(space.sample(12, 1), plausible)
        one_by_one: list[Config] = []
        for _ in range(3):
            pending = [Trial(number=12 + i, config=config) for i, config in enumerate(one_by_one)]
            one_by_one += make(space, seed=5).propose(trials + pending, 1)
        assert make(space, seed=5).propose(trials, 3) == one_by_one

    def test_the_same_seed_and_trials_give_the_same_proposals(self, make):
        space = wide_space()
        trials = finished(space.sample(14, 2), plausible)
        sampler = make(space, seed=7)
        first = sampler.propose(trials, 2)
        sampler.propose(trials[:5], 1)
        assert sampler.propose(trials, 2) == first
        assert make(wide_space(), seed=7).propose(tuple(trials), 2) == first

    def test_a_resumed_search_equals_an_uninterrupted_one(self, make):
        space = wide_space()
        whole = search(make(space, seed=4), plausible, 12)
        for stopped in (3, 10):
            resumed = make(wide_space(), seed=4).propose(whole[:stopped], 1)
            assert resumed == [whole[stopped].config]

    def test_given_trials_are_not_changed(self, make):
        space = wide_space()
        trials = finished(space.sample(12, 3), plausible)
        before = list(trials)
        make(space, seed=0).propose(trials, 2)
        assert trials == before

    def test_absent_knobs_stay_absent(self, make):
        space = conditional_space()
        trials = search(make(space, seed=0), plausible, 2 * len(space), count=2)
        assert {trial.config for trial in trials} == set(space)
        assert len(trials) == len(space)

    def test_a_space_of_one_point_is_proposed_once(self, make):
        fixed = Space()
        fixed.choice("tp", [2])
        left = Space()
        tp = left.choice("tp", [1, 2])
        left.require(tp == 2, "two devices")
        for space in (fixed, left):
            (config,) = make(space, seed=0).propose([], 3)
            assert config["tp"] == 2
            assert make(space, seed=0).propose(finished([config], plausible), 1) == []

    @pytest.mark.parametrize("declare", [vast_space, boundless_space])
    def test_a_vast_space_is_searched_without_listing_it(self, make, declare):
        space = declare()
        try:
            sampler = make(space, seed=0)
        except UsageError as error:
            assert not space.enumerable
            assert "too large" in str(error)
            return
        started = time.process_time()
        trials = search(sampler, lambda config: ok(1.0 + config["k0"] + config["k5"]), 12, count=3)
        assert len({trial.config for trial in trials}) == 12
        assert all(trial.config in space for trial in trials)
        assert time.process_time() - started < 30

    @pytest.mark.parametrize(
        "throughputs",
        [
            pytest.param([0.0, -5.0, 3.0], id="zero and negative"),
            pytest.param([None, float("nan"), float("inf"), 2.0, 4.0], id="missing and not finite"),
            pytest.param([7.0], id="all the same"),
            pytest.param([1e-300, 1.0, 1e300], id="far apart"),
            pytest.param([None], id="none at all"),
        ],
    )
    def test_any_number_that_a_callable_returns_is_accepted(self, make, throughputs):
        space = wide_space()
        configs = space.sample(15, 0)
        trials = [
            Trial(number=i, config=config, measurement=ok(throughputs[i % len(throughputs)]))
            for i, config in enumerate(configs)
        ]
        batch = make(space, seed=0).propose(trials, 2)
        assert len({*batch, *configs}) == 17
        assert all(config in space for config in batch)

    def test_trials_outside_the_space_are_ignored(self, make):
        space, other = small_space(), small_space()
        other.choice("zero", [0, 1])
        trials = finished(other.sample(6, 0), plausible)
        assert len(search_on(make(space, seed=0), trials, plausible)) == len(space)

    @pytest.mark.parametrize("count", [0, -1])
    def test_a_count_below_one_is_refused(self, make, count):
        with pytest.raises(UsageError, match=str(count)):
            make(small_space(), seed=0).propose([], count)

    @pytest.mark.parametrize("seed", [-1, 0.5, True])
    def test_a_seed_that_is_none_is_refused(self, make, seed):
        with pytest.raises(UsageError, match="seed"):
            make(small_space(), seed=seed)

    def test_the_state_of_the_process_is_unchanged(self, make, capfd):
        space = wide_space()
        trials = finished(space.sample(14, 4), plausible)
        sampler = make(space, seed=0)
        sampler.propose(trials, 1)  # imports packages, some of which add warning filters
        before = process_state()
        batch = sampler.propose(trials, 2)
        after = process_state()
        assert len(batch) == 2
        assert [name for name in before if before[name] != after[name]] == []
        captured = capfd.readouterr()
        assert captured.out == ""
        assert captured.err == ""

    def test_failures_of_a_region_keep_it_from_being_proposed(self, make):
        space = wide_space()
        small = [config for config in space.sample(210, 5) if config["micro_batch"] <= 8][:10]
        large = [config for config in space.sample(210, 6) if config["micro_batch"] >= 16][:10]
        throughput = {1: 95.0, 2: 105.0, 4: 110.0, 8: 100.0}
        trials = finished(
            [config for pair in zip(small, large) for config in pair],
            lambda c: failed(Status.OOM) if c["micro_batch"] >= 16 else ok(throughput[c["micro_batch"]]),
        )
        share = _share_of_large(make, space, trials)
        if make(space, seed=0).learns:
            assert share <= 0.2, f"{share:.0%} of the proposals lie where every trial failed; chance is 42 %"

    def test_failures_alone_are_learned_from(self, make):
        space = wide_space()
        large = [config for config in space.sample(210, 7) if config["micro_batch"] >= 16][:10]
        share = _share_of_large(make, space, finished(large, lambda config: failed(Status.OOM)))
        if make(space, seed=0).learns:
            assert share <= 0.25, f"{share:.0%} of the proposals lie where every trial failed; chance is 40 %"

    def test_outcomes_steer_the_search(self, make):
        space = wide_space()

        def fast(config: Config) -> Measurement:
            return ok(10 * config["micro_batch"] ** 0.5 * (2 if config["attention"] == "sdpa" else 1))

        trials = finished(space.sample(20, 8), fast)
        gains = []
        for seed in range(3):
            batch = make(space, seed=seed).propose(trials, 3)
            gains += [np.log(fast(config).throughput) for config in batch]
        chance = np.mean([np.log(fast(config).throughput) for config in space])
        if make(space, seed=0).learns:
            assert np.mean(gains) > chance + 0.4, f"proposals of {np.exp(np.mean(gains)):.0f} on average"


def search_on(sampler: Sampler, trials: list[Trial], outcome: Outcome) -> list[Trial]:
    """Returns the trials that a search adds to `trials` until nothing is proposed."""
    known = list(trials)
    while batch := sampler.propose(known, 3):
        known += finished(batch, outcome, first=len(known))
        assert len({trial.config for trial in known}) == len(known), "proposed twice"
    return known[len(trials) :]


def _share_of_large(make: Callable[..., Sampler], space: Space, trials: list[Trial]) -> float:
    """Returns the share of proposals with a micro-batch of at least 16, over six seeds and batches of two."""
    proposals = [config for seed in range(6) for config in make(space, seed=seed).propose(trials, 2)]
    return float(np.mean([config["micro_batch"] >= 16 for config in proposals]))


def process_state() -> dict[str, object]:
    """Returns the state that a sampler must not change: generators, threads, warning filters, verbosity, streams."""
    numpy_state = np.random.get_state()
    state: dict[str, object] = {
        "random": random.getstate(),
        "numpy": (numpy_state[0], numpy_state[1].tobytes(), *numpy_state[2:]),
        "warnings": list(warnings.filters),
        "stdout": sys.stdout,
    }
    if (torch := sys.modules.get("torch")) is not None:
        state["torch"] = torch.get_rng_state().tolist()
        state["torch threads"] = torch.get_num_threads()
        state["torch dtype"] = torch.get_default_dtype()
    if (optuna := sys.modules.get("optuna")) is not None:
        state["optuna verbosity"] = optuna.logging.get_verbosity()
    return state
