"""A configuration that is known not to fit, or that needs at least as much memory as one, is never run."""

import pytest
import redline as rl
from redline.results import Measurement, Status, Trial
from redline.space import Config, Space
from redline.tuner.feasibility import OutOfMemoryKnowledge, tight_winner
from tiers import tiered


def make_space():
    space = Space()
    space.choice("micro_batch", [1, 2, 4, 8, 16], monotone_memory=1)
    space.choice("checkpoint_ratio", [0, 0.5, 1], monotone_memory=-1)
    space.choice("zero", [0, 1, 2], monotone_memory=-1)
    space.choice("attention", ["eager", "sdpa"])
    return space


def config(micro, ratio, zero, attention="eager"):
    return Config({"micro_batch": micro, "checkpoint_ratio": ratio, "zero": zero, "attention": attention})


def trial(number, at, status):
    throughput = 1.0 if status is Status.OK else None
    return Trial(number=number, config=at, measurement=Measurement(status=status, throughput=throughput))


OOM = trial(3, config(8, 0.5, 1), Status.OOM)


@pytest.mark.parametrize(
    "worse", [config(16, 0.5, 1), config(8, 0, 1), config(8, 0.5, 0), config(16, 0, 0), config(8, 0.5, 1)]
)
def test_an_oom_excludes_configurations_that_need_as_much(worse):
    knowledge = OutOfMemoryKnowledge(make_space())
    assert knowledge.blocked_by(worse, [OOM]) is OOM


@pytest.mark.parametrize("status", [Status.CRASH, Status.TIMEOUT, Status.WRONG, Status.SKIPPED, Status.OK])
def test_other_outcomes_rule_nothing_out(status):
    known = trial(0, config(1, 1, 2), status)
    assert OutOfMemoryKnowledge(make_space()).blocked_by(config(16, 0, 0), [known]) is None


def test_a_fluke_that_a_success_contradicts_rules_nothing_out():
    knowledge = OutOfMemoryKnowledge(make_space())
    larger = trial(4, config(16, 0.5, 1), Status.OK)
    assert knowledge.blocked_by(config(16, 0, 1), [OOM, larger]) is None
    smaller = trial(4, config(4, 0.5, 1), Status.OK)
    assert knowledge.blocked_by(config(16, 0, 1), [OOM, smaller]) is OOM


@pytest.mark.parametrize(("failed", "asked", "ruled_out"), [(4, 2, True), (4, 1, False), (1, 1, True), (None, 1, True)])
def test_a_failure_while_gradients_add_up_says_nothing_of_a_single_micro_batch(failed, asked, ruled_out):
    known = config(4, 0, 0) if failed is None else Config({**config(4, 0, 0), "grad_accum": failed})
    larger = Config({**config(16, 0, 0), "grad_accum": asked})
    blocked = OutOfMemoryKnowledge(make_space()).blocked_by(larger, [trial(0, known, Status.OOM)])
    assert (blocked is not None) == ruled_out


def run(calls, **options):
    def fn(at):
        calls.append(at)
        if at["micro_batch"] * (1.5 - at["checkpoint_ratio"]) / (1 + at["zero"]) > 4:
            raise rl.OutOfMemory("does not fit")
        return at["micro_batch"] ** 0.5 * (1 - 0.1 * at["checkpoint_ratio"] - 0.05 * at["zero"])

    return rl.tune(fn, make_space(), patience=0, seed=1, isolate=False, **options)


@pytest.mark.parametrize("sampler", tiered(["random", "grid"], ["bayes"]))
def test_a_search_never_runs_what_an_earlier_failure_rules_out(sampler):
    calls = []
    result = run(calls, trials=90, sampler=sampler)
    knowledge = OutOfMemoryKnowledge(make_space())
    known = []
    for each in result.all_trials:
        status = each.measurement.status
        blocked = knowledge.blocked_by(each.config, known) if each.sampler == sampler else None
        assert (status is Status.SKIPPED) == (blocked is not None), each
        known.append(each)
    skipped = [each for each in result.all_trials if each.measurement.status is Status.SKIPPED]
    assert skipped and not {each.config for each in skipped} & set(calls)
    assert len(set(calls)) == len(calls)
    assert all(
        "needs at least the memory of trial" in each.measurement.reason
        and "which did not fit" in each.measurement.reason
        for each in skipped
    )
    assert len(result.all_trials) == len(make_space())  # nothing is left: all were run or skipped
    assert result.best.throughput == max(each.measurement.throughput for each in result.all_trials if each.ok)


def test_skipped_trials_take_nothing_from_the_budget():
    calls = []
    result = run(calls, trials=30, sampler="grid")
    assert len(calls) == 30
    assert len(result.all_trials) > 30


def test_a_resumed_run_knows_what_did_not_fit(tmp_path):
    before, after = [], []
    run(before, trials=20, sampler="random", out=tmp_path / "run")
    result = run(after, trials=60, sampler="random", out=tmp_path / "run", resume=True)
    assert not set(before) & set(after)
    knowledge = OutOfMemoryKnowledge(make_space())
    earlier = [each for each in result.all_trials if each.config in before]
    assert any(each.measurement.status is Status.OOM for each in earlier)
    assert not any(knowledge.blocked_by(each, earlier) for each in after)


@pytest.mark.parametrize(("peak", "flagged"), [(980.0, True), (951.0, True), (949.0, False), (None, False)])
def test_a_winner_without_headroom_is_flagged(peak, flagged):
    measured = Measurement(status=Status.OK, throughput=1.0, peak_memory_mib=peak, memory_limit_mib=1000.0)
    message = tight_winner([Trial(number=7, config=config(1, 0, 0), measurement=measured)], 0.05)
    assert bool(message) is flagged
    if flagged:
        assert "trial 7" in message and "headroom of 5 %" in message


def test_tune_says_that_its_winner_is_tight():
    def fn(at):
        memory = 990.0 if at["micro_batch"] == 16 else 100.0
        speed = float(at["micro_batch"])
        return Measurement(status=Status.OK, throughput=speed, peak_memory_mib=memory, memory_limit_mib=1000.0)

    result = rl.tune(fn, make_space(), trials=90, sampler="grid", patience=0, isolate=False)
    assert result.best.config["micro_batch"] == 16
    assert any("takes 99.0 % of the memory" in note for note in result.notes)
