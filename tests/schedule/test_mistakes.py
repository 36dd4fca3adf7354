"""Mistakes that schedules invite: each raises a ScheduleError, or computes the original's results."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ranks import mesh
from redline.base.errors import ScheduleError, TraceError
from redline.schedule import build, create_schedule, verify
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from transformers import LlamaConfig, LlamaForCausalLM

# Samples of ranks that share sequences


def check_ring_samples(kind):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    sch = create_schedule(LlamaForCausalLM(config), mesh(dp=2)).cut_sequence(**{kind: 2})
    model, _ = build(sch)
    own = torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    with pytest.raises(
        ScheduleError, match=f"the 2 ranks of the {kind} axis share every sample.*input_ids.*Distributed"
    ):
        model(input_ids=own, labels=own)
    same = torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(7))
    assert model(input_ids=same, labels=same).loss.isfinite()


@pytest.mark.parametrize("kind", ["sp", "cp"])
def test_ranks_that_share_sequences_are_given_the_same_samples(two, kind):
    two.run(check_ring_samples, kind)


# verify


class HalvedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


class Halved(nn.Module):
    """Has correct outputs and weight gradients; the gradient of its input is halved."""

    def __init__(self, old):
        super().__init__()
        self.inner = old

    def forward(self, x):
        return self.inner(HalvedBackward.apply(x))


def test_a_part_that_hands_a_wrong_gradient_on_is_found():
    torch.manual_seed(0)
    sch = create_schedule(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with pytest.raises(ScheduleError, match=r"the gradient of input 0 departs by 0\.5"):
        with verify(sch["1"], torch.randn(4, 8)):
            sch["1"].replace(Halved)


def test_verify_refuses_sequence_shards_with_a_message(two):
    two.run(check_no_verify)


def check_no_verify():
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, intermediate_size=48, num_attention_heads=4
    )
    sch = create_schedule(LlamaForCausalLM(config), mesh(dp=2))
    with pytest.raises(ScheduleError, match="cut_sequence gives each rank a piece of every sample"):
        with verify(sch, {"input_ids": torch.zeros(2, 16, dtype=torch.long)}):
            sch.cut_sequence(sp=2)


class Dropping(nn.Module):
    def __init__(self, rate=0.1, more=0.0):
        super().__init__()
        self.fc, self.drop, self.more = nn.Linear(32, 32), nn.Dropout(rate), nn.Dropout(more)

    def forward(self, x):
        return self.more(self.drop(self.fc(x)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sch: sch["drop"].replace(nn.Identity()), "depart by 0 of their size.*the reference's by 0.3"),
        (lambda sch: sch.replace(lambda old: Dropping(0.1, 0.3)), "'more.p' is a rate of dropout, 0.0 before and 0.3"),
        (lambda sch: setattr(sch["drop"].module, "p", 0.5), "'drop.p' is a rate of dropout, 0.1 before and 0.5 after"),
        (lambda sch: sch["drop"].replace(nn.AlphaDropout(0.5)), "depart by .* of their size"),
    ],
)
def test_another_dropout_is_found(change, message):
    torch.manual_seed(0)
    sch = create_schedule(Dropping())
    with pytest.raises(ScheduleError, match=message):
        with verify(sch, torch.randn(16, 32)):
            change(sch)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.1


@dataclass
class Output:
    logits: torch.Tensor
    note: str = "plain"


class Returning(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return Output(self.fc(x))


def test_outputs_that_are_plain_dataclasses_are_compared():
    torch.manual_seed(0)
    sch = create_schedule(Returning())
    with verify(sch, torch.randn(4, 8)):
        sch["fc"].compile(backend="eager")
    with pytest.raises(ScheduleError, match="output 0 "):
        with verify(sch, torch.randn(4, 8)):
            sch["fc"].replace(lambda old: Scaled(8, 8))


# trace


class Counting(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.fc = how, nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.how == "count":
            self.count += 1
        elif self.how == "mean":
            self.mean.mul_(0.9).add_(x.mean(0))
        elif self.how == "attribute":
            self.last = x * 2
        return self.fc(x) + self.mean


@pytest.mark.parametrize(
    ("how", "examples"),
    [
        ("count", None),
        ("mean", None),
        ("attribute", None),
        ("count", torch.ones(2, 4)),
        ("attribute", torch.ones(2, 4)),
    ],
)
def test_a_forward_that_writes_its_module_is_refused_and_changes_nothing(how, examples):
    model = Counting(how)
    before, buffers = copy.deepcopy(model.state_dict()), dict(model.named_buffers())
    written = {"count": "count", "mean": "mean", "attribute": "last"}[how]
    with pytest.raises(TraceError, match=f"writes {written}|count"):
        create_schedule(model).trace(examples=examples)
    assert dict(model.named_buffers()).keys() == buffers.keys()
    assert all(each is buffers[name] for name, each in model.named_buffers())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "last" not in vars(model)
    model(torch.ones(2, 4))


def test_a_buffer_that_is_written_in_place_is_written_at_every_call_of_a_graph_by_example():
    torch.manual_seed(0)
    plain = Counting("mean")
    traced = copy.deepcopy(plain)
    create_schedule(traced).trace(examples=torch.ones(2, 4))
    for _ in range(3):
        x = torch.randn(2, 4)
        assert torch.equal(plain(x), traced(x))
    assert torch.equal(plain.mean, traced.mean) and plain.mean.any()


# Modules that a primitive cannot divide or must handle specially


class Normed(nn.Module):
    def __init__(self, momentum):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("part", [True, False], ids=["subgraph", "module"])
def test_recomputed_batch_norms_move_their_statistics_once(momentum, part):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 3, 1), Normed(momentum))
    model = copy.deepcopy(plain)
    sch = create_schedule(model)
    if part:
        sch["1"].trace().checkpoint(sch["1"].find("norm"))
    else:
        sch["1"].checkpoint()
    built, _ = build(sch)
    x = torch.randn(2, 3, 8, 8)
    for _ in range(3):
        for each in (plain, built):
            each.zero_grad()
            each(x).square().sum().backward()
    for (name, value), other in zip(plain.state_dict().items(), built.state_dict().values()):
        assert torch.equal(value, other), name
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), built.parameters()))
    assert built[1].norm.momentum == momentum and int(built[1].norm.num_batches_tracked) == 3


# Subgraphs


def test_a_parametrized_linear_layer_is_a_module_that_find_passes_by():
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    sch = create_schedule(model).trace()
    found = sch.find(lambda x, w, b: F.linear(x, w, b))
    assert [each.names for each in found] == [["_1"]]


def test_subgraphs_that_overlap_are_refused_before_anything_changes():
    class Chain(nn.Module):
        def forward(self, x):
            return torch.tanh(torch.relu(x) + 1)

    sch = create_schedule(Chain()).trace()
    one, other = sch.find(lambda x: torch.relu(x) + 1)[0], sch.find(lambda x: torch.tanh(x + 1))[0]
    before = str(sch.graph)
    for primitive in (sch.fuse, sch.checkpoint):
        with pytest.raises(ScheduleError, match="subgraphs must not overlap, but 'add' is in"):
            primitive([one, other])
    assert str(sch.graph) == before


class FusedNorm(nn.LayerNorm):
    def __init__(self, features: int):
        super().__init__(features)


def test_a_class_is_called_with_the_old_module_and_others_are_refused_in_words():
    sch = create_schedule(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))
    with pytest.raises(
        ScheduleError, match=r"FusedNorm takes features, a number; pass FusedNorm\(features\), or lambda"
    ):
        sch["0"].replace(FusedNorm)
    with pytest.raises(
        ScheduleError, match=r"but Linear takes other arguments .*; pass Linear\(\.\.\.\), or a function"
    ):
        sch["1"].replace(nn.Linear)
    sch.trace()
    with pytest.raises(ScheduleError, match=r"new must be a module or a function, but got .*ReLU'>; make one: ReLU"):
        sch.replace(nn.ReLU, sch.find("0|_0"))
    sch = create_schedule(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    sch["1"].replace(Halved)
    assert isinstance(sch["1"].module, Halved)
