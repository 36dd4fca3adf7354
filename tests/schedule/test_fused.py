"""Fused attention and GELUs in models of all families: equal numbers under equal names."""

import copy

import pytest
import torch
from ranks import mesh
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule, verify
from redline.schedule.primitives.fused import Attention, written_out
from tiny_families import FAMILIES, batch, made, trained
from torch import nn
from torch.nn import functional as F

BLOCKS = {
    "bert": "bert.encoder.layer.0",
    "gpt2": "transformer.h.0",
    "gpt_neo": "transformer",  # whose blocks return their attention weights
    "opt": "model.decoder.layers.0",
    "t5": "decoder.block.1",
    "albert": "albert.encoder.albert_layer_groups.0.albert_layers.0",
    "llama": "model.layers.0",
    "roberta": "roberta.encoder.layer.0",
    "vit": "vit.layers.0",
}
WRITTEN_OUT = ("gpt2", "gpt_neo", "albert")
"""Families that spell out GELU."""


def block_of(family, model):
    """The schedule of a model, and that of its block."""
    sch = create_schedule(model)
    return sch, sch[BLOCKS[family]]


def kinds(sch):
    """Names of the functions that were inserted into a graph."""
    found = []
    for node in sch.graph.nodes:
        function = getattr(node.target, "function", None)
        ours = isinstance(function, Attention)
        found.append(type(function).__name__ if ours else getattr(function, "__name__", ""))
    return [each for each in found if each]


def close(one, other):
    return len(one) == len(other) and all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(one, other))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_all_families_are_fused(family, seed):
    model, data = made(family, seed), batch(family)
    if family != "gpt_neo":  # has no other implementation
        model.set_attn_implementation("eager")
    plain = copy.deepcopy(model)
    sch, block = block_of(family, model)
    with verify(sch, data):
        block.trace(flatten=True)
        block.fused_attention()
        if family in WRITTEN_OUT:
            block.fused_gelu()
        else:
            with pytest.raises(ScheduleError, match="no tanh GELU is written out"):
                block.fused_gelu()
    built, _ = build(sch)
    assert built.state_dict().keys() == plain.state_dict().keys()
    # Dropout draws the same numbers.
    assert close(trained(built, data), trained(plain, data))


class Block(nn.Module):
    """Attention and a gated feed-forward part with a spelled-out GELU."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(dropout)

    def heads(self, x):
        return x.unflatten(-1, (-1, 4)).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        weights = self.drop(torch.softmax(q @ k.transpose(-1, -2) / 2.0, -1))
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(self.drop(written_out(self.gate(x)) * self.up(x)))


def block(dropout=0.0):
    torch.manual_seed(0)
    return Block(dropout)


def fused(sch):
    return sch.trace().fused_attention().fused_gelu()


def passed(model, x):
    """The output and the gradients of one pass."""
    model.zero_grad()
    torch.manual_seed(1)
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(param.grad for param in model.parameters())]


def test_a_model_of_ones_own_is_fused_without_examples():
    sch = create_schedule(block(0.5))
    x = torch.randn(2, 6, 16)
    plain = copy.deepcopy(sch.module)
    with verify(sch, x):
        fused(sch)
    assert kinds(sch) == ["Attention", "gelu_tanh"]
    built, _ = build(sch)
    assert close(passed(built, x), passed(plain, x))
    # The rate and the mode come from the module.
    built.drop.p = plain.drop.p = 0.1
    assert close(passed(built, x), passed(plain, x))
    assert close(passed(built.eval(), x), passed(plain.eval(), x))
    again = copy.deepcopy(built)
    assert close(passed(again, x), passed(plain, x))


def test_a_missing_pattern_is_reported():
    sch = create_schedule(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    for primitive in (sch.fused_attention, sch.fused_gelu):
        with pytest.raises(ScheduleError, match=r"fused_\w+ on 'Sequential': trace it first, or a module below it"):
            primitive()
    sch.trace(flatten=True)
    with pytest.raises(ScheduleError, match="there is no softmax between two products"):
        sch.fused_attention()
    with pytest.raises(ScheduleError, match="no tanh GELU is written out"):
        sch.fused_gelu()
    assert not kinds(sch)


class Shown(nn.Module):
    """Attention that also returns its weights, and attention with capped scores."""

    def __init__(self, capped):
        super().__init__()
        self.capped = capped

    def forward(self, x):
        scores = x @ x.transpose(-1, -2)
        weights = torch.softmax(torch.tanh(scores) if self.capped else scores, -1)
        return weights @ x if self.capped else (weights @ x, weights)


def test_attention_that_is_used_otherwise_stays():
    sch = create_schedule(Shown(capped=False)).trace()
    with pytest.raises(
        ScheduleError, match="the weights of attention in 'the root' are used by matmul_1, output; trace"
    ):
        sch.fused_attention()
    sch = create_schedule(Shown(capped=True)).trace()
    with pytest.raises(ScheduleError, match="there is no softmax between two products"):
        sch.fused_attention()


class Masked(nn.Module):
    """Attention with every supported operation on scores."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.scale = 0.5

    def forward(self, q, k, v, hidden, bias):
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scale
        if self.kind == "fill":
            scores = scores.masked_fill(hidden, -1e4) + bias
        elif self.kind == "where":
            scores = torch.where(~hidden, bias + scores, torch.tensor(-1e4))
        else:
            scores = bias + scores
        return F.softmax(scores.float(), dim=-1, dtype=torch.float32).to(v.dtype) @ v


@pytest.mark.parametrize("kind", ["fill", "where", "bias"])
def test_masks_and_biases_are_kept_and_learn(kind):
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(2, 3, n, d, generator=generator, requires_grad=True) for n, d in ((5, 8), (7, 8), (7, 4), (5, 7))
    ]
    q, k, v, bias = given
    hidden = torch.rand(2, 1, 5, 7, generator=generator) < 0.3
    sch = create_schedule(Masked(kind))
    with verify(sch, (q, k, v, hidden, bias)):
        sch.trace(examples=(q, k, v, hidden, bias)).fused_attention()
    results = []
    for model in (Masked(kind), build(sch)[0]):
        for each in given:
            each.grad = None
        out = model(q, k, v, hidden, bias)
        out.square().sum().backward()
        results.append([out.detach(), *(each.grad.clone() for each in given)])
    assert close(*results)


# Several devices


def cut(sch):
    for name in ("gate", "up"):
        sch[name].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def check_attention_cut():
    torch.manual_seed(0)
    sch = create_schedule(Block(), mesh(tp=2))
    with verify(sch, torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))):
        for name in "qkv":
            sch[name].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        sch["o"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        cut(sch)
        fused(sch)


@pytest.mark.parametrize("check", [check_attention_cut])
def test_fused_modules_are_sharded_over_ranks(two, check):
    two.run(check)
