"""Choices made block by block do what they say, and leave what is computed as it is."""

import numeric
import pytest
import torch
from redline.base.errors import ScheduleError
from redline.models.families import indices_of
from redline.training import Training

CPU = torch.device("cpu")


def recomputed(workload, **config):
    """How often each block's forward runs in a step."""
    training = Training(workload, {"micro_batch": 8, **config}, CPU)
    ran = []
    for index, block in enumerate(training.model.model.layers):
        # The first of the block: recomputing ends as soon as nothing more is needed.
        block.input_layernorm.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
    training.step()
    return [ran.count(index) for index in range(len(training.model.model.layers))]


def test_only_the_named_blocks_are_recomputed(small):
    workload = small("llama", num_hidden_layers=4)
    assert recomputed(workload) == [1, 1, 1, 1]
    assert recomputed(workload, checkpoint_blocks="0,2") == [2, 1, 2, 1]
    assert recomputed(workload, checkpoint_blocks="1-3") == [1, 2, 2, 2]
    assert recomputed(workload, checkpoint_blocks="none", checkpoint_ratio=1.0) == [1, 1, 1, 1]


@pytest.mark.parametrize("text", ["none", "0", "1-2", "0-3"])
def test_recomputed_blocks_compute_what_the_plain_model_does(small, seed, text):
    workload = small("llama", num_hidden_layers=4)
    numeric.hold(numeric.departure(workload, {"micro_batch": 8, "checkpoint_blocks": text}, seed))


@pytest.mark.parametrize(
    ("text", "said"),
    [("0,9", "the last is 3"), ("a", "must be indices such as"), ("1-x", "must be indices such as"), ("", "must be")],
)
def test_blocks_that_there_are_not_are_refused(small, text, said):
    with pytest.raises(ScheduleError, match=said):
        Training(small("llama", num_hidden_layers=4), {"micro_batch": 8, "checkpoint_blocks": text}, CPU)


def test_indices_are_read_as_they_are_written():
    from redline.estimator.layerwise import blocks_text

    for indices in ([], [0], [0, 1, 2], [0, 2, 3, 7], list(range(40))):
        assert indices_of(blocks_text(indices), 40) == indices


def gathers_of(workload, config):
    """On each rank: how many gathers of weights a step has."""
    import torch.distributed as dist

    training = Training(workload, config, CPU, rank=dist.get_rank(), world_size=dist.get_world_size())
    with torch.profiler.profile() as profile:
        training.step()
    return sum(event.name == "gloo:all_gather" for event in profile.events())


@pytest.mark.parametrize("text", ["2-3", "0-3"])
def test_blocks_that_zero_3_keeps_whole_compute_the_same(two, small, seed, text):
    workload = small("llama", num_hidden_layers=4)
    config = {"zero": 3, "micro_batch": 2, "grad_accum": 2, "gathered_blocks": text}
    for found in two.run(numeric.departure, workload, config, seed):
        numeric.hold(found)


@pytest.mark.slow
def test_blocks_that_zero_3_keeps_whole_are_gathered_once(two, small):
    workload = small("llama", num_hidden_layers=4)
    config = {"zero": 3, "micro_batch": 2, "grad_accum": 2}
    gathers = {
        text: two.run(gathers_of, workload, {**config, **({"gathered_blocks": text} if text else {})})[0]
        for text in ("", "2-3", "0-3")
    }
    # One gather less for each block and micro-batch; the last block stays whole anyway.
    assert gathers[""] - gathers["2-3"] == 1 * 2
    assert gathers[""] - gathers["0-3"] == 3 * 2


def test_stages_of_a_pipeline_recompute_their_own(two, small, seed):
    workload = small("llama", num_hidden_layers=4)
    config = {"pp": 2, "micro_batch": 2, "grad_accum": 4, "checkpoint_blocks": "0-1"}
    for found in two.run(numeric.departure, workload, config, seed):
        numeric.hold(found)
