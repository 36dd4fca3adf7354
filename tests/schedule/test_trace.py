"""Tracing, finding, fusing, replacing and decomposing."""

import copy
import operator
import pickle

import pytest
import torch
from redline.base.errors import ScheduleError, TraceError
from redline.schedule import build, call_module, create_schedule, verify
from redline.schedule.forward import layers_of
from redline.schedule.graph.trace import Traced
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """An MLP with a residual, written with modules, functions and methods."""

    def __init__(self, width=8):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, scale=1.0, *, shift=None):
        y = self.fc2(self.act(self.fc1(x)))
        out = self.norm(F.dropout(y, p=0.1, training=self.training) + x) * scale
        return out if shift is None else out + shift


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def seed_of(request):
    return request.getfixturevalue("seed") if "seed" in request.fixturenames else 0


@pytest.fixture
def net(request):
    torch.manual_seed(seed_of(request))
    return Net()


@pytest.fixture
def x(request):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed_of(request)))


def linear_gelu(x, w, b):
    return F.gelu(F.linear(x, w, b))


def residual(y, x):
    return F.dropout(y, p=0.1) + x


# trace


def test_a_traced_module_stays_what_it_is_and_computes_the_same(net, x, seed):
    names, types = list(net.state_dict()), [type(m) for m in net.modules()]
    sch = create_schedule(net)
    with verify(sch, x):
        for each in sch.select("blocks.*"):
            each.trace()
    assert list(net.state_dict()) == names and [type(m) for m in net.modules()] == types
    assert [n.op for n in layers_of(net.blocks[0], Traced)[0].graph.nodes].count("call_module") == 4


def test_flattening_goes_through_children_but_not_through_leaves(net, x, seed):
    def modules(**kwargs):
        sch = create_schedule(copy.deepcopy(net))
        with verify(sch, x):
            sch.trace(**kwargs)
        graph = layers_of(sch.module, Traced)[0].graph
        return [node.target for node in graph.nodes if node.op == "call_module"]

    assert modules() == ["blocks.0", "blocks.1"]
    assert len(modules(flatten=True)) == 8
    assert modules(flatten=True, leaves=[Block]) == modules()
    assert modules(flatten=True, leaves=[r"blocks\.1"])[-1] == "blocks.1"


def test_arguments_with_defaults_are_fixed_unless_they_are_inputs(net, x):
    sch = create_schedule(net.blocks[0])
    sch.trace()
    built, _ = build(sch)
    built.eval()
    built(x, scale=1.0)
    with pytest.raises(ScheduleError, match=r"traced with scale=1.0.*inputs=\['scale'\]"):
        built(x, 2.0)
    sch = create_schedule(net.blocks[1])
    sch.trace(inputs=["scale"])
    built, _ = build(sch)
    built.eval()
    assert torch.equal(built(x, scale=2.0), built(x) * 2)
    with pytest.raises(TraceError, match="parameters of its forward"):
        create_schedule(Block()).trace(inputs=["scael"])


class Branching(nn.Module):
    def forward(self, x):
        y = x * 2
        if y.sum() > 0:
            return y
        return x


def test_trace_errors_name_the_line_and_change_nothing():
    model = nn.Sequential(Branching())
    sch = create_schedule(model)
    drawn = str(sch)
    with pytest.raises(TraceError, match=r"trace of '0': 'if y.sum\(\) > 0:' at .*test_trace.py:\d+ in forward"):
        sch["0"].trace()
    assert str(sch) == drawn and "forward" not in model[0].__dict__ and model[0].training is True
    with pytest.raises(ScheduleError, match="traced already"):
        create_schedule(Block()).trace().trace()


# find


def test_patterns_match_modules_functions_and_methods(net):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x, y):
            return self.act(x) + torch.relu(y) * F.relu(x).relu()

    sch = create_schedule(Mixed())
    sch.trace()
    assert len(sch.find(lambda x: torch.relu(x))) == 4
    assert len(sch.find(lambda x: x.relu())) == 4
    # The product is the second operand; the order in the pattern does not matter.
    assert len(sch.find(lambda a, b, c: a * b + c)) == 1
    assert len(sch.find(lambda a, b, c: c + b * a)) == 1
    assert not sch.find(lambda a, b: a - b)


def test_constants_must_agree_and_defaults_count_as_given(net):
    sch = create_schedule(net)
    sch["blocks.0"].trace()
    assert len(sch.find(lambda x: F.gelu(x))) == 1
    assert len(sch.find(lambda x: F.gelu(x, approximate="none"))) == 1
    assert not sch.find(lambda x: F.gelu(x, approximate="tanh"))
    assert len(sch.find(residual)) == 1
    assert not sch.find(lambda y, x: F.dropout(y, p=0.2) + x)

    def with_constant(x, p=0.1):
        return F.dropout(x, p=p)

    assert len(sch.find(with_constant)) == 1


def test_find_needs_a_trace_and_a_pattern(net):
    sch = create_schedule(net)
    with pytest.raises(ScheduleError, match="trace it first"):
        sch.find("fc1")
    sch["blocks.0"].trace()
    with pytest.raises(ScheduleError, match="regular expression or a function, but got 3"):
        sch.find(3)
    with pytest.raises(TraceError, match="is not a graph"):
        sch.find(lambda x: x if x > 0 else -x)


# fuse


