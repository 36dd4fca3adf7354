"""Tracing the modules of transformers, attention and whole models included, by example and by torch.export."""

import copy

import pytest
import torch
import transformers
from redline.base.errors import ScheduleError, TraceError
from redline.schedule import build, create_schedule, verify
from tiers import tiered
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
    with pytest.raises(ScheduleError, match="tracer 'export' needs examples="):
        sch["0.inner"].trace(tracer="export")
    with pytest.raises(ScheduleError, match="unknown tracer 'fxx'; did you mean 'fx'"):
        sch["0.inner"].trace(tracer="fxx")
    x = torch.randn(2, 8)
    expected = sch.module(x)
    sch["0"].trace(examples=x)
    sch["0.inner"].trace()
    assert torch.equal(build(sch)[0](x), expected)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x, *, twice=False):
        out = self.drop(F.gelu(self.fc(x)))
        return {"out": out * 2 if twice else out}


@pytest.mark.parametrize("tracer", tiered(["export"], ["dynamo"]))
def test_exported_graphs_are_found_in_and_edited(tracer, seed):
    torch.manual_seed(seed)
    sch = create_schedule(Plain())
    plain = copy.deepcopy(sch.module)
    x = torch.randn(4, 8)
    with verify(sch, x):
        sch.trace(tracer=tracer)
        sch.fuse(sch.find(lambda x, w, b: F.gelu(F.linear(x, w, b))), compiler="none")
    built, _ = build(sch)
    for model in (built, plain):
        torch.manual_seed(1)
        model.result = model(torch.cat([x, x]))["out"]
    assert torch.equal(built.result, plain.result) and not torch.equal(built.result[:4], built.result[4:])
    built.eval(), plain.eval()
    assert torch.equal(built(x)["out"], plain(x)["out"])


def test_modules_that_export_would_change_are_refused():
    sch = create_schedule(Plain())
    sch["fc"].hook("fwd_post", lambda m, args, out: out)
    with pytest.raises(TraceError, match="the schedule of 'fc' would be lost.*by tracer='fx'"):
        sch.trace(tracer="export", examples=torch.ones(2, 8))


BLOCKS = {
    "bert": "bert.encoder.layer.0",
    "gpt2": "transformer.h.0",
    "gpt_neo": "transformer.h.1",
    "opt": "model.decoder.layers.0",
    "t5": "decoder.block.1",
    "albert": "albert.encoder.albert_layer_groups.0.albert_layers.0",
    "llama": "model.layers.0",
    "roberta": "roberta.encoder.layer.0",
    "vit": "vit.layers.0",
}
REFUSED = {
    "gpt_neo": "it has the constant .*, a tensor that each call creates again",
    "t5": "it does other operations in training than in evaluation",
    "llama": "it does other operations in training than in evaluation",
}
"""Families that operator traces cannot represent, and why."""


@pytest.mark.parametrize(
    ("family", "tracer"),
    [
        pytest.param(family, tracer, marks=[] if (family, tracer) == ("opt", "export") else pytest.mark.slow)
        for family in FAMILIES
        for tracer in ("export", "dynamo")
    ],
)
def test_attention_and_blocks_are_exported_or_refused_in_words(family, tracer):
    for path in (FAMILIES[family][2], BLOCKS[family]):
        model, data = made(family), batch(family)
        plain = copy.deepcopy(model)
        sch = create_schedule(model)
        sch.tree.examples[""] = ((), data)
        if family in REFUSED:
            with pytest.raises(TraceError, match=REFUSED[family]):
                sch[path].trace(tracer=tracer)
            continue
        sch[path].trace(tracer=tracer)
        assert not [node for node in sch[path].graph.nodes if node.op == "call_module"]
        built, _ = build(sch)
        assert same(trained(built, data), trained(plain, data))
        more = batch(family, size=4, length=16)
        assert torch.equal(built.eval()(**more).loss, plain.eval()(**more).loss)


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


@pytest.mark.parametrize("tracer", ["fx", "export", "dynamo"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_pattern_matches_all_spellings_of_an_operation(name, tracer):
    x = torch.randn(2, 3, 4)
    # TorchDynamo takes seconds.
    for written in SPELLINGS[name][: 1 if tracer == "dynamo" else None]:
        sch = create_schedule(Spelled(written)).trace(tracer=tracer, examples=x)
        assert [len(sch.find(pattern)) for pattern in SPELLINGS[name]] == [1] * len(SPELLINGS[name])
