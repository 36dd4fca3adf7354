"""Contradictory schedules are refused on real ranks; decomposed linear layers with sharding; the split loss."""

import numeric
import pytest
import torch
from ranks import mesh
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule
from redline.schedule.comparison import unit_roundoff
from torch import nn

# Refusals


def check_refusals(make, model):
    axis = mesh(tp=2)

    def refused(sch, reason, call):
        steps, tensors = (
            list(sch.tree.steps),
            {k: (id(v), v.shape) for k, v in sch.module.state_dict().items()},
        )
        drawn, hooks = (
            str(sch),
            [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in sch.module.modules()],
        )
        counts = [{k: v for k, v in vars(m).items() if isinstance(v, int)} for m in sch.module.modules()]
        held = list(sch.module.parameters())
        with pytest.raises(ScheduleError, match=reason):
            call(sch)
        assert steps == sch.tree.steps and drawn == str(sch)
        assert all(a is b for a, b in zip(held, sch.module.parameters()))
        assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in sch.module.modules()]
        assert counts == [{k: v for k, v in vars(m).items() if isinstance(v, int)} for m in sch.module.modules()]
        assert {k: v.shape for k, v in sch.module.state_dict().items()} == {k: s for k, (_, s) in tensors.items()}

    sch = create_schedule(make(width=8, hidden=15), axis)
    refused(sch, "2 ranks must divide the size 15 of dimension 0", lambda s: s["fc1"].shard("weight", 0))
    refused(sch, "must divide the size 15, but got parts=2", lambda s: s["fc1"].shard("weight", 0, parts=2))
    refused(sch, r"add up to the size 15, but got \(8, 8\)", lambda s: s["fc1"].shard("weight", 0, parts=(8, 8)))
    refused(sch, "part of size 7", lambda s: s["fc1"].shard("weight", 0, parts=(8, 7)))
    refused(sch, r"dimension of its shape \(15, 8\), but got 2", lambda s: s["fc1"].shard("weight", 2))
    refused(sch, "did you mean 'weight'", lambda s: s["fc1"].shard("wight", 0))
    refused(sch, "2 ranks must divide", lambda s: s["fc1"].shard(["bias", "weight"], 0))
    refused(sch, "names must differ", lambda s: s["fc2"].shard(["weight", "weight"], 0))

    sch = create_schedule(make(), axis)
    refused(
        sch,
        "all_reduce adds up partial results of ranks",
        lambda s: s["fc1"].sync("fwd_post", "all_reduce"),
    )
    refused(sch, "cut along the output", lambda s: s["fc1"].parallel_loss())
    sch["fc1"].shard(["weight", "bias"], axis=0)
    refused(sch, "sharded already, along dimension 0", lambda s: s["fc1"].shard("weight", 1))
    refused(sch, "other features; use all_gather", lambda s: s["fc1"].sync("fwd_post", "all_reduce"))
    refused(sch, "before it is sharded", lambda s: s["fc1"].replace(nn.Linear(8, 16)))
    sch["fc2"].shard("weight", axis=1)
    refused(sch, "partial sum; use all_reduce", lambda s: s["fc2"].sync("fwd_post", "all_gather", axis=-1))
    refused(sch, "own piece; all_reduce would mix", lambda s: s["fc2"].sync("bwd_post", "all_reduce"))
    refused(sch, "did you mean 'fwd_post'", lambda s: s["fc2"].sync("fwd_pst", "all_reduce"))
    refused(sch, "did you mean 'all_reduce'", lambda s: s["fc2"].sync("fwd_post", "allreduce"))
    refused(sch, "pass axis=", lambda s: s["fc2"].sync("fwd_post", "reduce_scatter"))
    refused(sch, "goes with 'bwd_post'", lambda s: s["fc2"].sync("fwd_post", "all_reduce", on="parameters"))
    refused(sch, "'fc2' returns partial sums .* nothing adds them up", build)

    sch = create_schedule(make(), axis)
    sch["fc1"].shard("weight", axis=0)
    refused(sch, "its bias must be too", build)

    sch = create_schedule(model("gpt2"), axis)
    refused(sch, "tied to lm_head.weight; pass tied=True", lambda s: s["transformer.wte"].shard("weight", 0))
    sch = create_schedule(model("llama"), mesh(dp=2, tp=1))
    assert sch["lm_head"].shard("weight", axis=0).module.weight.shape == (96, 32)

    sch = create_schedule(make())
    refused(sch, "axis named tp, but there is no mesh", lambda s: s["fc1"].shard("weight", 0))
    refused(sch, "axis named tp", lambda s: s["fc1"].fork_rng())
    refused(
        create_schedule(make(), mesh(dp=2)),
        "there is axes dp",
        lambda s: s["fc1"].sync("fwd_pre", "all_reduce"),
    )
    with pytest.raises(ScheduleError, match="out of pp, dp, tp, but they are: model"):
        create_schedule(make(), mesh(model=2))


