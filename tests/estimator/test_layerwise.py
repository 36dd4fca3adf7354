"""The refinement block by block: within the memory limit, never slower than the uniform winner, and optimal."""

import time
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from redline.base.errors import SpaceError, UsageError
from redline.estimator import Shape
from redline.estimator.document import estimate_document
from redline.estimator.knob_arrays import knob_arrays
from redline.estimator.layerwise import Layerwise, _balanced, _Choice, knapsack, refine, relatives
from redline.knobs.layers import BlockStrategy, parse
from shape_requests import shape_request

SLOWER_HERE = 3
"""Factor for time limits, as other tests run at the same time."""
LAYER = BlockStrategy(1, 0, False)
SHAPE = Shape(layers=24, hidden=2048, heads=16, vocabulary=50000, name="1.3b")


def test_the_dynamic_program_finds_what_trying_all_finds():
    random = np.random.default_rng(0)
    for _ in range(20):
        options = [_Choice(-float(random.uniform(0, 3)), float(random.uniform(0, 10)), LAYER) for _ in range(3)]
        options.append(_Choice(0.0, 0.0, LAYER))
        choices, budget = [options] * 5, float(random.uniform(5, 30))
        best = min(
            sum(each.seconds for each in picked)
            for picked in product(*choices)
            if sum(each.mib for each in picked) <= budget
        )
        ((seconds, mib, taken),) = knapsack(choices, [budget])
        assert mib <= budget and len(taken) == 5
        assert sum(each.mib for each in taken) == pytest.approx(mib)
        # Memory is rounded up to 1/2000 of the budget a block.
        assert best - 1e-9 <= seconds <= best + 0.05


def test_no_plan_within_the_budget_returns_none():
    assert knapsack([[_Choice(0.0, 5.0, LAYER)]], [4.0]) == [None]
    assert knapsack([], [-1.0]) == [None]


def refined(**options):
    asked = {"devices": 8, "seq_len": 2048, "global_batch": 64, **options}
    fix = {"precision": "bf16", "fusion": False, "offload": "none", "sp": 1, "cp": 1, **asked.pop("fix", {})}
    request = shape_request(SHAPE, asked.pop("hardware", "a100-40gb"), fix=fix, **asked)
    return request, estimate_document(request, layerwise=True, top=1)


def test_short_memory_leaves_a_gain_within_the_limit():
    request, found = refined(fix={"tp": 1, "pp": 1, "zero": 1, "micro_batch": 8})
    layerwise = found.layerwise
    uniform = found.ranked[0]
    assert layerwise.gain > 0
    assert layerwise.estimate.peak_memory_mib <= request.estimator.memory_limit_mib
    assert layerwise.estimate.throughput > uniform.estimate.throughput
    # Fewer blocks are recomputed than by the uniform winner, which has a coarser ratio.
    assert (
        sum(each.ckpt for each in layerwise.layers) < 24 * uniform.config["checkpoint_ratio"]
        or layerwise.config["micro_batch"] != uniform.config["micro_batch"]
    )
    assert "layer by layer" in "\n".join(layerwise.lines())


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
    # Predicted alone, among uniform ones in a table, and by its text.
    alone = request.estimator(refinement.config)
    table = request.estimator.table([found.ranked[0].config, refinement.config])
    again = estimate_document(request, config=refinement.config).ranked[0].estimate
    for step, memory, rate in (
        (alone.step_ms, alone.peak_memory_mib, alone.throughput),
        (table.step_ms[1], table.peak_memory_mib[1], table.throughput[1]),
        (again.step_ms, again.peak_memory_mib, again.throughput),
    ):
        assert step == pytest.approx(refinement.estimate.step_ms, rel=1e-9)
        assert memory == pytest.approx(refinement.estimate.peak_memory_mib, rel=1e-9)
        assert rate == pytest.approx(refinement.estimate.throughput, rel=1e-9)
    assert table.step_ms[0] == pytest.approx(found.ranked[0].estimate.step_ms, rel=1e-9)