def test_fused_subgraphs_compute_the_same_and_move_no_parameter(net, x, seed):
    seen = []

    def compiler(function):
        seen.append(function)
        return function

    names = list(net.state_dict())
    sch = create_schedule(net)
    with verify(sch, x):
        for each in sch.select("blocks.*"):
            each.trace()
        sch.fuse(sch.find(linear_gelu), compiler=compiler)
        sch.fuse(sch.find(residual), compiler="none")
    assert list(net.state_dict()) == names
    built, _ = build(sch)
    seen.clear()
    built(x)
    assert len(seen) == 2
    assert [s.names[0] for s in sch.find("fused.*")] == ["fused_fc_act", "fused_dropout_add"] * 2


def test_a_value_used_elsewhere_cannot_be_fused_away():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x)
            return torch.relu(y) + y

    sch = create_schedule(Shared())
    sch.trace()
    found = sch.find(lambda x: torch.relu(call_module("fc", x)))
    drawn, code = str(sch), str(layers_of(sch.module, Traced)[0].graph)
    for call in (
        lambda: sch.fuse(found),
        lambda: sch.replace(torch.relu, found),
        lambda: sch.checkpoint(found),
    ):
        with pytest.raises(ScheduleError, match="'fc' is used by add"):
            call()
    assert str(sch) == drawn and str(layers_of(sch.module, Traced)[0].graph) == code
    with pytest.raises(ScheduleError, match="what find returned"):
        sch.fuse("fc")
    with pytest.raises(ScheduleError, match="unknown compiler"):
        sch.fuse(found, compiler="xla")


def test_a_stale_handle_is_refused(net):
    sch = create_schedule(net)
    sch["blocks.0"].trace()
    found = sch.find(linear_gelu)
    sch.fuse(found, compiler="none")
    with pytest.raises(ScheduleError, match="find it again"):
        sch.fuse(found, compiler="none")
    other = create_schedule(Block())
    other.trace()
    with pytest.raises(ScheduleError, match="must be a subgraph of"):
        sch.fuse(other.find(linear_gelu))


# replace


def add_norm(y, x, p=0.1, extra=None):
    """Takes two inputs; the other parameters keep their defaults."""
    assert p == 0.1 and extra is None
    return y + x


def test_one_or_all_matches_are_replaced_by_a_function_with_defaults(net, x, seed):
    def plain(y, x):
        return y + x

    sch = create_schedule(net)
    with verify(sch, x):
        for each in sch.select("blocks.*"):
            each.trace()
        found = sch.find(plain)
        sch.replace(add_norm, found[1])
        assert [s.path for s in sch.find("add_norm")] == ["blocks.1"]
        sch["blocks.0"].replace(add_norm, found[:1])
    assert len(sch.find("add_norm")) == 2


def test_a_module_may_stand_for_a_subgraph(net, x, seed):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, y, x):
            return (y + x) * self.gain

    sch = create_schedule(net)
    with verify(sch, x):
        for each in sch.select("blocks.*"):
            each.trace()
        both = sch.find(lambda y, x: y + x)
        with pytest.raises(ScheduleError, match="cannot replace 2 subgraphs"):
            sch.replace(Scaled(), both)
        sch.replace(Scaled(), both[0])
    assert "blocks.0.replaced_0.gain" in net.state_dict()


def test_a_replacement_with_other_arguments_is_refused(net):
    sch = create_schedule(net)
    sch["blocks.0"].trace()
    with pytest.raises(ScheduleError, match="2 inputs of the pattern, but missing a required argument: 'c'"):
        sch.replace(lambda a, b, c: a, sch.find(lambda y, x: y + x))
    assert len(sch.find("add")) == 1


# checkpoint


def test_a_subgraph_is_recomputed(net, x, seed):
    calls = []
    net.blocks[0].act.register_forward_hook(lambda *a: calls.append(1))
    sch = create_schedule(net)
    with verify(sch, x):
        sch["blocks.0"].trace()
        sch.checkpoint(sch.find(lambda x: call_module("fc2", F.gelu(call_module("fc1", x)))))
    built, _ = build(sch)
    calls.clear()
    built(x).sum().backward()
    assert len(calls) == 2


# decompose


def test_linear_layers_are_decomposed(net, x, seed):
    sch = create_schedule(net)
    with verify(sch, x):
        sch["blocks.0"].trace().decompose()
        # The bias is now found together with the following operation.
        bias_gelu = sch.find(lambda y, b: F.gelu(y + b))
        assert len(bias_gelu) == 1
        sch.fuse(bias_gelu, compiler="none")
        sch["blocks.1"].trace()
        sch["blocks.1.fc2"].decompose()
    assert len(sch["blocks.1"].find(lambda y, b: y + b)) == 2
    with pytest.raises(ScheduleError, match="no linear layer with a bias in its graph"):
        sch["blocks.0"].decompose()
    with pytest.raises(ScheduleError, match="trace it first"):
        create_schedule(Block()).decompose()


def test_traced_models_are_copied_and_pickled(net, x):
    net.eval()
    sch = create_schedule(net)
    for each in sch.select("blocks.*"):
        each.trace()
    sch.fuse(sch.find(linear_gelu), compiler="none")
    sch.replace(operator.add, sch.find(lambda y, x: y + x))
    built, _ = build(sch)
    for other in (copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        assert torch.equal(other(x), built(x))
        nn.init.zeros_(other.blocks[1].norm.weight)
        nn.init.zeros_(other.blocks[1].norm.bias)
        assert not other(x).any() and built(x).any()
