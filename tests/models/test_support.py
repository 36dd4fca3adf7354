"""A model's support is determined from a few blocks of each kind, and equals that of the whole model."""

from importlib import import_module

import pytest
import torch
from redline.models import workload
from redline.models.families import StandardSchedule, standard
from redline.models.families.tensor_parallel import Cuts, Regions, column_parallel, row_parallel
from redline.models.skeleton import FOLLOWED, skeleton, stand_ins_for
from redline.schedule import create_schedule
from redline.schedule.parallel.partition import meta_copy
from torch import nn
from transformers.activations import ACT2FN

DEGREES = (2, 3, 4, 8)


def answers(model, schedule):
    found = schedule.support(create_schedule(model))
    return {
        "tp": [found.tp(ranks) for ranks in DEGREES],
        "pp": [found.pp(stages) for stages in DEGREES],
        "padding": [found.padding(ranks) for ranks in DEGREES],
        "kernels": schedule.no_kernels(create_schedule(model)),
        "rest": (found.sequence_parallel, found.zero_in_stages, found.virtual_stages),
    }


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-tiny", "llama-tiny", "mixtral-tiny", "t5-tiny", "gpt2"])
def test_a_few_blocks_of_each_kind_tell_what_the_whole_model_supports(name, monkeypatch):
    made = workload(name)
    model = skeleton(made)
    before = [path for path, _ in model.named_modules()]
    few = answers(model, made.schedule)
    monkeypatch.setattr(standard, "short_copy", lambda model, blocks: (meta_copy(model), list(blocks)))
    assert few == answers(model, made.schedule)
    assert [path for path, _ in model.named_modules()] == before


def test_the_cost_of_asking_does_not_grow_with_the_number_of_blocks(monkeypatch):
    cut = []
    shard_file = import_module("redline.schedule.primitives.tensor_parallel")
    cuts_of = shard_file._cuts_of
    monkeypatch.setattr(shard_file, "_cuts_of", lambda sch, *rest: (cut.append(sch.path), cuts_of(sch, *rest))[1])

    def cuts(count):
        cut.clear()
        assert answers(Stack([8] * count), SCHEDULE)["tp"][0] is None
        return list(cut)

    assert cuts(4 * FOLLOWED) and len(cuts(4 * FOLLOWED)) == len(cuts(2 * FOLLOWED))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in widths)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def cut_block(block, regions):
    column_parallel(block["up"])
    row_parallel(block["down"])
    regions.around(block, block["down"])


SCHEDULE = StandardSchedule(lambda sch: list(sch["blocks"]), Cuts(block=cut_block), no_sequence_parallel="no tokens")


def test_a_block_unlike_the_others_is_tried_and_named_by_its_own_path():
    found = answers(Stack([8] * 6 + [10] + [8] * 3), SCHEDULE)
    assert found["tp"][0] is None
    assert "shard of 'weight' on 'blocks.6.up': 4 ranks must divide" in found["tp"][2]
    assert "on 'blocks.0.up': 3 ranks must divide" in found["tp"][1]


def test_a_schedule_that_looks_for_each_block_by_its_number_is_asked_with_all_of_them():
    def numbered(sch, blocks, sequence_parallel):
        for number in range(8):
            cut_block(sch[f"blocks.{number}"], Regions())

    found = answers(Stack([8] * 8), StandardSchedule(lambda sch: list(sch["blocks"]), numbered))
    assert found["tp"][0] is None and "3 ranks must divide" in found["tp"][1]


@pytest.mark.parametrize(("last", "alike"), [("gelu_pytorch_tanh", True), ("gelu_python_tanh", False)])
def test_activations_that_each_block_makes_for_itself_are_compared_by_what_they_do(last, alike):
    """Regression: those of Gemma have a `functools.partial` of their own, so that each block was a kind of its own."""
    stack = Stack([8] * 8)
    for block in stack.blocks:
        block.act = ACT2FN["gelu_pytorch_tanh"]
    stack.blocks[5].act = ACT2FN[last]
    paths = [f"blocks.{number}" for number in range(8)]
    assert ("blocks.5" in stand_ins_for(stack, paths)) == alike
