"""Blocks with different strategies compute the same as one process."""

from dataclasses import replace

import numeric
import numerics_table as numerics
import pytest
import torch
import torch.distributed as dist
from redline.models import workload
from redline.training import Training

CPU = torch.device("cpu")
DEPTH = {"llama": "num_hidden_layers", "gpt2": "n_layer", "mixtral": "num_hidden_layers"}
TWO = [
    ("llama", {"tp": 2, "micro_batch": 2}, "0:tp1 1-2:- 3:tp1,ckpt"),
    ("llama", {"tp": 2, "micro_batch": 4}, "0-1:tp1,zero3 2:ckpt 3:-"),
    ("llama", {"dp": 2, "micro_batch": 2}, "0:ckpt 1:zero1 2:zero2 3:zero3"),
    ("gpt2", {"dp": 2, "zero": 3, "micro_batch": 2}, "0:zero0 1:zero1 2:ckpt 3:-"),
    ("gpt2", {"tp": 2, "micro_batch": 8, "kernels": True}, "0:- 1-3:tp1,zero2"),
    ("mixtral", {"tp": 2, "micro_batch": 2}, "0-1:tp1 2-3:-"),
    ("llama", {"pp": 2, "grad_accum": 4, "stage_blocks": "1,3"}, "0:- 1:ckpt 2:- 3:ckpt"),
    ("mixtral", {"dp": 2, "ep": 2, "zero": 2, "micro_batch": 2}, "0:zero1 1:zero3,ckpt 2-3:-"),
]
AT_ONCE = [each for number, each in enumerate(TWO) if number in (0, 3, 6)]
FOUR = [
    ("llama", {"tp": 2, "dp": 2, "micro_batch": 2}, "0-1:tp1,zero3 2-3:zero2"),
    ("llama", {"tp": 2, "dp": 2, "zero": 3, "micro_batch": 2}, "0:tp1 1:zero1 2:tp1,zero0 3:ckpt"),
    ("llama", {"tp": 2, "pp": 2, "grad_accum": 2, "stage_blocks": "3,1"}, "0-1:tp1 2:ckpt 3:-"),
    ("gpt2", {"dp": 2, "pp": 2, "grad_accum": 2, "zero": 1, "stage_blocks": "1,3"}, "0-1:ckpt 2-3:-"),
    ("llama", {"tp": 2, "sp": 2, "micro_batch": 4}, "0-1:tp1,ckpt 2-3:-"),
    ("llama", {"tp": 2, "cp": 2, "zero": 1, "micro_batch": 4}, "0-1:tp1,zero3 2-3:-"),
    ("gpt2", {"tp": 4, "micro_batch": 4}, "0:tp1,zero3 1:tp2,zero2 2:ckpt 3:tp2"),
    ("mixtral", {"tp": 2, "dp": 2, "ep": 2, "zero": 3, "micro_batch": 2}, "0-1:tp1,zero2 2:zero1 3:-"),
    ("mixtral", {"tp": 2, "cp": 2, "ep": 2, "micro_batch": 4}, "0-1:tp1 2-3:-"),
]


@pytest.fixture(scope="module", autouse=True)
def imported():
    # Imported once, before ranks are forked.
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401


def deep(family, blocks=4):
    """Returns the family's workload of the numerics table with `blocks` blocks."""
    task, arguments = numerics.FAMILIES[family]
    numerics.FAMILIES = {**numerics.FAMILIES, family: (task, {**arguments, DEPTH[family]: blocks})}
    try:
        return numerics.tiny(family)
    finally:
        numerics.FAMILIES = {**numerics.FAMILIES, family: (task, arguments)}


def hold(pool, family, config, text, seed):
    for found in pool.run(numeric.departure, deep(family), {**config, "strategy": text}, seed):
        numeric.hold(found)


@pytest.mark.parametrize(("family", "config", "text"), AT_ONCE)
def test_runs_compute_what_one_process_computes(two, seed, family, config, text):
    hold(two, family, config, text, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "config", "text"), [each for each in TWO if each not in AT_ONCE])
def test_more_strategies_compute_the_same_as_one_process(two, seed, family, config, text):
    hold(two, family, config, text, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "config", "text"), FOUR)
def test_runs_compute_so_beside_all_else(four, seed, family, config, text):
    hold(four, family, config, text, seed)


UNLIKE_STAGES = {"tp": 2, "dp": 2, "pp": 2, "ep": 2, "zero": 1, "grad_accum": 2}


@pytest.mark.slow
def test_stages_whose_ranks_share_experts_and_samples_unlike_each_other(eight, seed):
    hold(eight, "mixtral", UNLIKE_STAGES, "0-1:tp1 2-3:-", seed)


def test_chunks_of_unlike_numbers_of_blocks_compute_what_one_process_computes(two, seed):
    config = {
        "pp": 2,
        "virtual_stages": 2,
        "grad_accum": 4,
        "pipeline_schedule": "interleaved",
        "stage_blocks": "2,1,1,2",
    }
    for found in two.run(numeric.departure, deep("llama", 6), config, seed):
        numeric.hold(found)


def drawn(config):
    """Returns the mask of the last dropout of a block on this rank."""
    made = workload("gpt2-tiny", seq_len=8, global_batch=4)
    made = replace(made, model=replace(made.model, arguments={**made.model.arguments, "n_layer": 2}))
    training = Training(made, config, CPU, rank=dist.get_rank(), world_size=dist.get_world_size())
    masks = []
    block = training.model.transformer.h[0]
    block.mlp.dropout.register_forward_hook(lambda module, args, out: masks.append((out == 0) & (args[0] != 0)))
    training.step()
    return masks[0].clone()


def test_dropout_differs_between_ranks_that_share_samples_and_agrees_within_a_layer(two):
    config = {"tp": 2, "micro_batch": 4, "strategy": "0:tp1 1:-"}
    first, second = two.run(drawn, config)
    assert first.shape[0] == 2 and first.any() and not torch.equal(first, second)
    first, second = two.run(drawn, {**config, "strategy": "0:- 1:tp1"})
    assert first.shape[0] == 4 and first.any() and torch.equal(first, second)