def test_plans_with_equal_blocks_and_other_knobs_are_predicted_together_as_alone():
    """Embedding and head follow the knobs, blocks their strategies."""
    asked = {"devices": 8, "seq_len": 2048, "global_batch": 64, "fix": {"precision": "bf16", "sp": 1, "cp": 1}}
    predict = shape_request(SHAPE, "a100-80gb", **asked).estimator
    shared = {"pp": 1, "micro_batch": 4, "fusion": False}
    plans = [
        {**shared, "tp": 2, "zero": 2, "strategy": "0-15:tp1,zero3,ckpt 16-23:tp1,zero3"},
        {**shared, "tp": 1, "zero": 3, "strategy": "0-15:ckpt 16-23:-"},
        {**shared, "tp": 1, "zero": 2, "strategy": "0-15:zero3,ckpt 16-23:zero3"},
    ]
    table = predict.table(plans)
    for index, plan in enumerate(plans):
        alone = predict(plan)
        assert table.step_ms[index] == pytest.approx(alone.step_ms, rel=1e-9)
        assert table.peak_memory_mib[index] == pytest.approx(alone.peak_memory_mib, rel=1e-9)
    assert len(set(np.round(table.step_ms, 6))) == 3


def estimator(zero=1, pp=1, **more):
    options = {"devices": 8, "seq_len": 2048, "global_batch": 256, **more}
    request = shape_request(SHAPE, "a100-80gb", fix={"precision": "bf16", "offload": "none"}, **options)
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
def test_the_same_for_all_blocks_is_the_uniform_configuration(pp):
    predict = estimator(pp=pp)
    for zero, tp in product((0, 1, 2, 3), (1, 2)):
        for text, ratio in (("0-23:-", 0.0), ("0-23:ckpt", 1.0)):
            named, uniform = predict(zero=zero, tp=tp, strategy=text), predict(zero=zero, tp=tp, checkpoint_ratio=ratio)
            assert named.step_ms == pytest.approx(uniform.step_ms, rel=1e-9)
            assert named.peak_memory_mib == pytest.approx(uniform.peak_memory_mib, rel=1e-9)
            assert named.breakdown == pytest.approx(uniform.breakdown)
    assert predict(sp=2, strategy="0-23:-").breakdown == pytest.approx(predict(sp=2).breakdown)


def test_blocks_cut_over_fewer_ranks_lie_between_both_uniform_degrees_and_pay_for_handing_samples_over():
    base = estimator()

    def predict(**knobs):
        return base(**{"tp": 2, "micro_batch": 8, **knobs})

    one, both = base(tp=1), predict()
    mixed, once = predict(strategy="0-11:tp1 12-23:-"), predict(strategy="0-23:tp1")
    assert min(one.step_ms, both.step_ms) < mixed.step_ms < max(one.step_ms, both.step_ms)
    assert once.step_ms < mixed.step_ms
    often = " ".join(f"{at}:{'tp1' if at % 2 else '-'}" for at in range(24))
    exchanges = [each.breakdown["time.tensor parallel"] for each in (mixed, predict(strategy=often))]
    assert exchanges[1] > exchanges[0] > 0


def test_samples_bound_what_a_run_shares():
    with pytest.raises(UsageError, match="tp over that of the run must divide micro_batch"):
        estimator(global_batch=64)(tp=2, micro_batch=1, strategy="0-23:tp1")


@pytest.mark.parametrize(
    ("text", "rule"), [("0-24:-", "25 blocks, but the model has 24"), ("first", "blocks are a number")]
)
def test_blocks_that_there_are_not_are_refused(text, rule):
    with pytest.raises(UsageError, match=rule):
        estimator()(strategy=text)


def test_blocks_and_a_ratio_together_are_refused_where_both_are_asked_for():
    request, _ = refined(fix={"tp": 1, "pp": 1, "zero": 1, "micro_batch": 8})
    with pytest.raises(SpaceError, match="leave checkpoint_ratio out"):
        estimate_document(request, config={"strategy": "0-3:ckpt 4-23:-", "checkpoint_ratio": 0.5})
    with pytest.raises(SpaceError, match="strategy"):
        estimate_document(request, config={"strateg": "0-23:-"})


