"""Calibration corrects predictions from a few trials, survives bad ones, and states its uncertainty."""

from dataclasses import replace

import numpy as np
import pytest
from redline.estimator import Estimator, TrainingSetup
from redline.estimator.calibration import fit
from redline.estimator.time import TIME_TERMS
from redline.results import Measurement, Status, Trial

SHAPE = {"layers": 24, "hidden": 2048, "heads": 16, "vocabulary": 32000}
SETUP = TrainingSetup(devices=32, seq_len=2048, global_batch=512, precision="bf16_pure")
CONFIGS = [
    {"tp": tp, "pp": pp, "zero": zero, "micro_batch": micro, "checkpoint_ratio": ratio}
    for tp in (1, 2, 4, 8) for pp in (1, 2, 4) for zero in (0, 1) for micro in (1, 2, 4) for ratio in (0.0, 1.0)
]  # fmt: skip
PRIOR = np.array([0.15, 0.3, 0.35])


@pytest.fixture(scope="module")
def plain():
    return Estimator(SHAPE, "a100-80gb", SETUP)


def truth(plain, rng, noise_time=0.08, noise_memory=0.05, factors=None):
    """A cluster that differs from the estimate by factors on its terms and by noise."""
    table = plain.table(CONFIGS)
    factors = factors or {"time.matmul": 1.3, "time.tensor parallel": 1.6, "memory.activations": 1.25}
    time = sum(value * factors.get(name, 1.0) for name, value in table.breakdown.items() if name.startswith("time."))
    memory = sum(
        value * factors.get(name, 1.0) for name, value in table.breakdown.items() if name.startswith("memory.")
    )
    return (
        time * np.exp(noise_time * rng.standard_normal(len(time))),
        memory * np.exp(noise_memory * rng.standard_normal(len(memory))),
    )


def trials(chosen, step, memory):
    return [
        Trial(
            number=number,
            config=CONFIGS[at],
            measurement=Measurement(status=Status.OK, step_ms=float(step[at]), peak_memory_mib=float(memory[at])),
        )
        for number, at in enumerate(chosen)
    ]  # fmt: skip


def failed(status, config, **more):
    return Trial(number=0, config=config, measurement=Measurement(status=status, reason="test", **more))


def error(estimator, step, without=()):
    keep = np.setdiff1d(np.arange(len(CONFIGS)), without)
    return float(np.median(np.abs(np.log(estimator.table(CONFIGS).step_ms[keep] / step[keep]))))


def test_no_trial_changes_nothing(plain):
    for given in ([], [Trial(number=0, config=CONFIGS[0])]):
        found = plain.calibrate(given)
        np.testing.assert_array_equal(found.table(CONFIGS).step_ms, plain.table(CONFIGS).step_ms)
        assert found.calibrated == 0


@pytest.mark.parametrize("count", [1, 3, 8, 30])
def test_a_few_trials_make_it_better(plain, count):
    before, after = [], []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        step, memory = truth(plain, rng)
        chosen = rng.permutation(len(CONFIGS))[:count]
        found = plain.calibrate(trials(chosen, step, memory))
        assert found.calibrated == count
        before.append(error(plain, step, chosen))
        after.append(error(found, step, chosen))
    assert np.mean(after) < np.mean(before)
    if count >= 8:
        assert np.mean(after) < 0.5 * np.mean(before)


def test_more_trials_reduce_the_uncertainty(plain):
    rng = np.random.default_rng(1)
    step, memory = truth(plain, rng)
    order = rng.permutation(len(CONFIGS))
    found = [
        plain.calibrate(trials(order[:count], step, memory)).table(CONFIGS).log_throughput_std.mean()
        for count in (0, 3, 10, 40)
    ]
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.7 * found[0]


@pytest.mark.parametrize("count", [4, 10])
def test_an_outlier_does_not_spoil_the_calibration(plain, count):
    clean, with_outlier = [], []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        step, memory = truth(plain, rng)
        chosen = rng.permutation(len(CONFIGS))[:count]
        outlier = step.copy()
        outlier[chosen[0]] *= 20
        clean.append(error(plain.calibrate(trials(chosen, step, memory)), step, chosen))
        with_outlier.append(error(plain.calibrate(trials(chosen, outlier, memory)), step, chosen))
    assert np.mean(with_outlier) < np.mean(clean) + 0.1
    assert np.max(with_outlier) < 0.5  # the outlier was off by log(20) = 3


