"""The refinement block by block: within the memory limit, never slower than the uniform winner, and optimal."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from redline.base.errors import SpaceError, UsageError
from redline.estimator import Shape
from redline.estimator.document import estimate_document
from redline.estimator.layerwise import _Choice, knapsack
from redline.estimator.request import estimate_request
from redline.results import Measurement, Status, Trial

SHAPE = Shape(layers=24, hidden=2048, heads=16, vocabulary=50000, name="1.3b")


def test_the_dynamic_program_finds_what_trying_all_finds():
    random = np.random.default_rng(0)
    for _ in range(20):
        options = [_Choice(-float(random.uniform(0, 3)), float(random.uniform(0, 10)), False, False) for _ in range(3)]
        options.append(_Choice(0.0, 0.0, True, False))
        choices, budget = [options] * 5, float(random.uniform(5, 30))
        best = min(
            sum(each.seconds for each in picked)
            for picked in product(*choices)
            if sum(each.mib for each in picked) <= budget
        )
        seconds, mib, taken = knapsack(choices, budget)
        assert mib <= budget and len(taken) == 5
        assert sum(each.mib for each in taken) == pytest.approx(mib)
        # Memory is rounded up to 1/2000 of the budget a block.
        assert best - 1e-9 <= seconds <= best + 0.05


def test_nothing_within_the_budget_is_nothing():
    assert knapsack([[_Choice(0.0, 5.0, True, False)]], 4.0) is None
    assert knapsack([], -1.0) is None


def refined(**options):
    asked = {"devices": 8, "seq_len": 2048, "global_batch": 64, **options}
    fix = {"precision": "bf16", "fusion": False, "offload": "none", "sp": 1, "cp": 1, **asked.pop("fix", {})}
    request = estimate_request(SHAPE, asked.pop("hardware", "a100-40gb"), fix=fix, **asked)
    return request, estimate_document(request, layerwise=True, top=1)


def test_where_memory_is_short_something_is_gained_within_the_limit():
    request, found = refined(fix={"tp": 1, "pp": 1, "zero": 1, "micro_batch": 8})
    layerwise = found.layerwise
    uniform = found.ranked[0]
    assert layerwise.gain > 0
    assert layerwise.peak_memory_mib <= request.estimator.memory_limit_mib
    assert layerwise.throughput > uniform.estimate.throughput
    # Fewer blocks are recomputed than in the uniform winner, whose ratio is coarser.
    assert (
        len(layerwise.checkpointed) < 24 * uniform.config["checkpoint_ratio"]
        or layerwise.config["micro_batch"] != uniform.config["micro_batch"]
    )
    assert "layer by layer" in "\n".join(layerwise.lines())


def test_where_memory_is_ample_nothing_is_recomputed_and_the_step_is_the_uniform_one():
    _, found = refined(hardware="h200-141gb", fix={"tp": 1, "pp": 1, "zero": 1, "micro_batch": 1})
    assert found.ranked[0].config["checkpoint_ratio"] == 0
    assert found.layerwise.checkpointed == ()
    assert found.layerwise.step_ms == pytest.approx(found.ranked[0].estimate.step_ms, rel=1e-6)


def test_earlier_stages_of_a_pipeline_recompute_more():
    fix = {"tp": 1, "pp": 4, "pipeline_schedule": "1f1b", "zero": 0, "micro_batch": 8}
    _, found = refined(hardware="a100-40gb", global_batch=256, fix=fix)
    indices = found.layerwise.checkpointed
    assert indices, found.layerwise
    stages = [sum(6 * stage <= each < 6 * stage + 6 for each in indices) for stage in range(4)]
    # 1F1B: the first stage holds four micro-batches, the last one.
    assert stages == sorted(stages, reverse=True) and stages[0] > stages[3]


def test_spare_memory_lets_zero_3_keep_blocks_whole():
    _, found = refined(hardware="h200-141gb", fix={"tp": 1, "pp": 1, "zero": 3, "micro_batch": 1})
    assert len(found.layerwise.gathered) == 24
    assert found.layerwise.gain > 0


@pytest.mark.parametrize(
    "asked",
    [
        {"fix": {"tp": 1, "pp": 1, "zero": 1, "micro_batch": 8}},
        {
            "global_batch": 256,
            "fix": {"tp": 1, "pp": 4, "pipeline_schedule": "1f1b", "zero": 0, "micro_batch": 8},
        },
        {"hardware": "h200-141gb", "fix": {"tp": 1, "pp": 1, "zero": 3, "micro_batch": 1}},
    ],
)
def test_the_refined_configuration_is_predicted_as_it_was_reported(asked):
    request, found = refined(**asked)
    refinement = found.layerwise
    assert refinement.gain > 0
    # One by itself, one among uniform ones in a table, and one given in words.
    alone = request.estimator(refinement.config)
    table = request.estimator.table([found.ranked[0].config, refinement.config])
    again = estimate_document(request, config=refinement.config).ranked[0].estimate
    for step, memory, rate in (
        (alone.step_ms, alone.peak_memory_mib, alone.throughput),
        (table.step_ms[1], table.peak_memory_mib[1], table.throughput[1]),
        (again.step_ms, again.peak_memory_mib, again.throughput),
    ):
        assert step == pytest.approx(refinement.step_ms, rel=1e-9)
        assert memory == pytest.approx(refinement.peak_memory_mib, rel=1e-9)
        assert rate == pytest.approx(refinement.throughput, rel=1e-9)
    assert table.step_ms[0] == pytest.approx(found.ranked[0].estimate.step_ms, rel=1e-9)


def estimator(zero=1, pp=1, **more):
    options = {"devices": 8, "seq_len": 2048, "global_batch": 256, **more}
    request = estimate_request(SHAPE, "a100-80gb", fix={"precision": "bf16", "offload": "none"}, **options)
    base = {
        "tp": 1,
        "pp": pp,
        "zero": zero,
        "micro_batch": 4,
        "precision": "bf16",
        "attention": "sdpa",
        "fusion": False,
    }
    return lambda **knobs: request.estimator({**base, **knobs})


@pytest.mark.parametrize("pp", [1, 4])
def test_all_or_no_blocks_by_name_are_the_uniform_ratios(pp):
    predict = estimator(pp=pp)
    for text, ratio in (("none", 0.0), ("0-23", 1.0)):
        named, uniform = predict(checkpoint_blocks=text), predict(checkpoint_ratio=ratio)
        assert named.step_ms == pytest.approx(uniform.step_ms, rel=1e-12)
        assert named.peak_memory_mib == pytest.approx(uniform.peak_memory_mib, rel=1e-12)
        assert named.breakdown == pytest.approx(uniform.breakdown)
    # It stands in place of a ratio.
    assert predict(checkpoint_blocks="none", checkpoint_ratio=1.0).step_ms == predict(checkpoint_ratio=0.0).step_ms


def test_more_recomputed_blocks_take_less_memory_and_longer():
    predict = estimator()
    found = [predict(checkpoint_blocks=text) for text in ("none", "0-2", "0-2,5,7-9", "0-22")]
    memory, steps = [each.peak_memory_mib for each in found], [each.step_ms for each in found]
    assert memory == sorted(memory, reverse=True) and len(set(memory)) == 4
    assert steps == sorted(steps) and len(set(steps)) == 4


def test_where_blocks_are_recomputed_only_in_early_stages_the_fullest_may_be_a_later_one():
    predict = estimator(pp=4)
    first, all_of_them, last = (predict(checkpoint_blocks=text) for text in ("0-5", "0-23", "18-23"))
    nothing = predict(checkpoint_blocks="none")
    # The first stage holds most: the last one's blocks save nothing of the peak, but cost the slowest stage its time.
    assert last.peak_memory_mib == nothing.peak_memory_mib > first.peak_memory_mib > all_of_them.peak_memory_mib
    assert nothing.step_ms < first.step_ms < all_of_them.step_ms
    assert nothing.step_ms < last.step_ms


def test_blocks_that_stay_gathered_take_memory_and_save_gathers_under_zero_3_alone():
    predict = estimator(zero=3)
    none, some, all_of_them = (predict(gathered_blocks=text) for text in ("none", "0-11", "0-23"))
    assert none.peak_memory_mib < some.peak_memory_mib < all_of_them.peak_memory_mib
    gathers = [each.breakdown["time.parameter gathers"] for each in (none, some, all_of_them)]
    assert gathers[0] > gathers[1] > gathers[2] > 0
    assert none.step_ms == predict().step_ms
    other = estimator(zero=1)
    assert other(gathered_blocks="0-23").step_ms == other().step_ms
    assert other(gathered_blocks="0-23").peak_memory_mib == other().peak_memory_mib


@pytest.mark.parametrize("text, rule", [("0-24", "24 blocks"), ("first", "indices such as 0-3,7 or none")])
def test_blocks_that_there_are_not_are_refused(text, rule):
    with pytest.raises(UsageError, match=rule):
        estimator()(checkpoint_blocks=text)


def test_blocks_and_a_ratio_together_are_refused_where_both_are_asked_for():
    request, _ = refined(fix={"tp": 1, "pp": 1, "zero": 1, "micro_batch": 8})
    with pytest.raises(SpaceError, match="in place of checkpoint_ratio"):
        estimate_document(request, config={"checkpoint_blocks": "0-3", "checkpoint_ratio": 0.5})
    with pytest.raises(SpaceError, match="checkpoint_blocks"):
        estimate_document(request, config={"checkpoint_block": "0-3"})


def test_what_was_learnt_from_a_refined_trial_counts_like_any_other():
    predict = estimator()
    request = estimate_request(SHAPE, "a100-80gb", devices=8, seq_len=2048, global_batch=256, fix={"precision": "bf16"})
    config = {"tp": 1, "zero": 1, "micro_batch": 4, "precision": "bf16", "checkpoint_blocks": "0-7"}
    expected = predict(checkpoint_blocks="0-7")
    measured = Measurement(status=Status.OK, step_ms=1.3 * expected.step_ms, peak_memory_mib=expected.peak_memory_mib)
    trials = [Trial(number=0, config=config, measurement=measured)]
    after = request.estimator.calibrate(trials)(config)
    assert expected.step_ms < after.step_ms <= measured.step_ms
    assert after.step_ms_high - after.step_ms_low < expected.step_ms_high - expected.step_ms_low


def test_the_answer_holds_both_beside_each_other():
    _request, found = refined(fix={"tp": 1, "pp": 1, "zero": 1, "micro_batch": 8})
    data = found.to_dict()["layerwise"]
    assert data["gain"] == pytest.approx(data["throughput"] / found.ranked[0].estimate.throughput - 1)
    assert data["config"]["checkpoint_blocks"] and "checkpoint_ratio" not in data["config"]


def test_a_refinement_that_treats_all_blocks_alike_is_said_to_be_the_uniform_configuration():
    _, found = refined(fix={"tp": 1, "pp": 1, "zero": 1, "micro_batch": 8})
    mixed = found.layerwise
    assert 0 < len(mixed.checkpointed) < 24 and mixed.amounts_to(24) is None
    base = {name: value for name, value in mixed.config.items() if name != "checkpoint_blocks"}

    def made(checkpointed, gathered=(), **more):
        config = {
            **mixed.config,
            "checkpoint_blocks": "any",
            **({"gathered_blocks": "any"} if gathered else {}),
            **more,
        }
        return replace(mixed, config=config, checkpointed=checkpointed, gathered=gathered).amounts_to(24)

    every = tuple(range(24))
    assert made(()) == {**base, "checkpoint_ratio": 0.0}
    assert made(every) == {**base, "checkpoint_ratio": 1.0}
    assert made((), every, zero=3) == {**base, "zero": 2, "checkpoint_ratio": 0.0}
    assert made((), every[:5], zero=3) is None
