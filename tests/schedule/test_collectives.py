"""Exchanges along other dimensions, exchanges in users' own modules, and the random streams of ranks."""

import pytest
import redline as rl
import torch
import torch.distributed as dist
from ranks import mesh
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule, verify
from torch import nn


def whole():
    return torch.arange(2 * 4 * 6, dtype=torch.float32).reshape(2, 4, 6)


def check_all_to_all():
    axis, rank = rl.collectives.axis(mesh(tp=2)), dist.get_rank()
    mine = whole().chunk(2, 1)[rank].clone().requires_grad_()  # a piece of the sequence
    out = rl.collectives.all_to_all(mine, dim=2, join=1, axis=axis)  # a piece of the features
    assert torch.equal(out, whole().chunk(2, 2)[rank])
    weight = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    (out * weight.chunk(2, 2)[rank]).sum().backward()
    assert torch.equal(mine.grad, weight.chunk(2, 1)[rank])
    assert torch.equal(rl.collectives.all_to_all(out, dim=1, join=2, axis=axis), mine)
    with pytest.raises(ScheduleError, match="2 ranks must divide dimension 2, but it is 3"):
        rl.collectives.all_to_all(torch.ones(2, 2, 3), dim=2, join=1, axis=axis)
    with pytest.raises(ScheduleError, match="unknown axis 'dp'"):
        rl.collectives.axis(mesh(tp=2), "dp")


def test_all_to_all_turns_sequences_into_features_and_gradients_back(two):
    two.run(check_all_to_all)


def check_gather():
    axis, rank = rl.collectives.axis(mesh(tp=2)), dist.get_rank()
    for gradient, factor in (("scatter", rank + 1.0), ("reduce_scatter", 3.0)):
        mine = whole().chunk(2, 1)[rank].clone().requires_grad_()
        out = rl.collectives.all_gather(mine, 1, axis, gradient)
        assert torch.equal(out, whole())
        (out * (rank + 1)).sum().backward()  # different work on each rank
        assert torch.equal(mine.grad, torch.full_like(mine, factor))
    for function, expected, slope in (
        (lambda x: rl.collectives.all_reduce(x, axis), whole() * 2, 1.0),
        (lambda x: rl.collectives.copy(x, axis), whole(), 2.0),
        (lambda x: rl.collectives.scatter(x, 1, axis), whole().chunk(2, 1)[rank], 1.0),
        (lambda x: rl.collectives.reduce_scatter(x, 1, axis), whole().chunk(2, 1)[rank] * 2, 1.0),
    ):
        x = whole().requires_grad_()
        out = function(x)
        out.sum().backward()
        assert torch.equal(out, expected) and torch.equal(x.grad, torch.full_like(x, slope))
    with pytest.raises(ScheduleError, match="did you mean 'scatter'"):
        rl.collectives.all_gather(whole(), 1, axis, "scater")


def test_collectives_of_ones_own_modules_pass_gradients(two):
    two.run(check_gather)


