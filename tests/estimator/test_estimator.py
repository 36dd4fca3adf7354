"""The estimator's interface: one configuration, many, and invalid ones."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from redline.base.errors import UsageError
from redline.estimator import Constants, Estimator, ModelFacts, TrainingSetup
from redline.estimator.hardware import DEVICES
from redline.models.parallel import PIPELINES

SHAPE = {"layers": 32, "hidden": 512, "heads": 8, "vocabulary": 32000}
SETUP = TrainingSetup(devices=64, seq_len=512, global_batch=512)
CONSTANTS = {
    "redline": None,
    "slow to launch, hides little": Constants(launch_us=32.0, overlap=0.1, sharded_overlap=0.05, loss_traffic=2.0),
    "stalls between nodes": Constants(
        stall_ms=265.0, stall_nodes=34.0, stalls_without_zero=True, stall_least=0.02, stall_fatal=0.3, slack_lasting=0.1
    ),
}
"""Constants of some frameworks."""
MADE: dict[tuple[str, str], Estimator] = {}


def made(hardware="h100-80gb", framework="redline"):
    key = (hardware, framework)
    if key not in MADE:
        MADE[key] = Estimator(SHAPE, hardware, SETUP, constants=CONSTANTS[framework])
    return MADE[key]


CONFIG = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4, 8, 16, 64]),
        "pp": st.sampled_from([1, 2, 4, 8]),
        "dp": st.sampled_from([1, 2, 4, 8, 64, 512]),
        "zero": st.integers(0, 3),
        "micro_batch": st.sampled_from([1, 2, 3, 7, 64, 4096]),
        "grad_accum": st.sampled_from([1, 2, 3, 64, 4096]),
        "checkpoint_ratio": st.floats(0, 1),
        "sequence_parallel": st.booleans(),
        "precision": st.sampled_from(["fp32", "bf16", "bf16_pure", "fp16", "fp8"]),
        "attention": st.sampled_from(["eager", "sdpa", "flash_attention_2"]),
        "fusion": st.booleans(),
        "kernels": st.booleans(),
        "fused_optimizer": st.booleans(),
        "offload": st.sampled_from(["none", "optimizer"]),
        "pipeline_schedule": st.sampled_from([*PIPELINES, None]),
        "virtual_stages": st.sampled_from([1, 2, 4]),
    }
)


@settings(max_examples=150, deadline=None)
@given(CONFIG, st.sampled_from(sorted(DEVICES)), st.sampled_from(sorted(CONSTANTS)))
def test_every_valid_configuration_has_finite_positive_numbers(config, hardware, framework):
    config = {name: value for name, value in config.items() if value is not None}
    found = made(hardware, framework)(config)
    for value in (found.step_ms, found.throughput, found.peak_memory_mib, found.mfu):
        assert math.isfinite(value) and value > 0
    assert 0 <= found.mfu <= 1
    assert 0 <= found.probability_runs <= found.probability_fits <= 1
    assert found.step_ms_low < found.step_ms < found.step_ms_high < math.inf
    assert found.memory_low < found.peak_memory_mib < found.memory_high < math.inf
    assert isinstance(found.fits, bool) and found.binds
    for name, value in found.breakdown.items():
        assert math.isfinite(value) and value >= 0, name
    for start, total in (("time.", found.step_ms), ("memory.", found.peak_memory_mib)):
        summed = sum(value for name, value in found.breakdown.items() if name.startswith(start))
        assert summed == pytest.approx(total)


@settings(max_examples=30, deadline=None)
@given(st.lists(CONFIG, min_size=1, max_size=20))
def test_a_table_says_what_each_call_says(configs):
    estimator = made()
    table = estimator.table(configs)
    assert len(table) == len(configs)
    # Knobs that do not apply are missing from a configuration, and None in a table.
    columns = {name: [each[name] for each in configs] for name in configs[0]}
    configs = [{name: value for name, value in each.items() if value is not None} for each in configs]
    np.testing.assert_allclose(estimator.table(columns).step_ms, table.step_ms)
    for index, config in enumerate(configs):
        one = estimator(config)
        assert one.step_ms == pytest.approx(table.step_ms[index])
        assert one.peak_memory_mib == pytest.approx(table.peak_memory_mib[index])
        assert one.throughput == pytest.approx(table.throughput[index])
        assert one == table.row(index) or one.step_ms == pytest.approx(table.row(index).step_ms)


def test_rows_with_and_without_degrees_of_their_own_have_the_same_values_as_alone():
    estimator = made()
    configs = [{"tp": 2}, {"tp": 2, "dp": 8, "grad_accum": 4}, {"tp": 4, "dp": 16}, {"tp": 4}]
    alone = [estimator(each).throughput for each in configs]
    for order in ([0, 1, 2, 3], [1, 0, 3, 2]):
        table = estimator.table([configs[each] for each in order])
        assert list(table.throughput) == pytest.approx([alone[each] for each in order])
    columns = {"tp": [2, 2, 4, 4], "dp": [math.nan, 8, 16, math.nan], "grad_accum": [math.nan, 4, math.nan, math.nan]}
    assert list(estimator.table(columns).throughput) == pytest.approx(alone)
    with pytest.raises(UsageError, match="knob 'dp' must be an integer in every configuration"):
        estimator.table([{"dp": 2.5}, {}])


def test_missing_knobs_take_the_setup_s_values():
    estimator = made()
    assert estimator({}).step_ms == estimator({"tp": 1, "pp": 1, "dp": 64, "grad_accum": 8}).step_ms


def test_throughput_is_the_global_batch_over_the_step():
    found = made()({"micro_batch": 4})
    assert found.throughput == pytest.approx(512 * 512 / found.step_ms * 1e3)
    assert found.unit == "tokens/s"


def test_mfu_is_the_models_flops_over_the_peak():
    found = made()({"micro_batch": 4, "precision": "bf16"})
    flops = ModelFacts.from_shape(**SHAPE).model_flops(512) * found.throughput
    assert found.mfu == pytest.approx(flops / (64 * 989.4e12), rel=1e-3)


def test_a_memory_limit_decides_what_fits():
    config = {"micro_batch": 8}
    need = made()(config).peak_memory_mib
    tight, wide = (
        Estimator(SHAPE, "h100", SETUP.replace(memory_limit_mib=limit))(config) for limit in (0.7 * need, 1.4 * need)
    )
    assert not tight.fits and tight.probability_fits < 0.1
    assert wide.fits and wide.probability_fits > 0.9


def test_retries_of_a_full_device_are_a_risk_and_not_time():
    config = {"micro_batch": 8}
    need = made()(config).peak_memory_mib

    def table(limit, **more):
        setup = SETUP.replace(memory_limit_mib=limit * need, **more)
        return Estimator(SHAPE, "h100", setup, constants=Constants(slack=0.5)).table([config])

    need = table(1e9 / need).fullest_memory_mib[0]
    roomy, full = table(3), table(1.0)
    assert roomy.log_throughput_risk[0] < 1e-6 and full.log_throughput_risk[0] > 0
    assert full.step_ms[0] == roomy.step_ms[0] and full.preference[0] < roomy.preference[0]
    assert full.step_ms_high[0] > roomy.step_ms_high[0] and full.step_ms_low[0] == roomy.step_ms_low[0]
    assert full.log_throughput_risk[0] > table(1.3).log_throughput_risk[0]
    # The device is equally full whichever memory a measurement states.
    assert table(1.0, reserved_memory=False).log_throughput_risk[0] == full.log_throughput_risk[0]
    # Far beyond the limit a run that survives retries almost certainly, which is still no time of a step that does not.
    beyond = table(0.2)
    assert beyond.step_ms[0] == roomy.step_ms[0] and beyond.log_throughput_risk[0] > full.log_throughput_risk[0]
    assert table(0.2, retries=False).log_throughput_risk[0] == 0


def test_a_stall_is_charged_where_it_is_likelier_than_not_and_in_the_interval_elsewhere():
    stalling = Constants(stall_ms=265.0, stall_nodes=34.0)
    estimator, smooth = (
        Estimator(SHAPE, "h100", SETUP.replace(devices=512), constants=each) for each in (stalling, Constants())
    )

    def row(estimator, nodes):
        return estimator.table([{"pp": 2, "micro_batch": 1, "dp": 4 * nodes, "grad_accum": 8}])

    few, many = row(estimator, 30), row(estimator, 36)
    assert few.step_ms == row(smooth, 30).step_ms and few.breakdown["time.stalls"] == 0
    assert few.log_throughput_risk > 0.5 and few.step_ms_high > 2 * row(smooth, 30).step_ms_high
    assert many.breakdown["time.stalls"] > 0 and many.log_throughput_risk < 0
    assert many.step_ms_low < many.step_ms - many.breakdown["time.stalls"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tp": 3}, r"tp \* sp \* cp \* pp must divide the devices, 64, but is 3"),
        ({"micro_batch": 3}, r"micro_batch \* dp must divide the global batch, 512, but is 192"),
        ({"micro_batch": 0}, "micro_batch must be at least 1"),
        ({"tp": 0}, "tp must be at least 1"),
        ({"zero": 4}, "zero must be from 0 to 3"),
        ({"checkpoint_ratio": 1.5}, "checkpoint_ratio must be from 0 to 1"),
        ({"micro_batch": "two"}, "'micro_batch' must be a number"),
        ({"micro_batch": 1.5}, "'micro_batch' must be an integer"),
        ({"micro_batch": math.nan}, "'micro_batch' must be an integer"),
        ({"checkpoint_ratio": math.nan}, "checkpoint_ratio must be from 0 to 1"),
        ({"dp": 0, "grad_accum": 1}, "dp must be at least 1"),
        ({"pp": 64, "dp": 1, "grad_accum": 1}, "pp = 64 must be at most the number of blocks of the model, 32"),
        (
            {"pp": 16, "dp": 4, "grad_accum": 8, "pipeline_schedule": "interleaved", "virtual_stages": 4},
            r"pp \* virtual_stages = 64 must be at most",
        ),
        ({"virtual_stages": 0}, "virtual_stages must be at least 1"),
    ],
)
def test_an_impossible_configuration_is_an_error_in_words(config, words):
    with pytest.raises(UsageError, match=words):
        made()(config)


@pytest.mark.parametrize(
    ("knob", "given", "nearest"),
    [
        ("precision", "bf61", "bf16"),
        ("offload", "optimiser", "optimizer"),
        ("attention", "flash", "flash_attention_2"),
    ],
)
def test_an_unknown_word_names_the_nearest(knob, given, nearest):
    with pytest.raises(UsageError, match=nearest):
        made()({knob: given})


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"device": 8}, "devices"),
        ({"devices": 0}, "devices must be an integer of at least 1"),
        ({"precision": "bf61"}, "bf16"),
        ({"optimizer": "adamv"}, "adamw"),
        ({"zero": 5}, "zero must be 0, 1, 2 or 3"),
        ({"memory_limit_mib": -1}, "memory_limit_mib must be positive"),
        ({"pipeline": "1f2b"}, "1f1b"),
    ],
)
def test_an_impossible_setup_is_an_error_in_words(training, words):
    with pytest.raises(UsageError, match=words):
        Estimator(SHAPE, "h100", training)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({**SHAPE, "layers": 0}, "layers must be a whole number of at least 1"),
        ({**SHAPE, "heads": 7}, "heads must divide hidden"),
        ({**SHAPE, "kv_heads": 3}, "kv_heads must divide heads"),
        ({**SHAPE, "hiden": 3}, "hidden"),
    ],
)
def test_an_impossible_shape_is_an_error_in_words(shape, words):
    with pytest.raises(UsageError, match=words):
        Estimator(shape, "h100", SETUP)


def test_a_model_of_another_kind_is_an_error():
    with pytest.raises(UsageError, match="model must be a workload"):
        Estimator(3, "h100", SETUP)


@pytest.mark.parametrize(
    "knob", [{"sequence_parallel": True}, {"fusion": True}, {"attention": "sdpa"}, {"virtual_stages": 2}]
)
def test_an_inapplicable_conditional_knob_has_the_setup_s_value(knob):
    estimator = made()
    split = {"tp": 2, "pp": 2, "pipeline_schedule": "interleaved", "micro_batch": 1}
    configs = [{**split, **knob}, {"tp": 2, "pp": 1, "micro_batch": 1}]
    table = estimator.table(pd.DataFrame(configs))
    np.testing.assert_allclose(table.step_ms, [estimator(each).step_ms for each in configs])