def test_the_answer_holds_both_beside_each_other():
    _request, found = refined(fix={"tp": 1, "pp": 1, "zero": 1, "micro_batch": 8})
    data = found.to_dict()["layerwise"]
    assert data["gain"] == pytest.approx(data["throughput"] / found.ranked[0].estimate.throughput - 1)
    assert data["config"]["strategy"] == data["strategy"] and "checkpoint_ratio" not in data["config"]
    assert [run.last for run in parse(data["strategy"])][-1] == 23


@pytest.mark.parametrize("devices", [8, 64])
def test_no_plan_is_named_that_is_predicted_slower_than_the_uniform_winner(devices):
    for hardware, batch in (("a100-40gb", 64), ("h100-80gb", 256)):
        request, found = refined(hardware=hardware, devices=devices, global_batch=batch)
        plan, uniform = found.layerwise, found.ranked[0]
        assert plan.estimate.throughput >= uniform.estimate.throughput
        assert plan.estimate.peak_memory_mib <= request.estimator.memory_limit_mib
        if plan.layers:
            assert request.estimator(plan.config).throughput == pytest.approx(plan.estimate.throughput, rel=1e-9)


def test_a_deep_model_on_many_devices_is_planned_in_seconds():
    shape = Shape(layers=128, hidden=12288, heads=96, vocabulary=50304, name="deep")
    fix = {"precision": "bf16", "fusion": False, "offload": "none", "tp": 8, "pp": 8, "pipeline_schedule": "1f1b"}
    request = shape_request(shape, "a100-80gb", devices=512, seq_len=2048, global_batch=1024, fix=fix)
    (winner,) = estimate_document(request, top=1).ranked[:1]
    facts = request.estimator.facts_of(knob_arrays([winner.config], request.estimator.training), 0)
    start = time.process_time()
    plan = refine(request.estimator, winner, facts, relatives(request.space, winner.config))
    assert time.process_time() - start < 2 * SLOWER_HERE
    assert plan.estimate.throughput >= winner.estimate.throughput
    assert not plan.layers or len(plan.layers) == 128


def test_stages_with_the_head_get_fewer_blocks_where_that_is_faster():
    """A head of 128,256 tokens takes as long as two and a half blocks."""
    shape = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocabulary=128256, name="llama3-8b")
    fix = {"precision": "bf16", "fusion": False, "offload": "none", "sp": 1, "cp": 1, "tp": 1, "pp": 4}
    request = shape_request(
        shape, "h100-80gb", devices=64, seq_len=4096, global_batch=256, fix={**fix, "pipeline_schedule": "1f1b"}
    )
    found = estimate_document(request, layerwise=True)
    plan, even = found.layerwise, found.ranked[0].estimate
    sizes = [int(each) for each in plan.config["stage_blocks"].split(",")]
    assert sum(sizes) == 32 and sizes[-1] < min(sizes[:-1]) and 'stage_blocks="' in "\n".join(plan.lines())
    assert plan.estimate.throughput > 1.05 * even.throughput
    without = {name: value for name, value in plan.config.items() if name != "stage_blocks"}
    assert request.estimator(plan.config).throughput > 1.05 * request.estimator(without).throughput
    # A fixed division is kept.
    assert request.estimator({**without, "stage_blocks": "8,8,8,8"}).throughput == request.estimator(without).throughput


def test_shares_of_blocks_balance_the_stages_within_their_memory():
    choices = [_Choice(1.0, 1.0, LAYER)]
    cut = [SimpleNamespace(count=4)] * 3
    even = [(choices, [100.0])] * 3
    assert _balanced(cut, even, [0.0, 0.0, 2.0], 0, 12) == (4, 5, 3)
    assert _balanced(cut, even, [0.0, 0.0, 0.0], 0, 12) is None
    # The second stage has memory for three blocks.
    assert _balanced(cut, [(choices, [100.0]), (choices, [3.5]), (choices, [100.0])], [0.0] * 3, 0, 12) == (4, 3, 5)
    assert _balanced(cut, [(choices, [3.5])] * 3, [0.0] * 3, 0, 12) is None


