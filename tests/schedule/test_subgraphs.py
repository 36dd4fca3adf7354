"""Replacement of a subgraph: the settings it inherits from the modules inside, and the modules that leave the model."""

import pytest
import torch
from ranks import mesh
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule, verify
from redline.schedule.forward import layers_of
from redline.schedule.parallel.collectives import PlannedMesh
from redline.schedule.primitives.checkpoint import Checkpointed
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2, self.drop = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.25)

    def forward(self, x):
        return self.drop(self.fc2(self.act(self.fc1(x)))) + x


def gelu_linear(x, w, b):
    return F.linear(F.gelu(x), w, b)


def linear_gelu(x, w, b):
    return F.gelu(F.linear(x, w, b))


def whole_mlp(x, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


def seeded(kind):
    torch.manual_seed(0)
    return kind()


# Exchanges between ranks


def cut_mlp(sch):
    sch["fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def check_fused(pattern):
    sch = create_schedule(seeded(MLP), mesh(tp=2))
    with verify(sch, torch.randn(4, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)):
        cut_mlp(sch)
        sch.trace()
        sch.fuse(sch.find(pattern), compiler="none")
    again = sch.copy()
    assert [each.op for each in again.graph.nodes] == [each.op for each in sch.graph.nodes]


@pytest.mark.parametrize("pattern", [gelu_linear, linear_gelu, whole_mlp])
def test_a_fused_part_exchanges_what_the_modules_inside_do(two, pattern):
    two.run(check_fused, pattern)


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        (gelu_linear, r"'fc2' has BiasOnce"),
        (linear_gelu, r"'fc1' has sync\('bwd_post', 'all_reduce'\)"),
        (whole_mlp, r"'fc1' has sync\('bwd_post', 'all_reduce'\)"),
    ],
)
def test_a_replacement_that_would_lose_exchanges_is_refused(pattern, named):
    sch = create_schedule(seeded(MLP), PlannedMesh(tp=2))
    cut_mlp(sch)
    sch.trace()
    code = str(sch.graph)
    with pytest.raises(ScheduleError, match=f"{named}, which would be lost .*; replace first, or fuse"):
        sch.replace(pattern, sch.find(pattern))
    assert str(sch.graph) == code


# Other settings on the modules


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda sch: sch["fc2"].hook("fwd_post", lambda m, args, out: out * 2), "'fc2' has a hook"),
        (lambda sch: sch["fc2"].hook("fwd_pre", halve_input), "'fc2' has a hook"),
        (lambda sch: sch["fc2"].hook("bwd_pre", lambda m, grad: None), "'fc2' has a hook"),
        (lambda sch: sch["fc2"].checkpoint(), "'fc2' has checkpoint, which would be lost"),
    ],
)
def test_settings_that_the_replacement_cannot_take_are_refused(given, message):
    sch = create_schedule(MLP())
    given(sch)
    sch.trace()
    code = str(sch.graph)
    with pytest.raises(ScheduleError, match=message):
        sch.replace(gelu_linear, sch.find(gelu_linear))
    assert str(sch.graph) == code


def test_a_module_in_the_place_of_one_call_takes_its_hooks_and_what_is_deferred():
    calls = []
    sch = create_schedule(MLP())
    sch["fc2"].hook("fwd_post", lambda m, args, out: calls.append(type(m).__name__)).checkpoint()
    sch.trace()
    new = nn.Linear(16, 8)
    with verify(sch, torch.randn(2, 8)):
        new.load_state_dict(sch["fc2"].module.state_dict())
        sch.replace(new, sch.find("fc2"), name="dense")
    assert "fc2" not in sch and [each.path for each in sch.tree.deferred] == ["dense"]
    built, _ = build(sch)
    calls.clear()
    built(torch.randn(2, 8)).sum().backward()
    assert calls == ["Linear"] and layers_of(built.dense, Checkpointed)


# One module for several


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        q = self.q(x).view(-1, 2, 4)
        k = self.k(x).view(-1, 2, 4)
        return q + k * self.v(x).view(-1, 2, 4)


