"""Counterparts of Slapo's graph tests: patterns, fusion, replacement, traces; one section per file of Slapo's.

SLAPO.md lists all of Slapo's tests; the other counterparts are among the other tests of this folder.
"""

import copy

import pytest
import torch
from redline.base.errors import ScheduleError
from redline.models.wide_resnet import WideResNet
from redline.schedule import build, call_module, create_schedule, verify
from redline.schedule.forward import layers_of
from redline.schedule.graph.trace import Traced
from torch import nn
from torch.nn import functional as F

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def calls(sch):
    """Children that a traced module calls."""
    return [node.target for node in sch.graph.nodes if node.op == "call_module"]


def traced_names(sch):
    return [path for path, module in sch.module.named_modules() if layers_of(module, Traced)]


# test_subgraph.py


class Residual(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.conv, self.act, self.function = nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), function

    def forward(self, x):
        y = self.conv(x)
        return (F.relu(y) if self.function else self.act(y)) + x


@pytest.mark.parametrize("function", [True, False])
def test_a_residual_is_found_with_any_form_of_its_activation(function):
    sch = create_schedule(Residual(function)).trace()
    (found,) = sch.find(lambda y, x: F.relu(y) + x)
    assert found.names == ["relu" if function else "act", "add"]
    assert len(sch.find(lambda y, x: call_module("act", y) + x)) == (0 if function else 1)
    # A name in a pattern matches one value.
    assert sch.find(lambda x: F.relu(x) + x) == []


class Letters(nn.Module):
    """Convolutions followed by linear layers, as in LeNet."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.second = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.fc, self.relu, self.fc1, self.relu1 = nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU()
        self.fc2 = nn.Linear(8, 4)

    def forward(self, x):
        out = self.second(self.first(x)).flatten(1)
        return self.fc2(self.relu1(self.fc1(self.relu(self.fc(out)))))


@pytest.mark.parametrize(
    "pattern",
    [
        lambda x: F.relu(call_module(nn.BatchNorm2d, x)),
        lambda x: call_module(nn.ReLU, call_module(nn.BatchNorm2d, x)),
        lambda x: call_module("2", call_module("1", x)),
    ],
)
def test_modules_without_a_function_are_found_by_class_and_by_name(pattern):
    sch = create_schedule(Letters())
    for name in ("first", "second"):
        sch[name].trace()
        (found,) = sch[name].find(pattern)
        assert [node.target for node in found.nodes] == ["1", "2"]
    assert [each.path for each in sch.find(pattern)] == ["first", "second"]


@pytest.mark.parametrize(
    "pattern",
    [
        lambda x, w, b: F.relu(F.linear(x, w, b)),
        lambda x: call_module(nn.ReLU, call_module(nn.Linear, x)),
        lambda x: F.relu(call_module(r"fc\d?", x)),
    ],
)
def test_every_linear_layer_with_an_activation_is_found(pattern):
    sch = create_schedule(Letters()).trace()
    found = sch.find(pattern)
    assert [[node.target for node in each.nodes] for each in found] == [["fc", "relu"], ["fc1", "relu1"]]


def test_patterns_have_several_ways_and_several_inputs():
    class Ways(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

        def forward(self, x, y, z):
            return self.relu(self.fc1(x) + self.fc2(x)) + (x + y) * (y - z)

    sch = create_schedule(Ways()).trace()
    assert sch.find(lambda a, b: F.relu(a + b))[0].names == ["add", "relu"]
    (tree,) = sch.find(lambda x, y, z: (x + y) * (y - z))
    assert tree.names == ["add_1", "sub", "mul"] and [each.name for each in tree.inputs] == ["x", "y", "z"]
    assert sch.find(lambda x, y, z: (x + y) * (z - y)) == []


class Heads(nn.Module):
    """Three projections whose heads are transposed the same way."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def turned(self, x):
        return x.unflatten(-1, (2, 4)).permute(0, 2, 1, 3)

    def forward(self, x):
        q, k, v = self.turned(self.q(x)), self.turned(self.k(x)), self.turned(self.v(x))
        return torch.softmax(q * k, -1) * v


def test_the_same_shape_beside_itself_is_found_each_time():
    sch = create_schedule(Heads()).trace()
    found = sch.find(lambda x, sizes: call_module("[qkv]", x).unflatten(-1, sizes).permute(0, 2, 1, 3))
    assert [each.nodes[0].target for each in found] == ["q", "k", "v"]
    assert [node.target for node in found[-1].nodes[1:]] == ["unflatten", "permute"]


# test_fusion.py, and the fusion tests of test_verify.py


@pytest.fixture
def conv(seed):
    torch.manual_seed(seed)

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return F.relu(self.conv(x)) + 1

    return Shifted()