LLAMA_7B = Shape(layers=32, hidden=4096, heads=32, intermediate=11008, vocabulary=32000, name="llama-7b")
GPT_2_7B = Shape(
    layers=32, hidden=2560, heads=32, vocabulary=50257, positions=2048, gated=False, biases=True, name="gpt-2.7b"
)


@pytest.mark.parametrize(
    ("shape", "hardware", "gib", "batch", "plan"),
    [
        # Plans of Galvatron's searches on 8 GPUs, from the files of its repositories on GitHub.
        # Time-has-wings/Hetu-Galvatron 098c220b: galvatron_config_llama-7b_1nodes_8gpus_per_node_24GB_bf16_[tpconsec_off].json
        (LLAMA_7B, "rtx4090", 24, 16, {"tp": 4, "pp": 2, "micro_batch": 8, "strategy": "0-31:ckpt"}),
        # AFDWang/Hetu-Galvatron bd3ab5ff: galvatron_config_hidden4096_head32_1nodes_8gpus_per_node_36GB_bf16_[tpconsec_off].json
        (LLAMA_7B, "a100-40gb", 36, 64, {"zero": 2, "micro_batch": 1, "strategy": "0-25:zero3,ckpt 26-28:ckpt 29-31:zero3"}),
        # AFDWang/Hetu-Galvatron 27d4256b: galvatron_config_gpt-2.7b_1nodes_8gpus_per_node_40GB_bf16_example.json
        (GPT_2_7B, "a100-40gb", 40, 64,
         {"tp": 2, "pp": 2, "zero": 3, "micro_batch": 8, "strategy": "0-8:- 9-15:tp1 16-25:- 26-31:tp1"}),
    ],
)  # fmt: skip
def test_plans_are_at_least_as_fast_as_published_ones(shape, hardware, gib, batch, plan):
    fix = {"precision": "bf16", "fusion": False, "sp": 1, "cp": 1}
    request = shape_request(
        shape, hardware, devices=8, seq_len=2048, global_batch=batch, memory_limit_mib=gib * 1024, fix=fix
    )
    theirs = request.estimator({**fix, **plan})
    found = estimate_document(request, top=1, layerwise=True)
    assert found.layerwise.estimate.throughput >= theirs.throughput
    assert found.layerwise.estimate.peak_memory_mib <= gib * 1024


EXPERTS = Shape(
    layers=16,
    hidden=2048,
    heads=16,
    vocabulary=32000,
    experts=64,
    experts_per_token=4,
    expert_intermediate=1024,
    name="moe",
)


def test_a_plan_starts_from_other_spreads_of_experts_too():
    fix = {"precision": "bf16", "fusion": False, "offload": "none", "sp": 1, "cp": 1, "tp": 1, "pp": 1, "zero": 1}
    request = shape_request(EXPERTS, "h100-80gb", devices=8, seq_len=4096, global_batch=64, fix=fix)
    winner = estimate_document(request, top=1).ranked[0]
    others = relatives(request.space, winner.config)
    if "ep" in winner.config:
        assert {each["ep"] for each in others} == {1, 2, 4, 8}
    facts = request.estimator.facts_of(knob_arrays([winner.config], request.estimator.training), 0)
    plan = refine(request.estimator, winner, facts, others)
    assert plan.estimate.throughput >= winner.estimate.throughput
    assert request.estimator(plan.config).throughput == pytest.approx(plan.estimate.throughput, rel=1e-9)


def test_a_uniform_plan_is_no_gain_of_layers():
    estimate = SimpleNamespace(throughput=100.0, step_ms=10.0, step_ms_low=9.0, peak_memory_mib=1024.0, unit="tokens/s")
    uniform = SimpleNamespace(estimate=estimate)
    one, other = (BlockStrategy(tp=1, zero=0, ckpt=each) for each in (False, True))
    for layers, text in (((one, one), "nothing is gained"), ((one, other), "+20.0 % over the uniform winner")):
        planned = SimpleNamespace(throughput=120.0, peak_memory_mib=2048.0, probability_fits=0.72)
        made = Layerwise(uniform=uniform, config={"tp": 1}, estimate=planned, layers=layers)
        assert text in made.lines()[0]
    assert "at 2.0 GiB instead of 1.0 GiB; 72 % chance to fit" in made.lines()[0]