class Fused(nn.Module):
    def __init__(self, old):
        super().__init__()
        self.weight = nn.Parameter(torch.cat([old.q.weight, old.k.weight, old.v.weight]).detach())
        self.bias = nn.Parameter(torch.cat([old.q.bias, old.k.bias, old.v.bias]).detach())

    def forward(self, x):
        return F.linear(x, self.weight, self.bias).chunk(3, -1)


def test_one_module_replaces_several_subgraphs():
    model = seeded(Projections)
    sch = create_schedule(model)
    with verify(sch, torch.randn(2, 8)):
        sch.trace()
        with pytest.raises(ScheduleError, match="cannot replace 3 subgraphs.*together=True"):
            sch.replace(Fused(model), sch.find("[qkv]"))
        sch.replace(Fused(model), sch.find("[qkv]"), name="qkv", together=True)
    assert list(model.state_dict()) == ["qkv.weight", "qkv.bias"]


def add_all(a, b):
    return a + b


def test_subgraphs_that_cannot_be_replaced_together_are_refused():
    sch = create_schedule(nn.Sequential(seeded(MLP), seeded(MLP)))
    for each in sch:
        each.trace()
    with pytest.raises(ScheduleError, match="must be in one graph, but are in 0, 1"):
        sch.replace(add_all, sch.find(add_all), together=True)
    with pytest.raises(ScheduleError, match="name must be an identifier, but got 'a b'"):
        sch.replace(add_all, sch["0"].find(add_all), name="a b")
    with pytest.raises(ScheduleError, match="name and together go with a subgraph"):
        sch["0.act"].replace(nn.ReLU(), name="act")


def three(x, w1, b1, w2, b2, w3, b3):
    return F.linear(x, w1, b1), F.linear(x, w2, b2), F.linear(x, w3, b3)


def linear(x, w, b):
    return F.linear(x, w, b)


def test_a_joint_replacement_has_its_name():
    x = torch.randn(2, 8)
    expected = seeded(Projections)(x)
    sch = create_schedule(seeded(Projections))
    sch.trace()
    sch.replace(three, sch.find(linear), name="qkv", together=True)
    assert sch.find("qkv") and not sch.find("[qkv]")
    assert torch.allclose(build(sch)[0](x), expected, atol=1e-6)


# Requests for subgraphs


def test_nodes_are_found_by_a_predicate():
    sch = create_schedule(MLP())
    sch.trace()
    assert [each.names for each in sch.find(where=lambda node: "fc" in node.name)] == [["fc1"], ["fc2"]]
    assert [each.names for each in sch.find("fc.", where=lambda node: node.name.endswith("2"))] == [["fc2"]]
    assert [each.names for each in sch.find(linear, where=lambda node: node.name == "fc1")] == [["fc1"]]
    with pytest.raises(ScheduleError, match="pass a pattern, or a predicate on nodes as where="):
        sch.find()


# Values and modules that others use too


def halve_input(module, args):
    return (args[0] * 0.5,)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.fc = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return torch.relu(self.fc(self.up(x))) + torch.tanh(self.fc(self.up(x + 1)))


def test_the_other_call_of_a_module_keeps_its_hooks_and_deferred_work():
    sch = create_schedule(seeded(Twice))
    sch["fc"].hook("fwd_pre", halve_input).checkpoint()
    x = torch.randn(3, 4)
    want = sch.module(x)
    sch.trace()
    new = nn.Linear(8, 4)
    new.weight, new.bias = sch["fc"].module.weight, sch["fc"].module.bias
    sch.replace(new, sch.find("fc")[0], name="new")
    assert [each.path for each in sch.tree.deferred] == ["fc", "new"]
    assert torch.equal(build(sch)[0](x), want)


def test_one_module_in_two_places_does_not_get_the_hook_of_one():
    sch = create_schedule(nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.ReLU()))
    sch["0"].hook("fwd_pre", halve_input)
    sch.trace()
    with pytest.raises(ScheduleError, match="one module in 2 places cannot have the hooks .* one by one"):
        sch.replace(nn.ReLU6(), sch.find("_[02]|[02]"))