def test_intervals_contain_80_percent_of_what_follows_the_model(plain):
    # The truth follows the estimator's assumptions: factors from its prior, noise of its size.
    constants = plain.constants
    inside_before, inside_after, inside_memory = [], [], []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        draw = {name: np.exp(rng.normal(0, std)) for name, std in (
            ("compute", constants.compute_std), ("launches", constants.launch_std), ("links", constants.link_std),
            ("network", constants.network_std), ("activations", constants.activation_std),
            ("static", constants.static_std), ("overhead", constants.overhead_std),
        )}  # fmt: skip
        from redline.estimator.calibration import leaves_node, memory_groups, time_groups
        from redline.estimator.knob_arrays import knob_arrays

        cols = knob_arrays(CONFIGS, plain.training)
        time, memory, _, _ = plain._raw(cols)
        far = leaves_node(cols, plain.hardware.devices_per_node)
        factors = np.array([draw["compute"], draw["launches"], draw["links"], 1.0, draw["network"]])
        step = (time_groups(time, far) * factors).sum(1)
        step *= np.exp(plain._time_noise(cols) * rng.standard_normal(len(step)))
        peak = (memory_groups(memory) * [draw["static"], draw["activations"], draw["overhead"]]).sum(1)
        peak *= np.exp(constants.memory_noise * rng.standard_normal(len(peak)))
        chosen = rng.permutation(len(CONFIGS))[:5]
        keep = np.setdiff1d(np.arange(len(CONFIGS)), chosen)
        for estimator, into in (
            (plain, inside_before),
            (plain.calibrate(trials(chosen, step, peak)), inside_after),
        ):
            table = estimator.table(CONFIGS)
            off = np.abs(np.log(table.step_ms / step))
            into.append(np.mean((off <= 1.2816 * table.log_throughput_std)[keep]))
        off = np.abs(np.log(table.peak_memory_mib / peak))
        inside_memory.append(np.mean((off <= 1.2816 * table.log_memory_std)[keep]))
    assert 0.72 < np.mean(inside_before) < 0.88
    assert 0.72 < np.mean(inside_after) < 0.88
    assert 0.72 < np.mean(inside_memory) < 0.88


def test_throughput_is_as_good_as_a_step_time(plain):
    at = 10
    table = plain.table(CONFIGS)
    measured = Measurement(status=Status.OK, tokens_per_second=float(table.throughput[at] / 2))
    one = Measurement(status=Status.OK, step_ms=float(table.step_ms[at] * 2))
    by_rate, by_time = (
        plain.calibrate([Trial(number=0, config=CONFIGS[at], measurement=each)]) for each in (measured, one)
    )
    np.testing.assert_allclose(by_rate.table(CONFIGS).step_ms, by_time.table(CONFIGS).step_ms)


def test_an_unexpected_oom_raises_the_memory_prediction(plain):
    table = plain.table(CONFIGS)
    at = int(np.argmin(np.abs(table.peak_memory_mib / table.memory_limit_mib - 0.8)))
    found = plain.calibrate([failed(Status.OOM, CONFIGS[at])]).table(CONFIGS)
    assert found.peak_memory_mib[at] > table.peak_memory_mib[at]
    assert found.probability_fits[at] < table.probability_fits[at]


@pytest.mark.parametrize("status", [Status.CRASH, Status.TIMEOUT, Status.WRONG])
def test_other_failures_say_nothing(plain, status):
    found = plain.calibrate([failed(status, CONFIGS[0])])
    np.testing.assert_array_equal(found.table(CONFIGS).step_ms, plain.table(CONFIGS).step_ms)


def test_calibrations_do_not_add_up_and_leave_the_first_alone(plain):
    rng = np.random.default_rng(3)
    step, memory = truth(plain, rng)
    given = trials(range(0, 30, 5), step, memory)
    before = plain.table(CONFIGS).step_ms
    once = plain.calibrate(given)
    np.testing.assert_allclose(once.calibrate(given).table(CONFIGS).step_ms, once.table(CONFIGS).step_ms)
    np.testing.assert_array_equal(plain.table(CONFIGS).step_ms, before)


