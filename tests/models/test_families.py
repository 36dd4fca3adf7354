from itertools import pairwise

import pytest
import torch
from redline.knobs.meaning import recomputed
from redline.models import workload
from redline.models.families import generic_schedule, schedule_of
from redline.schedule import create_schedule
from torch import nn


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(x)


def paths(blocks):
    return [each.path for each in blocks]


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "roberta-large", "opt-350m", "gpt-neo-1.3b"])
def test_the_generic_schedule_finds_the_blocks_each_family_names(name):
    made = workload(name)
    with torch.device("meta"):
        sch = create_schedule(made.build_model())
    assert paths(generic_schedule.blocks(sch)) == paths(made.schedule.blocks(sch))
    assert made.schedule is not generic_schedule
    assert schedule_of(made.model.model_type) is made.schedule


def test_checkpointing_and_fusion_are_applied_where_they_are_asked_for(small):
    def steps(**config):
        made = small("gpt2")
        with torch.device("meta"):
            sch = create_schedule(made.build_model())
        made.schedule(sch, config)
        return [(each.path, each.primitive) for each in sch.tree.steps]

    assert steps() == []
    assert steps(checkpoint_ratio=0.5) == [
        ("transformer.h.1", "checkpoint"),
        ("transformer.h.3", "checkpoint"),
    ]
    assert steps(fusion=True) == [(f"transformer.h.{number}", "compile") for number in range(4)]


def test_blocks_are_those_of_the_largest_list_and_of_lists_like_it():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
            self.encoder = nn.ModuleList(Block() for _ in range(3))
            self.decoder = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(2))})
            self.heads = nn.ModuleList(Block(1) for _ in range(4))
            self.linears = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    found = generic_schedule.blocks(create_schedule(Model()))
    assert paths(found) == ["encoder.0", "encoder.1", "encoder.2", "decoder.layers.0", "decoder.layers.1"]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        nn.ModuleList([Block(), nn.Sequential(Block())]),
        nn.ModuleDict({"shared": nn.ModuleList([Block()] * 3)}),
    ],
    ids=["leaf", "layers of different kinds", "modules of different types", "one module three times"],
)
def test_a_model_in_which_nothing_repeats_has_no_blocks(model):
    assert generic_schedule.blocks(create_schedule(model)) == []


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12, 48])
def test_checkpointed_blocks_are_spread_evenly(count):
    for chosen in range(count + 1):
        indices = recomputed(count, chosen / count)
        assert len(indices) == chosen
        gaps = [after - before for before, after in pairwise(indices)]
        assert not gaps or max(gaps) - min(gaps) <= 1
