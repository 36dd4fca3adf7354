"""What a command was asked to train is compared with what was observed of it, and knobs without an effect are named."""

from dataclasses import replace

import pytest
from redline.results import Measurement, Status
from redline.results.measurement import Trial
from redline.runners.command.comparison import (
    RequestedTraining,
    TrainingComparison,
    of_other_samples,
    printed_deviation,
    without_effect,
)
from redline.runners.command.observation import Speed
from redline.space import Config

OBSERVED = {
    "samples_per_step": 64.0, "samples_seen": True, "tokens_per_step": None, "rows_per_step": 64.0,
    "micro_batch": 16.0, "backwards": 4.0, "steps": 20,
    "median_step_ms": 100.0, "stalled": 0.0, "shares": {"forward": 1.0}, "ranks": 1, "replicas": 1.0, "same_data": False,
    "products": "float32", "autocast": [], "trained": {"float32": 10}, "optimizers": ["AdamW"], "compiled": False, "retries": 0,
    "torch": "2.13",
}  # fmt: skip


def measured(throughput=640.0, peak=100.0, **changes):
    return Measurement(
        status=Status.OK,
        throughput=throughput,
        unit="samples/s",
        step_ms=100.0,
        step_ms_spread=1.0,
        peak_memory_mib=peak,
        observed={**OBSERVED, **changes},
    )


@pytest.mark.parametrize(
    ("asked", "changes", "reason"),
    [
        (RequestedTraining(samples_per_step=64, micro_batch=16, precision="fp32", ranks=1), {}, None),
        (RequestedTraining(), {"samples_per_step": 3.0, "products": "float16", "ranks": 5}, None),
        (RequestedTraining(samples_per_step=64), {"samples_per_step": 63.5}, None),
        (
            RequestedTraining(samples_per_step=64, micro_batch=64),
            {"samples_per_step": 16.0, "micro_batch": 16.0, "backwards": 1.0},
            "it trains with 16 samples a step, not 64: the trainer reduced its batch",
        ),
        (RequestedTraining(samples_per_step=16), {}, "it trains with 64 samples a step, not 16"),
        # Short last batches of epochs, and several passes over a batch.
        (RequestedTraining(samples_per_step=64), {"samples_per_step": 50.0, "usual_step": 64.0}, None),
        (RequestedTraining(micro_batch=32), {"samples_per_step": 25.0, "micro_batch": 25.0, "usual_batch": 32.0}, None),
        (RequestedTraining(micro_batch=8), {"samples_per_step": 8.0, "micro_batch": 2.0, "usual_batch": 8.0}, None),
        (
            RequestedTraining(samples_per_step=64, micro_batch=64),
            {"samples_per_step": 31.0, "micro_batch": 31.0, "usual_step": 32.0, "usual_batch": 32.0},
            "it trains with 31 samples a step, not 64: the trainer reduced its batch",
        ),
        (RequestedTraining(samples_per_step=16), {"samples_seen": False}, None),
        # Ranks that all read the same synthetic batches, as replicas of a data-parallel training may.
        (RequestedTraining(samples_per_step=128), {"same_data": True, "ranks": 2}, None),
        (
            RequestedTraining(samples_per_step=256),
            {"same_data": True, "ranks": 2},
            "it trains with 64 samples a step, not 256",
        ),
        (RequestedTraining(precision="bf16"), {"products": "bfloat16"}, None),
        (RequestedTraining(precision="bf16"), {"products": None}, None),
        (
            RequestedTraining(precision="bf16"),
            {},
            "its matrix products ran in float32, not in bfloat16 as precision=bf16 asks",
        ),
        (
            RequestedTraining(precision="fp32"),
            {"products": "float16"},
            "its matrix products ran in float16, not in float32 as",
        ),
        (RequestedTraining(ranks=2), {}, "it trained on 1 rank, but `devices` asks for 2"),
    ],
)
def test_another_training_than_the_one_asked_for_is_named_with_both_numbers(asked, changes, reason):
    found = TrainingComparison().deviation(measured(**changes), None, {}, asked)
    assert found is None if reason is None else found.startswith(reason)


def test_a_command_may_have_its_own_unit_of_the_micro_batch_but_the_same_in_every_trial():
    comparison = TrainingComparison()
    assert comparison.deviation(measured(micro_batch=8.0), None, {}, RequestedTraining(micro_batch=4)) is None
    assert comparison.deviation(measured(micro_batch=16.0), None, {}, RequestedTraining(micro_batch=8)) is None
    assert comparison.deviation(measured(micro_batch=8.0), None, {}, RequestedTraining(micro_batch=8)) is None
    assert comparison.deviation(measured(micro_batch=6.0), None, {}, RequestedTraining(micro_batch=16)) == (
        "it trains with 6 samples a pass, not 16: the trainer reduced its batch"
    )


