"""The formulas of pipelines compared with a simulation of torch's orders of actions."""

from types import SimpleNamespace

import numpy as np
import pytest
from redline.base.errors import UsageError
from redline.estimator import Estimator, ModelFacts, TrainingSetup
from redline.estimator.hardware import find_hardware
from redline.estimator.knob_arrays import knob_arrays
from redline.estimator.stages import crossings, idle_slot, in_flight, stages
from redline.knobs.meaning import PIPELINE_SCHEDULES, Placement
from torch.distributed import pipelining

LLAMA = {"layers": 32, "hidden": 4096, "heads": 32, "intermediate": 11008, "vocabulary": 32000}


def actions(kind, pp, chunks, micro_batches):
    """For each rank its (F, B, I or W, stage, micro-batch) in the order of torch's class."""
    if kind == "1f1b":
        # torch's order for 1F1B numbers the last rank's forwards incorrectly.
        return {rank: one_forward_one_backward(rank, pp - 1 - rank, micro_batches) for rank in range(pp)}
    made = [
        SimpleNamespace(
            num_stages=pp * chunks, group_size=pp, group_rank=0, stage_index=index, submod=None,
            is_first=index == 0, is_last=False, device="cpu",
        )
        for index in range(chunks)
    ]  # fmt: skip
    several = PIPELINE_SCHEDULES[kind].most != 1
    schedule = getattr(pipelining, PIPELINE_SCHEDULES[kind].made_by)(
        made if several else made[0], micro_batches, loss_fn=lambda output, target: output
    )
    order = schedule.pipeline_order if several else schedule._get_pipeline_order()
    return {
        rank: [
            (each.computation_type.value, each.stage_index, each.microbatch_index)
            for each in found
            if each is not None and each.is_compute_op and each.microbatch_index is not None
        ]
        for rank, found in order.items()
    }


def one_forward_one_backward(rank, ahead, micro_batches):
    """`ahead` forwards, then alternately a forward and a backward."""
    order = [("F", rank, number) for number in range(ahead)]
    for number in range(micro_batches):
        if number + ahead < micro_batches:
            order.append(("F", rank, number + ahead))
        order.append(("B", rank, number))
    return order


def played(kind, pp, chunks, micro_batches, seconds):
    """Simulates the actions: seconds until all are done, and the most micro-batches in flight on each rank.

    Args:
        seconds: forward, gradients of inputs, and gradients of weights, of one micro-batch on a rank.
    """
    forward, inputs, weights = (each / chunks for each in seconds)
    todo = actions(kind, pp, chunks, micro_batches)
    at, done = dict.fromkeys(todo, 0.0), {}
    held, most = dict.fromkeys(todo, 0), dict.fromkeys(todo, 0)
    last = pp * chunks - 1
    while any(todo.values()):
        before = len(done)
        for rank, rest in todo.items():
            while rest:
                what, stage, number = rest[0]
                needs = {
                    "F": [("F", stage - 1, number)] * (stage > 0),
                    "W": [("B", stage, number)],
                }.get(what, [("F", stage, number), *([("B", stage + 1, number)] * (stage < last))])
                if any(each not in done for each in needs):
                    break
                rest.pop(0)
                # In the first stage torch computes all gradients at the time of the weights' gradients.
                whole = stage == 0 and what in "IW"
                takes = {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}[what]
                takes = (inputs + weights) * (what == "W") if whole else takes
                at[rank] = max([at[rank], *(done[each] for each in needs)]) + takes
                done[("B" if what == "I" else what, stage, number)] = at[rank]
                held[rank] += (what == "F") - (what in "BW")
                most[rank] = max(most[rank], held[rank])
        assert len(done) > before, "the ranks wait for each other"
    return max(at.values()), [most[rank] / chunks for rank in range(pp)]


def cols(kind, pp, chunks, micro_batches=32):
    config = {"pp": pp, "dp": 1, "grad_accum": micro_batches, "pipeline_schedule": kind}
    return knob_arrays([{**config, "virtual_stages": chunks}], TrainingSetup(devices=pp))