class Mixed(nn.Module):
    """Two parts that compute along different dimensions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.ReLU(), nn.Softmax(dim=1)

    def forward(self, x):
        return self.second(self.first(x))


def check_sync():
    x = whole().requires_grad_()
    sch = create_schedule(Mixed(), mesh(tp=2))
    with verify(sch, x):
        sch["first"].sync("fwd_pre", "scatter", axis=1)
        sch["first"].sync("fwd_post", "all_to_all", axis=2, join=1)
        sch["second"].sync("fwd_post", "all_gather", axis=2)
    for given, expected in (
        ({"op": "all_to_all", "axis": 1}, "join= is needed with all_to_all"),
        ({"op": "all_gather", "axis": 1, "join": 1}, "join= is needed with all_to_all"),
        ({"op": "scatter", "axis": 1, "gradient": "scatter"}, "gradient goes with all_gather"),
        ({"op": "all_gather", "axis": 1, "gradient": "sum"}, "unknown gradient 'sum'"),
    ):
        with pytest.raises(ScheduleError, match=expected):
            sch["second"].sync("fwd_post", **given)


def test_all_to_all_is_an_op_of_sync(two):
    two.run(check_sync)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.Tanh(), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.fc2(self.fc1(self.norm(x)))


def check_sequence():
    """Compares gradients when a gathered tensor enters a sharded layer, so that ranks compute different work."""
    torch.manual_seed(0)
    x = (whole() / 48).requires_grad_()
    for gradient in ("reduce_scatter", "scatter"):
        sch = create_schedule(Pair(), mesh(tp=2))

        def cut(sch=sch, gradient=gradient):
            sch["norm"].sync("fwd_pre", "scatter", axis=1)
            sch["norm"].sync("fwd_post", "all_gather", axis=1, gradient=gradient)
            sch["fc1"].shard(["weight", "bias"], axis=0)
            sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")

        def gradient_of(sch):
            inputs = x.detach().clone().requires_grad_()
            build(sch)[0](inputs).square().sum().backward()
            return inputs.grad

        plain = gradient_of(create_schedule(sch.copy().module))
        cut()
        found = gradient_of(sch)
        assert torch.allclose(found, plain, atol=1e-5) == (gradient == "reduce_scatter")


def test_gradients_of_gathered_inputs_for_different_work_are_summed(two):
    two.run(check_sequence)


def check_seeds():
    seeds = {}
    for name in ("tp", "dp", "pp"):
        seed = rl.seed_ranks(7, mesh(**{name: 2}))
        seeds[name] = (seed, float(torch.rand(())))
    return seeds


def test_ranks_of_a_tensor_parallel_group_draw_alike_and_others_do_not(two):
    one, other = two.run(check_seeds)
    assert one["tp"] == other["tp"] and one["dp"] != other["dp"] and one["pp"] != other["pp"]
    torch.manual_seed(rl.seed_ranks(7))
    assert one["tp"] == (7, float(torch.rand(())))


def columns_then_rows(sch):
    sch["fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def rows_of(sch, *names):
    """Sums these modules' gradients over ranks, as each rank has a part of the batch."""
    for name in names:
        sch[name].sync("bwd_post", "all_reduce", on="parameters")


def features_to_rows(sch):
    sch["fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["fc1"].sync("fwd_post", "all_to_all", axis=0, join=-1)
    rows_of(sch, "fc2")
    sch["fc2"].sync("fwd_post", "all_gather", axis=0)


def features_to_rows_and_back(sch):
    sch["fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["fc1"].sync("fwd_post", "all_to_all", axis=0, join=-1).sync("fwd_post", "all_to_all", axis=-1, join=0)
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def gathered_behind_each(sch):
    for name in ("fc1", "fc2"):
        sch[name].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        sch[name].sync("fwd_post", "all_gather", axis=-1)


def whole_to_features(sch):
    sch["fc1"].sync("fwd_post", "scatter", axis=-1)
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def whole_to_rows(sch):
    sch["fc1"].sync("fwd_post", "scatter", axis=0)
    rows_of(sch, "fc2")
    sch["fc2"].sync("fwd_post", "all_gather", axis=0)


def rows_throughout(sch):
    sch["fc1"].sync("fwd_pre", "scatter", axis=0)
    rows_of(sch, "fc1", "fc2")
    sch["fc2"].sync("fwd_post", "all_gather", axis=0)


def sum_of_ones_own(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def function_in_place_of_a_name(sch):
    sch["fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", sum_of_ones_own)
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def scattered_before_rows(sch):
    sch["fc2"].shard("weight", axis=1).sync("fwd_pre", "scatter", axis=-1).sync("fwd_post", "all_reduce")


SCHEMES = (
    lambda sch: None, function_in_place_of_a_name, scattered_before_rows, features_to_rows, features_to_rows_and_back,
    columns_then_rows, gathered_behind_each, whole_to_features, whole_to_rows, rows_throughout,
)  # fmt: skip


def check_schemes(seed):
    for scheme in SCHEMES:
        torch.manual_seed(seed)
        sch = create_schedule(Pair(), mesh(tp=2))
        with verify(sch, torch.randn(4, 6, 6)):
            scheme(sch)
    # Gradients of modules that see a part of the batch are partial, and nothing sums them here.
    torch.manual_seed(seed)
    wrong = create_schedule(Pair(), mesh(tp=2))
    with pytest.raises(ScheduleError, match="gradient of fc"), verify(wrong, torch.randn(4, 6, 6)):
        wrong["fc1"].sync("fwd_pre", "scatter", axis=0)
        wrong["fc2"].sync("fwd_post", "all_gather", axis=0)


def test_two_layers_are_computed_in_every_way_of_cutting_what_is_between_them(two, seed):
    two.run(check_schemes, seed)