@pytest.mark.parametrize("compiler", ["none", "a function"])
def test_a_convolution_and_what_follows_is_fused_under_a_name(conv, compiler):
    given, names = [], list(conv.state_dict())

    def compiled(function):
        given.append(function)
        return function

    sch = create_schedule(conv).trace()
    with verify(sch, IMAGES):
        found = sch.find(lambda x: F.relu(call_module("conv", x)) + 1)
        assert len(found[0].nodes) == 3
        sch.fuse(found, compiler="none" if compiler == "none" else compiled, name="shifted_relu")
    assert [each.names for each in sch.find("shifted_relu")] == [["shifted_relu"]]
    assert bool(given) is (compiler != "none") and list(build(sch)[0].state_dict()) == names


class Projection(nn.Module):
    """The end of a block: a linear layer, dropout, a residual and a norm."""

    def __init__(self):
        super().__init__()
        self.linear, self.gelu = nn.Linear(8, 8), nn.GELU()
        self.drop, self.norm = nn.Dropout(0.2), nn.LayerNorm(8)

    def forward(self, x, residual):
        return self.norm(self.drop(self.gelu(self.linear(x))) + residual)


def test_a_bias_goes_into_what_follows_it(seed):
    torch.manual_seed(seed)
    model, x = Projection(), torch.randn(3, 8)
    plain = copy.deepcopy(model)
    sch = create_schedule(model).trace(flatten=True)
    with verify(sch, (x, x)):
        sch["linear"].decompose()
        (found,) = sch.find(lambda x, bias: F.gelu(bias + x))
        assert found.names[1] == "gelu" and {each.target for each in found.inputs} == {"linear", "linear.bias"}
        sch.fuse(found, compiler="none", name="bias_gelu")
        (end,) = sch.find(lambda x, residual, p, s, w, b, eps: F.layer_norm(F.dropout(x, p) + residual, s, w, b, eps))
        assert end.names[::2] == ["drop", "norm"]
        sch.fuse(end, compiler="none", name="residual_norm")
    built, _ = build(sch)
    assert list(built.state_dict()) == list(plain.state_dict())
    found, expected = (drawn(each, x) for each in (built, plain))
    assert torch.equal(found, expected)  # the same elements were dropped


def drawn(model, x):
    model.train()
    torch.manual_seed(1)
    return model(x, x)


# test_replace.py


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act1 = nn.Linear(4, 4), nn.ReLU()
        self.list = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        x = self.act1(self.fc1(x))
        for each in self.list:
            x = each(x)
        return self.inner(x)


def test_all_of_a_kind_are_replaced_in_lists_and_sequences_by_what_their_path_asks_for():
    sch = create_schedule(Nested())
    sch.replace_all(nn.ReLU, lambda old: nn.GELU())
    assert all(type(sch[path].module) is nn.GELU for path in ("act1", "list.1", "inner.1"))
    widths = {"fc1": 5, "list.0": 6, "inner.0": 7}
    with pytest.warns(UserWarning, match="not kept"):
        sch.replace_all(nn.Linear, lambda old, path: nn.Linear(4, widths[path]))
    assert {path: sch[path].module.out_features for path in widths} == widths


def test_a_replacement_s_own_modules_are_not_replaced_again(seed):
    torch.manual_seed(seed)
    sch = create_schedule(Nested())
    with verify(sch, torch.randn(2, 4)):
        # An activation followed each already: a second one would have no effect.
        sch.replace_all(nn.Linear, lambda old: nn.Sequential(old, nn.ReLU()))
    assert [type(each) for each in sch["fc1"].module] == [nn.Linear, nn.ReLU]
    assert type(sch["list.0.0"].module) is nn.Linear and "inner.0.1" in sch


def test_a_single_operation_is_replaced_by_a_function():
    sch = create_schedule(Residual(function=True)).trace()
    (relu,) = sch.find(where=lambda node: node.op == "call_function" and node.target is F.relu)
    sch.replace(F.gelu, relu)
    assert len(sch.find("gelu")) == 1 and sch.find("relu") == []
    model, _ = build(sch)
    assert torch.equal(model(IMAGES), F.gelu(model.conv(IMAGES)) + IMAGES)


def test_arguments_that_the_pattern_has_not_are_bound_by_the_caller():
    def weighted(y, x, factor):
        return F.relu(y) + x * factor

    sch = create_schedule(Residual(function=True)).trace()
    found = sch.find(lambda y, x: F.relu(y) + x)
    with pytest.raises(ScheduleError, match="factor"):
        sch.replace(weighted, found)
    sch.replace(lambda y, x: weighted(y, x, 0), found)
    model, _ = build(sch)
    assert torch.equal(model(IMAGES), F.relu(model.conv(IMAGES)))


def test_hooks_of_a_module_stay_when_it_is_traced():
    seen = []
    sch = create_schedule(Residual(function=True))
    sch.module.register_forward_pre_hook(lambda module, args: seen.append("before"))
    sch.module.register_forward_hook(lambda module, args, output: seen.append("after"))
    sch.module.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append("back"))
    sch.trace()
    build(sch)[0](IMAGES.clone().requires_grad_()).sum().backward()
    assert seen == ["before", "after", "back"]


