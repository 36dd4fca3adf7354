"""Ranks must agree on weights at build and on inputs at the first step; a misplaced cut raises an error."""

import pytest
import torch
import torch.distributed as dist
from ranks import mesh
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule, verify
from redline.schedule.parallel import sharding
from redline.schedule.parallel.sharding import checksum
from torch import nn


class Net(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.fc1 = nn.Linear(8, 16, bias=bias)
        self.fc2 = nn.Linear(16, 8, bias=bias)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, batch, *, shift=None):
        out = self.fc2(torch.relu(self.fc1(batch))) * self.scale
        return out if shift is None else out + shift


def cut(sch, bias=True):
    sch["fc1"].shard(["weight", "bias"] if bias else "weight", axis=0).sync("bwd_post", "all_reduce")
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def made(seed, **kwargs):
    torch.manual_seed(seed)
    return Net(**kwargs)


def inputs(seed):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def test_checksums_distinguish_the_order_of_words_in_different_chunks(monkeypatch):
    monkeypatch.setattr(sharding, "CHUNK", 4)
    x = torch.arange(8.0)
    swapped = x.clone()
    swapped[[2, 5]] = x[[5, 2]]
    moved = x.clone()
    moved[[1, 4]] = x[[4, 1]]
    assert len({checksum(each) for each in (x, swapped, moved)}) == 3


# Weights


def check_refused(axes):
    sch = create_schedule(made(dist.get_rank()), mesh(**axes))
    with pytest.raises(
        ScheduleError,
        match=r"2 ranks of the \w+ axis must begin with the same values, but those of .*fc1.bias.* differ; "
        r"build\(sch, broadcast=True\) copies the first rank's values",
    ):
        build(sch)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}], ids=["dp", "tp"])
def test_weights_that_differ_between_ranks_are_refused(two, axes):
    two.run(check_refused, axes)


def check_broadcast():
    model = made(dist.get_rank())
    sch = create_schedule(model, mesh(dp=2))
    sch.shard_data(zero=0)
    built, optimizer = build(sch, optimizer=sgd, broadcast=True)
    expected = made(0)
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in built.state_dict().items())
    for step in range(3):
        built(inputs(step * 2 + dist.get_rank())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(built.state_dict())


def test_asked_for_all_ranks_take_the_first_ones_weights(two):
    one, other = two.run(check_broadcast)
    assert all(torch.equal(one[name], other[name]) for name in one)


def check_cut_weights():
    sch = create_schedule(made(dist.get_rank(), bias=False), mesh(tp=2))
    sch.module.scale.fill_(1)
    cut(sch, bias=False)
    for broadcast in (False, True):
        with pytest.raises(
            ScheduleError, match=r"fc1.weight before it was cut, .*give every rank the same values before"
        ):
            build(sch, broadcast=broadcast)
    sch = create_schedule(made(3, bias=False), mesh(tp=2))
    cut(sch, bias=False)
    build(sch)


def test_pieces_of_weights_that_were_others_are_refused(two):
    two.run(check_cut_weights)


# Inputs


def check_given():
    sch = create_schedule(made(0), mesh(tp=2))
    cut(sch)
    model, _ = build(sch)
    with pytest.raises(ScheduleError, match="2 ranks of the tp axis share every sample.*but input 0 differs; seed"):
        model(inputs(dist.get_rank()))
    sch = create_schedule(made(0), mesh(tp=2))
    cut(sch)
    model, _ = build(sch)
    with pytest.raises(ScheduleError, match="but shift differs"):
        model(inputs(0), shift=inputs(dist.get_rank()))
    # Inputs are checked once: afterwards no wrapper remains around the model.
    assert model._compiled_call_impl is None
    sch = create_schedule(made(0), mesh(tp=2))
    with pytest.raises(ScheduleError, match="but input 0 differs"), verify(sch, inputs(dist.get_rank())):
        cut(sch)


def test_a_tensor_parallel_group_must_be_given_the_same_batch(two):
    two.run(check_given)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x):
        return self.fc2(self.norm(self.fc1(x)))


def check_norm():
    torch.manual_seed(0)
    sch = create_schedule(Normed(), mesh(tp=2))
    sch["fc1"].shard(["weight", "bias"], axis=0)
    model, _ = build(sch)
    with pytest.raises(ScheduleError, match=r"'norm' \(LayerNorm\) takes 16 features, but gets the 8 of one of 2"):
        model(inputs(0))
    sch = create_schedule(Normed(), mesh(tp=2))
    with verify(sch, inputs(0)):
        sch["fc1"].shard(["weight", "bias"], axis=0).sync("fwd_post", "all_gather", axis=-1)
        sch["fc1"].sync("bwd_post", "all_reduce")


def test_a_norm_that_is_given_a_piece_says_what_to_do(two):
    torch.manual_seed(0)
    two.run(check_norm)
