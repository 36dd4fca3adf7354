"""`redline.tune(fn, space)`: a whole search over a callable, its files and its resumption.

Calls run in this process, where a search of forty trials takes no time; test_isolated_callables.py tests separate
processes."""

import math
from functools import partial

import pytest
import redline as rl
import torch
import yaml
from redline.runners import FunctionRunner

tune = partial(rl.tune, isolate=False)


def make_space():
    space = rl.Space()
    micro = space.choice("micro_batch", [1, 2, 4, 8, 16, 32])
    space.choice("checkpoint_ratio", [0, 0.5, 1])
    space.flag("fusion")
    space.derive("grad_accum", 32 // micro)
    return space


def speed(config):
    """Peaks at micro_batch 16 with checkpointing; runs out of memory above 16."""
    if config["micro_batch"] * (2 - config["checkpoint_ratio"]) > 24:
        raise rl.OutOfMemory("does not fit")
    return (
        math.log2(config["micro_batch"] + 1) * (1 - 0.2 * config["checkpoint_ratio"]) * (1.1 if config["fusion"] else 1)
    )


BEST = {"micro_batch": 16, "checkpoint_ratio": 0.5, "fusion": True, "grad_accum": 2}


def test_the_best_configuration_is_found_and_beats_the_default():
    result = tune(speed, make_space(), trials=36, sampler="random")
    assert dict(result.best.config) == BEST
    assert result.best.throughput == pytest.approx(speed(BEST))
    assert result.winner is result.best
    assert result.default.config["micro_batch"] == 1
    assert result.gain == pytest.approx(speed(BEST) / speed(result.default.config))


def test_nothing_feasible_has_a_reason():
    def fn(config):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")

    with pytest.warns(RuntimeWarning, match="result.best is None: none of 4 trials succeeded: 4 oom") as caught:
        result = tune(fn, make_space(), trials=4)
    assert [each.filename for each in caught] == [__file__]  # the caller's file, which a notebook shows
    assert result.best is None
    assert result.gain is None
    assert "none of 4 trials succeeded: 4 oom" in result.why
    assert "3072 MiB" in result.why
    assert repr(result) == f"Result(best=None, why={result.why!r})"
    assert "no winner, so best is None: none of 4 trials" in result._repr_html_()
    with pytest.raises(rl.NothingFound, match="there is no winner: none of 4 trials succeeded: 4 oom.*3072 MiB"):
        _ = result.winner.config


def test_ctrl_c_keeps_results_and_resume_continues(tmp_path):
    calls = []

    def fn(config):
        calls.append(config)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return float(config["micro_batch"])

    first = tune(fn, make_space(), trials=8, sampler="random", out=tmp_path / "run")
    assert first.interrupted
    assert sum(trial.ok for trial in first.all_trials) == 3
    in_flight = next(trial for trial in first.all_trials if trial.pending)
    second = tune(fn, make_space(), trials=8, sampler="random", out=tmp_path / "run", resume=True)
    assert not second.interrupted
    assert [trial.number for trial in second.all_trials] == list(range(8))
    assert second.all_trials[in_flight.number].config == in_flight.config
    finished = [trial.config for trial in second.all_trials]
    assert len(set(finished)) == 8
    assert calls.count(in_flight.config) == 2
    assert all(calls.count(config) == 1 for config in finished if config != in_flight.config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "trials must be a whole number of at least 1"),
        ({"time": "-5m"}, "time must be more than 0"),
        ({"sampler": "hebbo"}, "did you mean 'hebo'"),
        ({"fix": {"micro_bach": 1}}, "did you mean 'micro_batch'"),
        ({"fix": {"micro_batch": "large"}}, "micro_batch"),
        ({"devices": 0}, "devices must be a whole number of at least 1"),
        ({"seq_len": 128}, "are for a workload"),
        ({"concurrency": 0}, "concurrency must be a whole number of at least 1"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(options, message, tmp_path):
    with pytest.raises(rl.UsageError, match=message):
        rl.tune(speed, make_space(), out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_the_hosts_that_a_runner_finds_are_kept_for_exports(tmp_path, monkeypatch):
    monkeypatch.setattr(FunctionRunner, "per_host", 4)
    tune(speed, make_space(), trials=1, out=tmp_path / "run")
    assert yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["asked"]["devices"]["per_host"] == 4


def test_a_smaller_number_is_better_with_direction_min(tmp_path):
    def latency(config):
        return 100 / speed(config) if config["micro_batch"] <= 8 else 200.0

    result = tune(latency, make_space(), direction="min", trials=36, sampler="grid", out=tmp_path / "run")
    lowest = min(latency(config) for config in make_space() if config["micro_batch"] <= 8)
    assert result.best.value == pytest.approx(lowest) and result.best.measurement.unit == "1/value"
    assert result.gain == pytest.approx(latency(make_space().default()) / lowest)
    assert f"value={lowest:.6g}, gain=" in repr(result)
    with pytest.raises(rl.UsageError, match="direction"):
        tune(latency, make_space(), trials=40, sampler="grid", out=tmp_path / "run", resume=True)
    with pytest.raises(rl.UsageError, match="did you mean 'min'"):
        tune(latency, make_space(), direction="mni")


@pytest.mark.parametrize("isolate", [False, True])
def test_the_same_exception_in_the_first_three_calls_ends_the_search(isolate):
    with pytest.warns(RuntimeWarning, match="KeyError: 'zz'"):
        result = rl.tune(lambda config: config["zz"], make_space(), trials=12, isolate=isolate)
    assert len(result.all_trials) == 3
    assert result.ended == "the first three trials crashed in the same way, so the callable is to blame"


def test_a_search_refines_a_logarithmic_range_of_floats():
    space = rl.Space()
    space.number("lr_scale", 1e-4, 1e-1, log=True)
    space.flag("fusion")
    result = tune(lambda c: 10 - abs(math.log(c["lr_scale"] / 3e-3)) + c["fusion"], space, trials=14, patience=0)
    assert 2e-3 < result.best.config["lr_scale"] < 4.5e-3 and result.best.config["fusion"]


def test_a_default_of_nothing_has_a_winner_and_no_gain(tmp_path):
    space = rl.Space()
    space.choice("n", [0, 1, 2])
    found = tune(lambda config: config["n"], space, trials=3, out=tmp_path / "run")
    assert found.default.throughput == 0
    assert found.best.throughput > 0 and found.gain is None
    assert "gain" not in repr(found)


def test_the_same_seed_gives_the_same_trials():
    first, second = (tune(speed, make_space(), trials=8, seed=3, sampler="random") for _ in range(2))
    other = tune(speed, make_space(), trials=8, seed=4, sampler="random")
    configs = [[trial.config for trial in result.all_trials] for result in (first, second, other)]
    assert configs[0] == configs[1] != configs[2]


def test_direction_min_needs_positive_numbers():
    with pytest.warns(RuntimeWarning, match="must return a positive number, but returned -1"):
        tune(lambda config: -1.0, make_space(), direction="min", trials=2)
