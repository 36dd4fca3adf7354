"""Earlier runs show which knobs pay, not how fast this workload is; their similarity to it determines their weight."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import redline as rl
from redline.results import Measurement, Status, Trial
from redline.space import Config, Space
from redline.tuner.history import EarlierRun
from redline.tuner.samplers import make_sampler
from redline.tuner.warm_start import ELSEWHERE, WarmStart, take

HERE = {
    "model": "gpt2",
    "workload": {"id": "a1", "spec": "gpt2"},
    "devices": {"type": "cuda", "name": "NVIDIA A100", "used": 8},
    "seq_len": 1024,
    "global_batch": 64,
    "seed": 0,
}


def other(**changed):
    """The request of a run that differs from `HERE` in these fields."""
    devices = {**HERE["devices"], **changed.pop("devices", {})}
    return {**HERE, "devices": devices, **changed}


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
    return factor * config["micro_batch"] ** 0.5 * gains[config["attention"]] * (1 - 0.5 * config["checkpoint_ratio"])


def trials_of(configs, throughput, predicted=None, status=Status.OK, unit=""):
    return [
        Trial(
            number=number,
            config=Config(dict(config)),
            predicted_throughput=None if predicted is None else predicted(config),
            measurement=Measurement(status=status, throughput=throughput(config), unit=unit),
        )
        for number, config in enumerate(configs)
    ]


def earlier(space, count=40, factor=1.0):
    return trials_of(space.sample(count, 0), lambda config: speed(config, factor))


def taken(space, trials, asked=HERE, unit=""):
    return take(EarlierRun(name="runs/a", trials=trials, asked=asked), space, HERE, unit)


def warm_start(space, trials, asked=HERE, base=None):
    return WarmStart(space, [taken(space, trials, asked)], base)


def rank_correlation(a, b):
    return float(np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1])


# -- transfer ------------------------------------------------------------------------------------------------


def test_knobs_that_paid_before_are_expected_to_pay():
    space = make_space()
    warm = warm_start(space, earlier(space))
    expected = [warm(config).throughput for config in space]
    assert rank_correlation(expected, [speed(config) for config in space]) > 0.9


def estimate(config):  # ignores attention
    return 100.0 * config["micro_batch"] ** 0.5 * (1 - 0.5 * config["checkpoint_ratio"])


@pytest.mark.parametrize("predicted", [lambda config: estimate(config) / 7, None], ids=["told", "not told"])
def test_the_base_estimate_is_corrected_by_earlier_errors(predicted):
    space = make_space()
    warm = warm_start(space, trials_of(space.sample(40, 0), speed, predicted=predicted), base=estimate)
    config = Config({"micro_batch": 8, "checkpoint_ratio": 0.5, "attention": "eager"})
    gain = warm(Config({**config, "attention": "flash_attention_2"})).throughput / warm(config).throughput
    assert gain == pytest.approx(2.0, rel=0.1)
    # Effects that the estimate already predicts are not counted twice.
    larger = warm(Config({**config, "micro_batch": 32})).throughput / warm(config).throughput
    assert larger == pytest.approx(2.0, rel=0.1)
    assert warm(config).throughput == pytest.approx(estimate(config), rel=0.6)


# -- weight --------------------------------------------------------------------------------------------------


H100 = other(devices={"name": "NVIDIA H100"})


@pytest.mark.parametrize(
    ("there", "weight"),
    [
        (HERE, 1.0),
        (other(runner="local", sampler="random", seed=9, memory_limit_mib=5.0), 1.0),
        (H100, ELSEWHERE),
        (other(devices={"used": 16}), ELSEWHERE),
        (other(seq_len=2048, workload={"id": "b2", "spec": "gpt2"}), ELSEWHERE),
        (other(simulated=True), ELSEWHERE),
    ],
)
def test_a_run_of_the_same_task_counts_fully_and_of_another_one_less(there, weight):
    space = make_space()
    run = taken(space, earlier(space), there)
    assert run.weight == weight and ("of another task" in run.summary) == (weight < 1)


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        ({"model": "bert", "workload": {"id": "b", "spec": "bert"}}, r"it trains another model \(bert, here gpt2\)"),
        ({"workload": {"id": "b", "spec": "gpt2", "lora": "r=8"}}, "it trains another model"),
        ({"workload": {"callable": "fn"}}, "one of them is a callable, the other is not"),
        ({"workload": {"command": "python train.py"}}, "one of them is a command, the other is not"),
    ],
)
def test_a_run_of_another_model_is_refused(there, reason):
    space = make_space()
    with pytest.raises(rl.UsageError, match=f"warm start from runs/a: nothing can be taken: {reason}"):
        taken(space, earlier(space), other(**there))


def test_the_error_of_a_run_of_another_task_is_what_its_correlation_leaves_open():
    """With f = w f_r + e of equal variances, e has the deviation sqrt(1 - w^2), here relative to the mean w f_r."""
    space = make_space()
    table = warm_start(space, earlier(space), H100).table(list(space))
    expected = np.log(table.throughput) * np.sqrt(1 - ELSEWHERE**2) / ELSEWHERE
    assert table.log_throughput_effects[:, -1] == pytest.approx(expected)


def found_after(prior, trials, seed, space, truth):
    """Share of the best after each trial of a search."""
    sampler = make_sampler("bayes", space, seed=seed, prior=prior)
    done = []
    for number in range(trials):
        config = space.default() if not done else sampler.propose(done, 1)[0]
        measured = Measurement(status=Status.OK, throughput=truth(config))
        done.append(Trial(number=number, config=config, measurement=measured))
    best = max(truth(config) for config in space)
    return np.maximum.accumulate([trial.measurement.throughput for trial in done]) / best


def truth(config):
    """Peaks inside the space, and has two knobs that pay only together."""
    size = config["micro_batch"]
    together = 1.3 if config["fusion"] and config["attention"] != "eager" else 1.0
    return speed(config) / (1 + (size / 16) ** 2) * together


BASES = {"alone": None, "on an estimate": lambda config: 500 * estimate(config)}


@cache
def cold(base):
    return found_after(BASES[base], 9, 0, make_space("fusion"), truth)


def warm(base, trials, count):
    space = make_space("fusion")
    return found_after(warm_start(space, trials, H100, BASES[base]), count, 0, space, truth)


@pytest.mark.parametrize("base", BASES)
def test_a_truthful_run_on_another_device_speeds_a_search_up(base):
    configs = make_space("fusion").sample(30, 0)
    there = trials_of(configs, lambda config: 3 * truth(config) * 1.1 ** config["checkpoint_ratio"])
    found = warm(base, there, 5)
    assert found[1] > cold(base)[1] + 0.1  # the very first proposal
    assert found[4] >= cold(base)[4] - 1e-9 and found[4] > 0.9


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("lie", ["reversed", "shuffled"])
def test_a_misleading_run_does_not_ruin_a_search(lie, base):
    configs = make_space("fusion").sample(40, 0)
    speeds = [truth(config) for config in configs]
    if lie == "reversed":
        values = [1 / each for each in speeds]
    else:
        values = np.random.default_rng(0).permutation(speeds).tolist()
    found = warm(base, trials_of(configs, dict(zip(configs, values)).__getitem__), 9)
    assert found[8] > 0.95 and cold(base)[8] > 0.95
    # All nine trials count; each run starts from the previous ones' results.
    assert found.mean() > cold(base).mean() - 0.1


# -- messages and errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda trials: [], "none of its trials succeeded"),
        (
            lambda trials: [replace(t, measurement=Measurement(status=Status.OOM)) for t in trials],
            "none of its trials succeeded",
        ),
        (
            lambda trials: trials_of([Config({"temperature": 3.0})], lambda config: 1.0),
            r"no knob of this search varies among its trials that succeeded \(its knobs: temperature\)",
        ),
        (
            lambda trials: [replace(t, config=Config({**t.config, "micro_batch": 7})) for t in trials],
            r"no knob of this search varies .*its knobs: attention, checkpoint_ratio, micro_batch",
        ),
        (lambda trials: trials[:1], r"no knob of this search varies"),
        (lambda trials: trials_of([t.config for t in trials], speed, unit="TFLOP/s"), "it counts TFLOP/s, this search tok"),
        (
            lambda trials: [*trials_of([trials[0].config], speed, unit="GB/s"), *trials_of([trials[1].config], speed, unit="s")],
            r"it counts GB/s, s, this search tokens/s",
        ),
    ],
)  # fmt: skip
def test_a_run_of_which_nothing_sensible_can_be_taken_is_refused(change, reason):
    space = make_space()
    with pytest.raises(rl.UsageError, match=f"warm start from runs/a: nothing can be taken: {reason}"):
        taken(space, change(earlier(space)), unit="tokens/s")


# -- runs on disk --------------------------------------------------------------------------------------------


def run_of(folder, fn=speed, **options):
    return rl.tune(fn, make_space(), patience=0, isolate=False, out=folder, **options)


def test_a_search_begins_where_an_earlier_run_ended(tmp_path):
    run_of(tmp_path / "a", trials=40)
    best = max(speed(config) for config in make_space())

    def speed_here(config):
        return speed(config, 55.0)

    after = {}
    for name, start in (("cold", []), ("warm", str(tmp_path / "a"))):
        result = rl.tune(speed_here, make_space(), trials=4, warm_start=start, seed=3, isolate=False)
        after[name] = result.best.throughput / 55.0 / best
    expected = "40 of 40 trials count, of another task"
    assert any("warm start from" in note and expected in note for note in result.notes)
    assert after["warm"] == pytest.approx(1.0)
    assert after["cold"] < 1.0
    assert all(trial.predicted_throughput is None for trial in result.all_trials)


def test_matched_and_unmatched_runs_are_reported():
    space, there = make_space("fusion"), make_space("kernels")
    past = trials_of(there.sample(9, 0), speed)
    past += trials_of([{**there.default(), "micro_batch": 64}], speed)  # a value that this space lacks
    line = taken(space, past, H100).summary
    assert line.startswith("warm start from runs/a: 9 of 10 trials count, of another task; knobs only here: fusion; ")
    assert "only there: kernels" in line