def test_terms_still_sum_after_calibration(plain):
    rng = np.random.default_rng(4)
    step, memory = truth(plain, rng)
    table = plain.calibrate(trials(range(0, 140, 20), step, memory)).table(CONFIGS)
    for start, total in (("time.", table.step_ms), ("memory.", table.peak_memory_mib)):
        summed = sum(value for name, value in table.breakdown.items() if name.startswith(start))
        np.testing.assert_allclose(summed, total, rtol=1e-9)


def test_fit_stays_near_the_prior_for_what_no_trial_shows():
    groups = np.array([[1.0, 0.0, 0.0]] * 5)
    found = fit(groups, np.full(5, 1.2), PRIOR, 0.05)
    assert np.exp(found.theta[0]) == pytest.approx(1.2, rel=0.02)
    np.testing.assert_allclose(found.theta[1:], 0.0, atol=1e-9)
    np.testing.assert_allclose(np.diag(found.covariance)[1:], PRIOR[1:] ** 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -1.0])
def test_fit_leaves_out_impossible_measurements(bad):
    groups = np.ones((4, 3))
    with_bad = fit(groups, np.array([3.3, 3.3, 3.3, bad]), PRIOR, 0.1)
    without = fit(groups[:3], np.full(3, 3.3), PRIOR, 0.1)
    np.testing.assert_allclose(with_bad.theta, without.theta)


@pytest.mark.parametrize("trained", [0, 12])
def test_effects_are_what_is_common_in_the_spread(plain, trained):
    step, memory = truth(plain, np.random.default_rng(0))
    made = plain.calibrate(trials(range(trained), step, memory))
    table = made.table(CONFIGS)
    common = (table.log_throughput_effects**2).sum(axis=1)
    assert table.log_throughput_effects.shape == (len(CONFIGS), 5)
    assert (common > 0).all() and (common < table.log_throughput_std**2).all()
    # To first order, a small error of a factor changes every throughput by the factor's effect.
    rng = np.random.default_rng(1)
    shift = 0.01 * rng.standard_normal(5)
    moved = object.__new__(Estimator)
    moved.__dict__.update(made.__dict__)
    known = made._time
    theta = known.theta + np.linalg.cholesky(known.covariance) @ shift
    moved._time = replace(known, theta=theta)
    expected = table.log_throughput_effects @ shift
    assert np.log(moved.table(CONFIGS).throughput / table.throughput) == pytest.approx(expected, abs=2e-5)


def test_what_factors_leave_is_interpolated_to_similar_configurations_alone(plain):
    """One configuration is 40 % slower for a reason that no factor explains; its neighbours are so too."""
    near = {"tp": 2, "pp": 2, "zero": 1, "micro_batch": 2, "checkpoint_ratio": 0.0}
    neighbour, far = {**near, "zero": 0}, {"tp": 8, "pp": 1, "zero": 0, "micro_batch": 4, "checkpoint_ratio": 1.0}
    others = [each for each in CONFIGS if each["tp"] == 8 and each["pp"] == 4 and each["micro_batch"] == 1]
    steps = plain.table([near, *others]).step_ms * [1.4, *([1.0] * len(others))]
    given = [
        Trial(number=at, config=config, measurement=Measurement(status=Status.OK, step_ms=float(step)))
        for at, (config, step) in enumerate(zip([near, *others], steps))
    ]
    known, factors = plain.calibrate(given), plain.calibrate(given, interpolate=False)

    def slower(config):
        return known(config).step_ms / factors(config).step_ms - 1

    assert 0.1 < slower(neighbour) < slower(near) < 0.4
    assert abs(slower(far)) < 0.03
    assert sum(known.table([near]).breakdown[f"time.{name}"][0] for name in TIME_TERMS) == pytest.approx(
        known(near).step_ms
    )
    # What is known of a configuration narrows its interval, and hardly that of others.
    narrowed = known.table([near, far]).log_throughput_std / factors.table([near, far]).log_throughput_std
    assert narrowed[0] < 0.8 and narrowed[1] > 0.9
