"""A search ends when its budget is spent or further trials are useless, and states the reason."""

from functools import partial

import pytest
import redline as rl
from redline.results import Measurement, Status
from redline.space import Space

tune = partial(rl.tune, isolate=False)


def make_space(sizes=(1, 2, 4, 8, 16, 32, 64)):
    space = Space()
    space.choice("micro_batch", list(sizes), monotone_memory=1)
    space.choice("checkpoint_ratio", [0, 0.25, 0.5, 0.75, 1], monotone_memory=-1)
    space.choice("attention", ["eager", "sdpa", "flash_attention_2"])
    space.flag("fusion")
    return space


def speed(config):
    gains = {"eager": 1.0, "sdpa": 1.5, "flash_attention_2": 1.6}
    gain = gains[config["attention"]] * (1.2 if config["fusion"] else 1.0)
    return config["micro_batch"] ** 0.4 * gain * (1 - 0.25 * config["checkpoint_ratio"])


def measured(config, limit=1000.0):
    need = 100.0 + 40.0 * config["micro_batch"] * (1.2 - config["checkpoint_ratio"])
    known = {"peak_memory_mib": need, "memory_limit_mib": limit}
    if need > limit:
        return Measurement(status=Status.OOM, reason="does not fit", **known)
    return Measurement(status=Status.OK, throughput=speed(config), unit="tokens/s", **known)


def test_a_search_ends_early_when_a_further_gain_is_unlikely_and_says_so():
    result = tune(measured, make_space(), trials=200, patience=5)
    assert "further trials bring another 1 % is" in result.ended and "patience" in result.ended
    assert 6 <= len(result.all_trials) <= 60
    best = max(each.throughput or 0 for each in map(measured, make_space()))
    assert result.best.throughput >= 0.98 * best


@pytest.mark.slow
def test_a_grid_is_tried_to_its_end_unless_patience_is_asked_for():
    space = make_space()
    result = tune(lambda config: 7.0, space, trials=len(space), sampler="grid")
    assert len(result.all_trials) == len(space)


@pytest.mark.parametrize("sampler", ["random", "bayes"])
def test_the_rule_holds_whoever_proposes(sampler):
    result = tune(lambda config: 7.0, make_space(), trials=200, sampler=sampler, patience=3)
    assert "patience" in result.ended
    assert len(result.all_trials) < 100


def test_gains_that_keep_coming_are_waited_for():
    space = Space()
    space.choice("x", list(range(40)))
    order = iter(range(1000))
    result = tune(lambda config: 1.2 ** next(order), space, trials=40, patience=5, sampler="random")
    assert len(result.all_trials) == 40


def test_a_search_without_a_fitting_trial_reports_the_shortfall():
    def fn(config):
        need = 3000.0 * config["micro_batch"] ** 0.5 * (1.2 - 0.5 * config["checkpoint_ratio"])
        return Measurement(status=Status.OOM, reason="does not fit", peak_memory_mib=need, memory_limit_mib=1000.0)

    result = tune(fn, make_space(), trials=100)
    assert result.best is None
    assert "nothing feasible" in result.ended
    assert "the smallest predicted shortfall is" in result.ended
    run = [each for each in result.all_trials if each.measurement.status is not Status.SKIPPED]
    assert len(run) <= 8
    shortfall = float(result.ended.split("shortfall is ")[1].split(" MiB")[0].replace(",", ""))
    assert 500 < shortfall < 3000  # the true value is 1,100


def test_one_oom_that_excludes_the_rest_is_nothing_feasible():
    space = Space()
    space.choice("micro_batch", [1, 2, 4, 8], monotone_memory=1)
    result = tune(
        lambda config: Measurement(status=Status.OOM, reason="does not fit", memory_limit_mib=10.0),
        space,
        trials=9,
    )
    assert [each.measurement.status for each in result.all_trials] == [Status.OOM, *[Status.SKIPPED] * 3]
    assert "nothing feasible: 1 trial ran out" in result.ended
    assert "every other configuration needs at least as much" in result.ended


def test_crashes_do_not_count_as_not_feasible():
    def fn(config):
        raise KeyError(f"a bug with {config.id}, which can be mended")

    result = tune(fn, make_space(), trials=20)
    assert len(result.all_trials) == 20
    assert "nothing feasible" not in result.ended


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": -1}, "patience must be a whole number of at least 0"),
        ({"patience": 1.5}, "patience must be a whole number"),
        ({"time": "10s", "trial_timeout": "1m"}, "more than the 10 s of the whole search"),
        ({"warm_start": ["no/such/run"]}, "no/such/run"),
        ({"prior": 3.0}, "a prior must be callable"),
    ],
)
def test_contradictory_requests_are_refused_before_files_are_written(options, message, tmp_path):
    with pytest.raises(rl.UsageError, match=message):
        rl.tune(measured, make_space(), out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
