"""Earlier runs say which knobs pay, never how fast this workload is; what matched is told."""

import numpy as np
import pytest
import redline as rl
from redline.results import Measurement, Status, Trial
from redline.space import Config, Space
from redline.tuner.warm_start import WarmStart, read_runs


def make_space(*extra):
    space = Space()
    space.choice("micro_batch", [1, 2, 4, 8, 16, 32])
    space.choice("checkpoint_ratio", [0, 0.25, 0.5, 0.75, 1])
    space.choice("attention", ["eager", "sdpa", "flash_attention_2"])
    for name in extra:
        space.flag(name)
    return space


def speed(config, factor=1.0):
    gains = {"eager": 1.0, "sdpa": 1.3, "flash_attention_2": 2.0}
    return (
        factor
        * config["micro_batch"] ** 0.5
        * gains[config["attention"]]
        * (1 - 0.5 * config["checkpoint_ratio"])
    )


def trials_of(configs, throughput, predicted=None, status=Status.OK):
    return [
        Trial(
            number=number,
            config=Config(dict(config)),
            predicted_throughput=None if predicted is None else predicted(config),
            measurement=Measurement(status=status, throughput=throughput(config)),
        )
        for number, config in enumerate(configs)
    ]


def earlier(space, count=40, factor=1.0):
    return trials_of(space.sample(count, 0), lambda config: speed(config, factor))


def rank_correlation(a, b):
    return float(np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1])


def test_what_paid_before_is_expected_to_pay_here():
    space = make_space()
    warm = WarmStart(space, [earlier(space)], ["runs/a"])
    expected = [warm(config).throughput for config in space]
    assert rank_correlation(expected, [speed(config) for config in space]) > 0.9


def test_the_level_of_an_earlier_run_says_nothing():
    space = make_space()
    slow, fast = (WarmStart(space, [earlier(space, factor=f)], ["a"]) for f in (1.0, 1000.0))
    for config in space.sample(10, 1):
        assert slow(config).throughput == pytest.approx(fast(config).throughput, rel=1e-6)


def test_it_corrects_the_estimate_beneath_by_what_was_off_before():
    space = make_space()

    def estimate(config):  # knows nothing of attention
        return 100.0 * config["micro_batch"] ** 0.5 * (1 - 0.5 * config["checkpoint_ratio"])

    past = trials_of(space.sample(40, 0), speed, predicted=lambda config: estimate(config) / 7)
    warm = WarmStart(space, [past], ["a"], estimate)
    config = Config({"micro_batch": 8, "checkpoint_ratio": 0.5, "attention": "eager"})
    gain = warm(Config({**config, "attention": "flash_attention_2"})).throughput / warm(config).throughput
    assert gain == pytest.approx(2.0, rel=0.1)
    assert warm(config).throughput == pytest.approx(estimate(config), rel=0.6)
    assert rank_correlation(
        [warm(each).throughput for each in space], [speed(each) for each in space]
    ) > rank_correlation([estimate(each) for each in space], [speed(each) for each in space])


def test_failures_and_pending_trials_of_earlier_runs_are_no_facts_here():
    space = make_space()
    failures = trials_of(space.sample(30, 0), lambda config: None, status=Status.OOM)
    warm = WarmStart(space, [failures], ["a"])
    assert warm.trials == 0
    assert warm(space.default()).fits is None
    assert warm(space.default()).peak_memory_mib is None


def test_what_matched_and_what_did_not_is_said():
    space, other = make_space("fusion"), make_space("kernels")
    past = trials_of(other.sample(9, 0), speed)
    past += trials_of([{**other.default(), "micro_batch": 64}], speed)  # a value this space has not
    warm = WarmStart(space, [past], ["runs/other"])
    (line,) = warm.matched
    assert line.startswith("warm start from runs/other: 9 of 10 trials count")
    assert "knobs in both: attention, checkpoint_ratio, micro_batch" in line
    assert "only here: fusion" in line
    assert "only there: kernels" in line
    assert "1 have values that no knob has here" in line


def test_a_run_of_an_unlike_space_counts_for_nothing_and_that_is_said():
    past = trials_of([Config({"temperature": 3.0})], lambda config: 1.0)
    warm = WarmStart(make_space(), [past], ["runs/other"])
    assert warm.trials == 0
    assert "0 of 1 trials count" in warm.matched[0]
    assert "only there: temperature" in warm.matched[0]


def test_a_search_begins_where_an_earlier_run_ended(tmp_path):
    rl.tune(speed, make_space(), trials=40, patience=0, out=tmp_path / "a")
    best = max(speed(config) for config in make_space())
    after = {}
    for name, start in (("cold", []), ("warm", str(tmp_path / "a"))):
        result = rl.tune(lambda config: speed(config, 55.0), make_space(), trials=4, warm_start=start, seed=3)
        after[name] = result.best.throughput / 55.0 / best
    assert any("warm start from" in note and "40 of 40 trials count" in note for note in result.notes)
    assert after["warm"] == pytest.approx(1.0)
    assert after["cold"] < 1.0


def test_a_run_on_disk_is_read_also_without_its_ledger(tmp_path):
    rl.tune(speed, make_space(), trials=6, patience=0, out=tmp_path / "a")
    (tmp_path / "a" / "study.log").unlink()
    (trials,), (name,) = read_runs([tmp_path / "a"])
    assert len(trials) == 6 and name == str(tmp_path / "a")
    warm = WarmStart(make_space(), [trials], [name])
    assert warm.trials == 6


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(rl.UsageError, match=r"warm start: .*holds no run"):
        read_runs([tmp_path])