def test_contradictions_are_refused_and_change_nothing(two, make_transformer, mlp):
    two.run(check_refusals, type(mlp), make_transformer)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.third.weight = self.second.weight

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def check_tied_stage():
    sch = create_schedule(Tied(), mesh(pp=2, dp=1))
    sch["first"].cut_pipeline_stage()
    sch.shard_data(zero=2)
    with pytest.raises(ScheduleError, match=r"one stage has tied weights, second\.weight and third\.weight"):
        build(sch, loss=nn.functional.mse_loss)


def test_tied_weights_within_a_stage_are_not_sharded_separately(two):
    two.run(check_tied_stage)


def check_heads(make):
    sch = create_schedule(make("llama"), mesh(tp=4))
    with pytest.raises(ScheduleError, match=r"4 ranks must divide the 2 heads of 'model.layers.0.self_attn'"):
        sch["model.layers.0.self_attn.k_proj"].shard("weight", axis=0)
    assert sch["model.layers.0.self_attn.k_proj"].module.out_features == 16


def test_heads_are_never_split(four, make_transformer):
    four.run(check_heads, make_transformer)


# The loss


def check_loss(seed):
    from redline.schedule.parallel.collectives import axis_of
    from redline.schedule.parallel.vocabulary import SplitLogits

    axis = axis_of(mesh(tp=2), "tp")
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 30
    # One rounding to float32. A loss changes by at most 2 times a change of its logits, its gradient by at most 1 time.
    rounded = unit_roundoff(torch.float32) * float(logits.abs().max())
    target = torch.tensor([0, 4, 5, 9, -100, 3])
    for further in ({}, {"label_smoothing": 0.1}, {"weight": torch.linspace(0.1, 1, 10, dtype=torch.float64)}):
        for reduction in ("mean", "sum", "none"):
            full = logits.clone().requires_grad_()
            piece = logits.chunk(2, -1)[axis.rank].clone().requires_grad_()
            options = {"reduction": reduction, **further}
            expected = nn.functional.cross_entropy(full, target, **options)
            split = SplitLogits.of(piece * 1, axis).float().double().view(-1, 10)
            found = nn.CrossEntropyLoss(**options)(split, target)
            assert type(found) is torch.Tensor
            rows = 6 if reduction == "sum" else 1
            numeric.within((found - expected).abs().max(), 2 * rows * rounded, f"the loss, {reduction}")
            weight = torch.arange(1.0, 7) if reduction == "none" else 1.0
            (expected * weight).sum().backward()
            (found * weight).sum().backward()
            departs = (piece.grad - full.grad.chunk(2, -1)[axis.rank]).abs().max()
            most = 6 if reduction == "none" else 1
            numeric.within(departs, most * rounded, f"its gradient, {reduction}")
    full, piece = logits.clone().requires_grad_(), logits.chunk(2, -1)[axis.rank].clone().requires_grad_()
    split = SplitLogits.of(piece * 1, axis)
    assert torch.equal(split.argmax(-1), logits.argmax(-1)), "of all classes"
    assert torch.equal(split.topk(3).values, logits.topk(3).values)
    for function in OVER_CLASSES:
        full.grad = piece.grad = None
        expected, found = function(full), function(SplitLogits.of(piece * 1, axis))
        torch.testing.assert_close(found, expected)
        assert type(found) is torch.Tensor
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(piece.grad, full.grad.chunk(2, -1)[axis.rank])


OVER_CLASSES = [
    lambda logits: torch.logsumexp(input=logits, dim=-1),
    lambda logits: logits.square().mean(),
    lambda logits: logits.mean(-1),
    lambda logits: (logits * logits.exp()).sum(-1),
    lambda logits: logits.std(-1) + logits.norm(dim=-1) + logits.amin(-1) + logits.min(-1).values,
    lambda logits: torch.cumsum(logits, -1),
    lambda logits: logits @ torch.ones(10, 2, dtype=logits.dtype),
    lambda logits: torch.einsum("tv,tv->t", [logits, 2 * logits]),
    lambda logits: nn.functional.linear(logits, torch.ones(3, 10, dtype=logits.dtype)),
    lambda logits: nn.functional.mse_loss(logits, 3 * logits),
    lambda logits: nn.functional.normalize(logits, dim=-1),
]
"""Functions in which every class takes part."""


def test_the_loss_of_split_logits_is_that_of_the_whole(two, seed):
    two.run(check_loss, seed)