class Joined(nn.Module):
    """The projections to queries, keys and values as one product."""

    def __init__(self, old):
        super().__init__()
        parts = (old.query, old.key, old.value)
        self.weight = nn.Parameter(torch.cat([each.weight for each in parts]).detach())
        self.bias = nn.Parameter(torch.cat([each.bias for each in parts]).detach())

    def forward(self, x, *sizes):
        return [each.view(sizes).transpose(1, 2) for each in F.linear(x, self.weight, self.bias).chunk(3, -1)]


@pytest.fixture
def layer(make_transformer, seed):
    """A layer of BERT with step-by-step attention, and its inputs."""
    torch.manual_seed(seed)
    model = make_transformer("bert", device="cpu")
    model.set_attn_implementation("eager")
    return model.bert.encoder.layer[0], torch.randn(2, 16, 32)


def heads(x, a, b, c, d):
    return call_module("query|key|value", x).view(a, b, c, d).transpose(1, 2)


def test_the_projections_of_attention_become_one(layer):
    block, x = layer
    sch = create_schedule(block.attention.self).trace(examples=(x,))
    with verify(sch, x):
        found = sch.find(heads, explain=True)
        assert [each.nodes[0].target for each in found] == ["query", "key", "value"]
        with pytest.warns(UserWarning, match="not kept"):
            sch.replace(Joined(sch.module), found, name="qkv", together=True)
    assert [name for name, _ in sch.module.named_parameters()] == ["qkv.weight", "qkv.bias"]
    assert calls(sch) == ["qkv"]


def scores(q, k, v, scale, p):
    weights = F.softmax(torch.matmul(q, k.transpose(2, 3)) * scale, dim=-1)
    return torch.matmul(F.dropout(weights, p), v)


def efficient(q, k, v, scale, p):
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def test_attention_by_hand_becomes_the_efficient_one_and_mixed_up_arguments_are_noticed(layer):
    block, x = layer
    sch = create_schedule(block).trace(flatten=True, examples=(x,))
    wrong = sch.copy()
    attention = create_schedule(copy.deepcopy(block.attention.self)).trace(examples=(x,))
    with pytest.raises(ScheduleError, match="is used by output"):  # it also returns the weights, which a layer drops
        attention.replace(efficient, attention.find(scores, explain=True))
    with verify(sch, x):
        sch.replace(efficient, sch.find(scores, explain=True))
    assert len(sch.find("efficient")) == 1
    with pytest.raises(ScheduleError, match="departs"), verify(wrong, x):
        wrong.replace(lambda q, k, v, scale, p: efficient(k, q, v, scale, p), wrong.find(scores))


# test_trace.py


def test_a_traced_block_leaves_what_is_around_and_below_it_as_it_is(make_transformer, tokens):
    sch = create_schedule(make_transformer("bert", device="cpu"))
    types = {path: type(module) for path, module in sch.module.named_modules()}
    with verify(sch, {"input_ids": tokens, "labels": tokens}):
        block = sch["bert.encoder.layer.0.attention"].trace()
    assert calls(block) == ["self", "output"]
    assert traced_names(sch) == ["bert.encoder.layer.0.attention"]
    assert {path: type(module) for path, module in sch.module.named_modules()} == types


@pytest.mark.parametrize(
    ("leaves", "expected"),
    [
        ([], ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"]),
        (["attention.self", "attention.output"], ["attention.self", "attention.output"]),
    ],
)
def test_a_block_is_flattened_down_to_what_is_to_stay_a_call(make_transformer, tokens, leaves, expected):
    sch = create_schedule(make_transformer("bert", device="cpu"))
    with verify(sch, {"input_ids": tokens, "labels": tokens}):
        block = sch["bert.encoder.layer.0"].trace(flatten=True, leaves=leaves)
    found = calls(block)
    assert found[: len(expected)] == expected
    assert "intermediate.dense" in found and block["attention.self.query"].module.out_features == 32


def test_blocks_of_a_wide_resnet_are_traced_and_their_shortcuts_stay_calls(seed):
    torch.manual_seed(seed)
    sch = create_schedule(WideResNet(depth=10, width=1))
    with verify(sch, torch.randn(2, 3, 8, 8)):
        for block in sch.select("blocks.*"):
            block.trace()
    assert traced_names(sch) == ["blocks.0", "blocks.1", "blocks.2"]
    assert calls(sch["blocks.1"]) == ["norm1", "shortcut", "conv1", "norm2", "conv2"]


# test_op.py


def test_side_effects_of_a_leaf_module_happen_when_the_graph_runs(capsys):
    class Printing(nn.Module):
        def forward(self, x):
            print("shape", tuple(x.shape))
            return x

    model = nn.Sequential(nn.Linear(5, 5), Printing())
    sch = create_schedule(model)
    sch.trace()
    assert calls(sch) == ["0", "1"] and capsys.readouterr().out == ""
    build(sch)[0](torch.ones(3, 5))
    assert capsys.readouterr().out == "shape (3, 5)\n"
