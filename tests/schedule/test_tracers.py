"""Tracing the modules of transformers, attention and whole models included, by example."""

import copy

import pytest
import torch
import transformers
from redline.base.errors import ScheduleError, TraceError
from redline.schedule import build, create_schedule, verify
from tiny_families import FAMILIES, batch, made, same, trained
from torch import nn
from torch.nn import functional as F


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_traced_and_edited(family, seed):
    model, data = made(family, seed), batch(family)
    plain = copy.deepcopy(model)
    sch = create_schedule(model)
    at = sch[FAMILIES[family][2]]
    with verify(sch, data):
        at.trace()
        if family != "gpt_neo":
            (attention,) = at.find("scaled_dot_product_attention")
            at.checkpoint(attention)
        else:
            at.fuse(at.find("softmax"), compiler="none")
    built, _ = build(sch)
    assert same(trained(built, data), trained(plain, data))
    # Sizes may vary.
    more = batch(family, size=4, length=16)
    built.eval(), plain.eval()
    assert torch.equal(built(**more).loss, plain(**more).loss)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "opt", "t5"])
def test_whole_models_and_embeddings_are_traced(family, seed):
    model, data = made(family, seed), batch(family)
    plain = copy.deepcopy(model)
    sch = create_schedule(model)
    sch.trace(examples=data)
    # OPT's head calls the decoder directly, not the model that contains it.
    decoder = [sch["model.decoder"]] if family == "opt" else []
    inner = [*decoder, *(each for each in sch if isinstance(each.module, transformers.PreTrainedModel))][0]
    inner.trace()
    if family == "bert":
        inner["embeddings"].trace()
    built, _ = build(sch)
    assert same(trained(built, data), trained(plain, data))


def test_training_and_evaluation_differ_when_the_graph_runs():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = 0.5
            self.drop_rate = 0.5

        def forward(self, x):
            return F.dropout(x, 0.0 if not self.training else self.drop_rate)

    model = Dropping()
    sch = create_schedule(model)
    sch.trace(examples=torch.ones(4, 8))
    built, _ = build(sch)
    x = torch.ones(64, 8)
    assert 0.3 < float((built(x) == 0).float().mean()) < 0.7
    built.eval()
    assert torch.equal(built(x), x)
    built.train().drop_rate = 0.0
    assert torch.equal(built(x), x)


class Branching(nn.Module):
    def forward(self, x, mask=None, scale=1.0):
        if x.shape[1] > 4:
            x = x * 2
        first, *_ = x.shape
        x = x.reshape(first, -1)
        x = x.view(*x.shape[:-1], 2, -1).flatten(1)
        return x * scale if mask is None else x * mask


def test_a_way_that_the_example_did_not_go_is_refused_when_the_graph_runs():
    sch = create_schedule(Branching())
    x = torch.randn(3, 8, requires_grad=True)
    with verify(sch, x):
        sch.trace()
    built, _ = build(sch)
    assert torch.equal(built(x[:2]), x[:2] * 2)
    with pytest.raises(ScheduleError, match="was traced where gt is True, but here it is False"):
        built(x[:, :4])
    with pytest.raises(ScheduleError, match=r"with mask=None, but is called with another value; trace\(inputs="):
        built(x, x)
    with pytest.raises(ScheduleError, match="with a tensor of 2 dimensions for x, but is called with a tensor of 1"):
        built(x[0])
    other = create_schedule(Branching())
    other.trace(examples=(x, x), inputs=["scale"])
    built, _ = build(other)
    assert torch.equal(built(x, x, 3.0), x * 2 * x)
    with pytest.raises(ScheduleError, match="with a tensor of 2 dimensions for mask, but is called with None"):
        built(x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Branching()

    def forward(self, x):
        return self.inner(x * 2, scale=3.0)


def test_examples_are_taken_from_the_calls_of_a_module_above():
    sch = create_schedule(nn.Sequential(Outer()))
    with pytest.raises(TraceError, match="Branching|control flow"):
        sch["0.inner"].trace()
    x = torch.randn(2, 8)
    expected = sch.module(x)
    sch["0"].trace(examples=x)
    sch["0.inner"].trace()
    assert torch.equal(build(sch)[0](x), expected)


class Spelled(nn.Module):
    def __init__(self, written):
        super().__init__()
        self.written = written

    def forward(self, x):
        return self.written(x)


SPELLINGS = {
    "permute": [
        lambda x: x.permute(0, 2, 1),
        lambda x: x.permute((0, 2, 1)),
        lambda x: x.permute([0, 2, 1]),
        lambda x: torch.permute(x, (0, 2, 1)),
        lambda x: torch.permute(x, dims=[0, 2, 1]),
    ],
    "transpose": [
        lambda x: x.transpose(1, 2),
        lambda x: torch.transpose(x, 1, 2),
        lambda x: x.transpose(dim0=1, dim1=2),
        lambda x: x.swapaxes(1, 2),
    ],
    "view": [lambda x: x.view(2, 12), lambda x: x.view((2, 12)), lambda x: x.view(size=[2, 12])],
    "mean": [
        lambda x: x.mean(-1),
        lambda x: x.mean(dim=-1),
        lambda x: x.mean(axis=(-1,)),
        lambda x: torch.mean(x, -1, keepdim=False),
    ],
    "flatten": [lambda x: x.flatten(1), lambda x: torch.flatten(x, 1), lambda x: torch.flatten(x, start_dim=1)],
    "leaky_relu": [lambda x: nn.functional.leaky_relu(x), lambda x: nn.functional.leaky_relu(x, 0.01, inplace=False)],
    "chunk": [lambda x: x.chunk(2, -1), lambda x: torch.chunk(x, 2, dim=-1)],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_pattern_matches_all_spellings_of_an_operation(name):
    x = torch.randn(2, 3, 4)
    for written in SPELLINGS[name]:
        sch = create_schedule(Spelled(written)).trace(examples=x)
        assert [len(sch.find(pattern)) for pattern in SPELLINGS[name]] == [1] * len(SPELLINGS[name])
