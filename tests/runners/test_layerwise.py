"""The refinement block by block: within the memory limit, never slower than the uniform winner, and optimal."""

from itertools import product

import numpy as np
import pytest

from redline.runners.estimate import Shape
from redline.runners.estimate.answer import answer
from redline.runners.estimate.layerwise import _Choice, knapsack
from redline.runners.estimate.question import ask

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
    fix = {"precision": "bf16", "fusion": False, "offload": "none", **asked.pop("fix", {})}
    question = ask(SHAPE, asked.pop("hardware", "a100-40gb"), fix=fix, **asked)
    return question, answer(question, layerwise=True, top=1)


def test_where_memory_is_short_something_is_gained_within_the_limit():
    question, found = refined(fix={"tp": 1, "pp": 1, "zero": 1, "micro_batch": 8})
    layerwise = found.layerwise
    uniform = found.ranked[0]
    assert layerwise.gain > 0
    assert layerwise.peak_memory_mib <= question.estimator.memory_limit_mib
    assert layerwise.throughput > uniform.estimate.throughput
    # Fewer blocks are recomputed than in the uniform winner, whose ratio is coarser.
    assert len(layerwise.checkpointed) < 24 * uniform.config["checkpoint_ratio"] or layerwise.config[
        "micro_batch"
    ] != uniform.config["micro_batch"]
    assert "layer by layer" in "\n".join(layerwise.lines())


def test_where_memory_is_ample_nothing_is_recomputed_and_the_step_is_the_uniform_one():
    _, found = refined(hardware="h200-141gb", fix={"tp": 1, "pp": 1, "zero": 1, "micro_batch": 1})
    assert found.ranked[0].config["checkpoint_ratio"] == 0
    assert found.layerwise.checkpointed == ()
    assert found.layerwise.step_ms == pytest.approx(found.ranked[0].estimate.step_ms, rel=1e-6)


def test_earlier_stages_of_a_pipeline_recompute_more():
    _, found = refined(
        hardware="a100-40gb", global_batch=256, fix={"tp": 1, "pp": 4, "zero": 0, "micro_batch": 8}
    )
    indices = found.layerwise.checkpointed
    assert indices, found.layerwise
    stages = [sum(6 * stage <= each < 6 * stage + 6 for each in indices) for stage in range(4)]
    # 1F1B: the first stage holds four micro-batches, the last one.
    assert stages == sorted(stages, reverse=True) and stages[0] > stages[3]


def test_spare_memory_lets_zero_3_keep_blocks_whole():
    _, found = refined(hardware="h200-141gb", fix={"tp": 1, "pp": 1, "zero": 3, "micro_batch": 1})
    assert len(found.layerwise.gathered) == 24
    assert found.layerwise.gain > 0


def test_the_answer_holds_both_beside_each_other():
    question, found = refined(fix={"tp": 1, "pp": 1, "zero": 1, "micro_batch": 8})
    data = found.to_dict()["layerwise"]
    assert data["gain"] == pytest.approx(data["throughput"] / found.ranked[0].estimate.throughput - 1)
    assert data["config"]["checkpoint_blocks"] and "checkpoint_ratio" not in data["config"]