@pytest.mark.parametrize(
    ("samples", "rows", "reason"),
    [
        ((None, None), (256.0, 256.0), None),
        ((None, None), (256.0, 280.0), None),  # texts of other lengths
        (
            (None, None),
            (256.0, 1024.0),
            "its steps have 1,024 rows, those of the first run 256, so that steps/s do not",
        ),
        ((None, None), (None, 1024.0), None),  # a compiled model shows no products
        ((8.0, 32.0), (256.0, 1024.0), None),
        ((8.0, 32.0), (256.0, 512.0), None),  # shorter texts need less padding
        ((8.0, 32.0), (256.0, 256.0), "its steps have 256 rows as in the first run, and not 32 samples instead of 8"),
        ((8.0, 8.0), (256.0, 256.0), None),
    ],
)
def test_samples_that_no_loader_counts_are_held_against_the_rows_of_a_step(samples, rows, reason):
    comparison = TrainingComparison()
    first, second = (
        measured(samples_seen=False, samples_per_step=count, rows_per_step=height)
        for count, height in zip(samples, rows)
    )
    assert comparison.deviation(first, None, {}) is None
    deviation = comparison.deviation(second, None, {})
    assert deviation is None if reason is None else deviation.startswith(reason)
    assert comparison.deviation(replace(second, peak_memory_mib=200.0), None, {}) is None or samples == (None, None)


def speed(**changes):
    values = {
        "seconds_per_step": 0.1, "spread": 0.01, "median_s": 0.1, "steps": 30, "samples_per_step": 64.0,
        "backwards_per_step": 1.0, "tokens_per_step": None, "shares": {}, "compile_s": 0.0, "warmup_s": 1.0,
        "measure_s": 3.0, "complete": True,
    }  # fmt: skip
    return Speed(**{**values, **changes})


@pytest.mark.parametrize(
    ("metric", "value", "differs"),
    [
        ("samples_per_second", 640.0, False),
        ("samples_per_second", 700.0, False),
        ("samples_per_second", 2560.0, True),
        ("step_ms", 25.0, True),
        ("step_s", 0.11, False),
        ("steps_per_second", 10.0, False),
        ("tokens_per_second", 1e9, False),  # not known
        ("p99_ms", 5.0, False),
    ],
)
def test_a_printed_speed_far_from_the_observed_one_is_named(metric, value, differs):
    text = printed_deviation(metric, value, speed(), 64.0)
    assert bool(text) is differs
    if differs:
        assert f"it prints {metric} = {value:,.6g}, but " in text


def trials(*rows):
    return [
        Trial(number=number, config=Config(config), measurement=measurement)
        for number, (config, measurement) in enumerate(rows)
    ]


def test_a_precision_that_never_ran_is_named():
    rows = trials(
        ({"amp": False, "batch": 4}, measured()),
        ({"amp": True, "batch": 8}, measured(throughput=900.0, samples_per_step=128.0)),
    )
    assert without_effect(rows) == ["amp had no effect: all trials ran in float32"]


def test_a_knob_that_changes_nothing_between_trials_that_differ_in_it_alone_is_named():
    rows = trials(
        ({"compile": False, "batch": 4}, measured()),
        ({"compile": True, "batch": 4}, measured(throughput=645.0)),
        ({"compile": False, "batch": 8}, measured(throughput=900.0, samples_per_step=128.0)),
    )
    assert without_effect(rows) == ["compile had no effect: nothing observed differs between false, true"]


@pytest.mark.parametrize(
    "other",
    [measured(throughput=900.0), measured(peak=110.0), measured(compiled=True), measured(products="bfloat16")],
)
def test_a_knob_that_changes_anything_is_not_named(other):
    assert without_effect(trials(({"fast": False}, measured()), ({"fast": True}, other))) == []


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([(512, 8, 512), (1024, 8, 1024), (512, 4, 512)], "samples have from 512 to 1,024 elements by length, so that"),
        ([(512, 8, 512), (1024, 4, 1024)], "samples have from 512 to 1,024 elements by batch or length, so that"),
        ([(512, 8, 512), (512, 4, 500)], None),
        ([(512, 8, 512), (512, 4, None)], None),  # padded to the longest of a batch
        ([(512, 8, 512), (512, 4, 1024)], "samples have from 512 to 1,024 elements by batch, so that"),
        ([(512, 8, 512), (512, 8, 1024)], "samples have from 512 to 1,024 elements, so that"),
    ],
)
def test_samples_of_other_sizes_are_named_with_the_knob_that_decides_on_them(rows, says):
    measurements = [measured(elements_per_sample=elements) for _, _, elements in rows]
    configs = [{"length": length, "batch": batch} for length, batch, _ in rows]
    sentence = of_other_samples(trials(*zip(configs, measurements, strict=True)))
    assert sentence is None if says is None else sentence.startswith(says)
    tokens = [replace(measurement, unit="tokens/s") for measurement in measurements]
    assert of_other_samples(trials(*zip(configs, tokens, strict=True))) is None, "they compare what was asked for"
