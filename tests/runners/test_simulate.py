"""The simulated cluster: realistic noise and failures, equal for equal seeds."""

import numpy as np
import pytest
from redline.estimator import Shape
from redline.estimator.request import estimate_request
from redline.results import Status
from redline.runners import TrialRequest
from redline.runners.simulate import COMPILE_S, SimulateRunner, SimulationTerms


@pytest.fixture(scope="module")
def question():
    shape = Shape(layers=24, hidden=2048, heads=16, vocabulary=50000, name="1.3b")
    return estimate_request(shape, "a100-40gb", devices=64, seq_len=2048, global_batch=256)


@pytest.fixture(scope="module")
def configs(question):
    return question.space.sample(400, seed=1)


def runner_of(question, seed=0, **terms):
    return SimulateRunner(question.estimator, SimulationTerms(devices=64, seed=seed, **terms))


def tried(runner, configs):
    return [runner.run(TrialRequest(config=config, number=number)) for number, config in enumerate(configs)]


@pytest.fixture(scope="module")
def measured(question, configs):
    return tried(runner_of(question), configs)


def test_the_same_seed_answers_the_same_in_any_order(question, configs, measured):
    again = tried(runner_of(question), configs[::-1])[::-1]
    assert [each.status for each in again] == [each.status for each in measured]
    assert [each.throughput for each in again] == [each.throughput for each in measured]
    other = tried(runner_of(question, seed=1), configs[:50])
    assert [each.throughput for each in other] != [each.throughput for each in measured[:50]]


def test_simulated_measurements_scatter_around_the_prediction(question, configs, measured):
    ok = [(config, each) for config, each in zip(configs, measured) if each.ok]
    table = question.estimator.table([config for config, _ in ok])
    off = np.log([each.throughput for _, each in ok]) - np.log(table.throughput)
    assert 0.05 < off.std() < 0.6
    assert abs(off.mean()) < 0.8
    ranks = np.argsort(np.argsort([each.throughput for _, each in ok])), np.argsort(np.argsort(table.throughput))
    assert np.corrcoef(*ranks)[0, 1] > 0.8


def test_memory_decides_what_runs_out_of_it(question, measured):
    limit = question.estimator.memory_limit_mib
    out = [each for each in measured if each.status is Status.OOM]
    ok = [each for each in measured if each.ok]
    assert out and ok
    assert all(each.peak_memory_mib <= limit for each in ok)
    assert all(each.peak_memory_mib > limit and "out of memory" in each.reason for each in out)
    assert all(each.reason.startswith("simulated: ") for each in measured if not each.ok)


def test_some_simulated_trials_crash(question):
    configs = question.space.sample(1500, seed=2)
    small = [config for config in configs if config["tp"] * config["pp"] >= 8][:600]
    statuses = [each.status for each in tried(runner_of(question), small)]
    ran = [each for each in statuses if each is not Status.OOM]
    assert 0 < sum(each is Status.CRASH for each in ran) < 0.05 * len(ran)


def test_measuring_again_scatters_by_little(question, configs, measured):
    config = next(config for config, each in zip(configs, measured) if each.ok)
    runner = runner_of(question)
    speeds = [each.throughput for each in tried(runner, [config] * 40)]
    assert len(set(speeds)) == 40
    assert 0.003 < np.std(np.log(speeds)) < 0.1
    assert np.median(speeds) == pytest.approx(speeds[0], rel=0.05)


def test_a_measurement_is_whole_and_consistent(configs, measured):
    config, one = next((config, each) for config, each in zip(configs, measured) if each.ok)
    assert one.samples_per_step == 256
    assert one.throughput == pytest.approx(256 * 2048 / (one.step_ms * 1e-3))
    assert one.tokens_per_second == one.throughput
    assert one.samples_per_second == pytest.approx(one.throughput / 2048)
    rate = {"fp32": 19.5, "bf16": 312.0, "bf16_pure": 312.0}[config["precision"]]
    assert one.tflops_per_device == pytest.approx(one.mfu * rate)
    assert one.seconds_total == pytest.approx(
        one.seconds_overhead + one.seconds_build + one.seconds_warmup + one.seconds_measure
    )


def test_a_deadline_holds_in_simulated_time(question, configs, measured):
    ran = [config for config, each in zip(configs, measured) if each.ok]
    at = next(config for config in ran if not config["fusion"])
    (late,) = tried(runner_of(question, timeout_s=10.0), [at])
    assert late.status is Status.TIMEOUT and "deadline of 10 s" in late.reason
    assert late.seconds_total == 10.0
    # Compilation time is not part of the deadline.
    compiled = next(config for config in ran if config["fusion"])
    (late,) = tried(runner_of(question, timeout_s=10.0), [compiled])
    assert late.status is Status.TIMEOUT
    assert late.seconds_total == 10.0 + COMPILE_S


@pytest.mark.parametrize("slots", [1, 3])
def test_starts_and_durations_are_of_one_clock(question, configs, slots):
    runner = SimulateRunner(question.estimator, SimulationTerms(devices=64, begun=1e9), slots=slots)
    spans = [(each.started, each.started + each.seconds_total) for each in tried(runner, configs[:40])]
    assert [begin for begin, _ in spans[:slots]] == [1e9] * slots
    # The next trial starts as soon as a slot is free, and no more trials run at once than there are slots.
    assert all(begin in {end for _, end in spans} for begin, _ in spans[slots:])
    assert max(sum(begin <= now < end for begin, end in spans) for now, _ in spans) == slots
    assert max(end for _, end in spans) - 1e9 >= sum(end - begin for begin, end in spans) / slots


def test_the_log_says_that_nothing_was_run(question, configs, measured, tmp_path):
    at = next(index for index, each in enumerate(measured) if each.ok)
    log = tmp_path / "logs" / "7.log"
    done = runner_of(question).run(TrialRequest(config=configs[at], number=7, log=log))
    assert done.log == "logs/7.log"
    assert log.read_text().startswith("simulated, nothing was run")
    assert "time.matmul" in log.read_text()