WAYS = [
    ("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4),
    ("zero_bubble", 1), ("zero_bubble", 2), ("zero_bubble", 4), ("zbv", 2),
]  # fmt: skip


@pytest.mark.parametrize("seconds", [(1, 1, 1), (1, 1.3, 0.7), (1, 1.5, 0.5), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(("kind", "chunks"), WAYS)
def test_the_bubble_is_that_of_torchs_own_order(kind, chunks, pp, seconds):
    forward, inputs, weights = (np.array([float(each)]) for each in seconds)
    none = np.zeros(1)
    predicted = (pp - 1) * idle_slot(
        forward + inputs + weights, forward, inputs + weights, weights, none, cols(kind, pp, chunks)
    )
    took, _ = played(kind, pp, chunks, 4 * pp, seconds)
    assert predicted[0] == pytest.approx(took - 4 * pp * sum(seconds))


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(("kind", "chunks"), WAYS)
def test_a_rank_holds_as_many_micro_batches_as_in_torchs_own_order(kind, chunks, pp):
    _, most = played(kind, pp, chunks, 32, (1.0, 1.0, 1.0))
    assert most == [in_flight(rank, pp, cols(kind, pp, chunks))[0] for rank in range(pp)]


@pytest.mark.parametrize(("kind", "chunks"), WAYS)
def test_a_rank_holds_no_more_micro_batches_than_a_step_has_and_one_without_stages(kind, chunks):
    assert in_flight(0, 4, cols(kind, 4, chunks, micro_batches=1))[0] == 1
    assert in_flight(0, 1, cols(kind, 1, chunks))[0] == 1


@pytest.mark.parametrize("pp", [2, 3, 8])
@pytest.mark.parametrize(("kind", "chunks"), WAYS)
def test_messages_are_as_many_as_boundaries_of_the_busiest_rank(kind, chunks, pp):
    placed = Placement(pp * chunks, pp, PIPELINE_SCHEDULES[kind].v_shaped)
    ends = [
        rank
        for stage in range(pp * chunks - 1)
        for rank in (placed.rank(stage), placed.rank(stage + 1))
        if placed.rank(stage) != placed.rank(stage + 1)
    ]
    assert crossings(pp, cols(kind, pp, chunks))[0] == max(ends.count(rank) for rank in range(pp))


def test_a_v_has_both_ends_of_the_model_on_its_first_rank():
    facts = ModelFacts.from_shape(**LLAMA)
    turned = stages(facts, 4, "layers", chunks=2, v_shaped=True, distinct=False)
    assert [(each.first, each.last) for each in turned] == [(True, True)] + [(False, False)] * 3
    assert turned[0].indices == (*range(4), *range(28, 32)) and turned[3].indices == tuple(range(12, 20))
    looped = stages(facts, 4, "layers", chunks=2, distinct=False)
    assert [(each.first, each.last) for each in looped] == [
        (True, False), (False, False), (False, False), (False, True)
    ]  # fmt: skip
    assert stages(facts, 8, "layers", chunks=8) == []  # 64 stages of 32 blocks


SETUP = TrainingSetup(devices=8, seq_len=2048, global_batch=32, precision="bf16_pure")


def steps(setup=SETUP, **config):
    estimator = Estimator(ModelFacts.from_shape(**LLAMA), find_hardware("a100-80gb"), setup)
    return estimator({"pp": 8, "micro_batch": 1, "zero": 0, **config})


def test_gradients_that_wait_for_those_of_weights_take_memory():
    one, four = (steps(pipeline_schedule="zero_bubble", virtual_stages=many) for many in (1, 4))
    # On the last rank seven micro-batches, or seven chunks of a quarter each, wait for the head's gradient.
    assert one.peak_memory_mib > four.peak_memory_mib


def test_stages_have_the_blocks_that_are_given():
    facts = ModelFacts.from_shape(**LLAMA)
    found = stages(facts, 4, "layers", sizes=(5, 9, 9, 9))
    assert [(each.ranks, each.count) for each in found] == [((0,), 5), ((1, 2), 9), ((3,), 9)]
    chunked = stages(facts, 2, "layers", chunks=2, distinct=False, sizes=(1, 2, 3, 26))
    assert [each.sizes for each in chunked] == [(1, 3), (2, 26)]
    assert chunked[0].indices == (0, 3, 4, 5)


def test_time_and_memory_follow_the_blocks_of_each_stage():
    even, given = steps(), steps(stage_blocks="4,4,4,4,4,4,4,4")
    assert given.breakdown == even.breakdown
    lopsided = steps(stage_blocks="11,3,3,3,3,3,3,3")
    assert lopsided.step_ms > 1.8 * even.step_ms and lopsided.peak_memory_mib > 2 * even.peak_memory_mib
    # 1F1B has the most micro-batches in flight in the first stage.
    early = steps(stage_blocks="3,4,4,4,4,4,4,5")
    assert early.peak_memory_mib < even.peak_memory_mib
    # A head as large as five blocks, in the last stage.
    wide = Estimator(ModelFacts.from_shape(**{**LLAMA, "vocabulary": 256_000}), find_hardware("a100-80gb"), SETUP)
    uniform, fewer = wide.table(
        [{"pp": 8, "micro_batch": 1, "stage_blocks": each} for each in (None, "5,5,5,4,4,4,4,1")]
    ).step_ms
    assert fewer < 0.9 * uniform


def test_runs_of_a_strategy_follow_the_blocks_into_their_stages():
    """Blocks 0 to 7 are recomputed: two stages of four, or one stage of eight."""
    runs = {"strategy": "0-7:ckpt 8-31:-"}
    spread, together = steps(**runs), steps(**runs, stage_blocks="8,4,4,4,3,3,3,3")
    assert together.step_ms > 1.5 * spread.step_ms
    alone = steps(stage_blocks="8,4,4,4,3,3,3,3", checkpoint_ratio=0.0)
    assert together.peak_memory_mib < alone.peak_memory_mib and together.step_ms > alone.step_ms


def test_stages_that_do_not_fit_the_model_or_the_ranks_are_refused():
    with pytest.raises(UsageError, match="a number for each of the pp \\* virtual_stages stages"):
        steps(stage_blocks="16,16")
    with pytest.raises(UsageError, match="its numbers are for 33 blocks, but the model has 32"):
        steps(stage_blocks="5,4,4,4,4,4,4,4")
