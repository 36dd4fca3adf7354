"""A strategy for each run of blocks is applied, and the computed values stay the same."""

import re

import numeric
import pytest
import torch
from redline.base.errors import UsageError
from redline.training import Training

CPU = torch.device("cpu")


def recomputed(workload, **config):
    """Returns how often each block's forward runs in a step."""
    training = Training(workload, {"micro_batch": 8, **config}, CPU)
    ran = []
    for index, block in enumerate(training.model.model.layers):
        # The first module of the block: recomputation stops as soon as nothing more is needed.
        block.input_layernorm.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
    training.step()
    return [ran.count(index) for index in range(len(training.model.model.layers))]


def test_only_the_named_blocks_are_recomputed(small):
    workload = small("llama", num_hidden_layers=4)
    assert recomputed(workload) == [1, 1, 1, 1]
    assert recomputed(workload, strategy="0:ckpt 1:- 2:ckpt 3:-") == [2, 1, 2, 1]
    assert recomputed(workload, strategy="0:- 1-3:ckpt") == [1, 2, 2, 2]
    assert recomputed(workload, strategy="0-3:-") == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-9:ckpt", "strategy=0-9:ckpt: the runs of a strategy cover the model's 4 blocks, 0 to 3"),
        ("0-2:ckpt", "cover the model's 4 blocks, 0 to 3"),
        ("0-1:ckpt 1-3:-", "block 1 has a strategy already"),
        ("0:ckpt 3:-", "blocks 1 to 2 would have no strategy"),
        ("0-3:ckpt,tq2", "unknown item 'tq'; did you mean 'tp'"),
        ("a", "blocks are a number or a range such as 0-7"),
        ("", "but is empty"),
    ],
)
def test_texts_of_other_models_or_none_are_refused_with_the_place(small, text, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        Training(small("llama", num_hidden_layers=4), {"micro_batch": 8, "strategy": text}, CPU)


def gathers_of(workload, config):
    """Returns, on each rank, the number of gathers of weights in a step."""
    import torch.distributed as dist

    training = Training(workload, config, CPU, rank=dist.get_rank(), world_size=dist.get_world_size())
    with torch.profiler.profile() as profile:
        training.step()
    return sum(event.name == "gloo:all_gather" for event in profile.events())


@pytest.mark.parametrize("text", ["0-1:- 2-3:zero2", "0-3:zero2"])
def test_blocks_that_zero_3_keeps_whole_compute_the_same(two, small, seed, text):
    workload = small("llama", num_hidden_layers=4)
    config = {"zero": 3, "micro_batch": 2, "grad_accum": 2, "strategy": text}
    for found in two.run(numeric.departure, workload, config, seed):
        numeric.hold(found)


@pytest.mark.slow
def test_blocks_that_zero_3_keeps_whole_are_gathered_once(two, small):
    workload = small("llama", num_hidden_layers=4)
    config = {"zero": 3, "micro_batch": 2, "grad_accum": 2}
    gathers = {
        text: two.run(gathers_of, workload, {**config, **({"strategy": text} if text else {})})[0]
        for text in ("", "0-1:- 2-3:zero2", "0-3:zero2")
    }
    # Gathered once a step instead of twice a micro-batch; the last block stays whole in each micro-batch anyway.
    assert gathers[""] - gathers["0-1:- 2-3:zero2"] == 3 + 1
    assert gathers[""] - gathers["0-3:zero2"] == 3 * 3 + 1
