"""Single parts of a model: verified, built and printed."""

import copy

import pytest
import torch
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule, verify
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(x)))


def net():
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 8))


def scaled_gelu(x):
    return F.gelu(x) * 1.5


# Single parts


def test_a_part_is_verified_by_itself():
    torch.manual_seed(0)
    sch = create_schedule(net())
    x = torch.randn(2, 8)
    sch["1.0"].checkpoint()
    with verify(sch["1.0"], x) as inner:
        assert inner.path == "1.0"
        inner.trace()
        inner.fuse(inner.find("act"), compiler="none")
    with (
        pytest.raises(ScheduleError, match="departs.*the first module whose output departs is 'fc2' .Linear."),
        verify(sch["1.1"], x),
    ):
        sch["1.1"].trace()
        sch["1.1"].replace(scaled_gelu, sch["1.1"].find(lambda x: F.gelu(x)))
    # A schedule outside the part is ignored.
    with verify(sch["1.0"], x):
        sch["2"].hook("fwd_post", lambda module, args, out: out * 2)


def test_a_part_is_built_by_itself():
    with torch.device("meta"):
        model = net()
    sch = create_schedule(model)
    sch["1.1.fc1"].annotate("bias", "kind", "mine")
    sch["1.1"].checkpoint()
    part, optimizer = build(sch["1.1"], optimizer=lambda params: torch.optim.SGD(params, lr=0.1), seed=3)
    assert all(value.isfinite().all() for value in part.state_dict().values())
    assert part.fc1.bias.kind == "mine" and part is model[1][1]
    assert {id(each) for each in optimizer.param_groups[0]["params"]} == {id(each) for each in part.parameters()}
    part(torch.ones(2, 8)).sum().backward()
    assert model[0].weight.is_meta
    for at in (sch, sch["0"]):
        with pytest.raises(ScheduleError, match="built already"):
            build(at)


def test_a_graph_is_printed_and_seen_in_the_tree():
    sch = create_schedule(net())
    with pytest.raises(ScheduleError, match="graph of '1.0': trace it first"):
        print(sch["1.0"].graph)
    sch["1.0"].trace()
    assert "%act" in str(sch["1.0"].graph) and [each.name for each in sch["1.0"].graph.nodes][:2] == ["x", "fc1"]
    sch.fuse(sch.find(lambda x: F.gelu(x)), compiler="none", name="activation")
    sch.replace(torch.add, sch.find(lambda a, b: a + b), name="residual")
    text = str(sch)
    assert "activation(fc1)" in text and "residual(x, fc2)" in text and "fuse([act]" in text
    assert [each.names for each in sch.find("activation|residual")] == [["activation"], ["residual"]]
    assert str(copy.deepcopy(sch)) == text
    with pytest.raises(ScheduleError, match=r"fuse on '1.1': it takes subgraphs.*compile\(\) runs a whole module"):
        sch["1.1"].fuse(name="whole")
