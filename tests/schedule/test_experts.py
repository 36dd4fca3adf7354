"""Experts spread over ranks: the results equal one process's, however unevenly rows are routed."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from ranks import mesh
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule
from redline.schedule.parallel import experts as parallel
from redline.schedule.parallel.collectives import PlannedMesh
from redline.schedule.parallel.experts import (
    counted_rows,
    dropped_rows,
    expect_unequal_tokens,
)
from redline.schedule.parallel.sharding import full_state_dict
from torch import nn
from torch.nn import functional as F

EXPERTS, WIDTH, TOKENS = 4, 8, 12


class Experts(nn.Module):
    """Experts as in transformers' mixtures, with biases; an expert without rows adds nothing."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up_proj = nn.Parameter(0.3 * torch.randn(EXPERTS, 2 * WIDTH, WIDTH))
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH))
        self.down_proj = nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH, 2 * WIDTH))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == expert)
            inner = F.gelu(F.linear(hidden_states[token], self.up_proj[expert], self.up_bias[expert]))
            out.index_add_(0, token, F.linear(inner, self.down_proj[expert]) * top_k_weights[token, place, None])
        return out


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()

    def forward(self, x, chosen):
        weights = self.gate(x).softmax(-1).gather(1, chosen)
        return x + self.experts(x, chosen, weights)


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([Mixture(), Mixture()])

    def forward(self, x, chosen):
        for each in self.blocks:
            x = each(x, chosen)
        return x


def spread(model, ep, **shared):
    replicas = mesh(dp=dist.get_world_size())
    made, _ = build(create_schedule(model, replicas).shard_experts(ep).shard_data(**shared))
    return made


ROUTES = {
    "evenly": lambda token, choice: (token + choice) % EXPERTS,
    "to experts of one rank": lambda token, choice: choice,
    "to the last expert alone, twice": lambda token, choice: EXPERTS - 1,
    "of each rank to its own experts": lambda token, choice: 2 * (token >= TOKENS // 2) + choice,
}


def departure(route, zero, ep=2):
    """Largest departure of ranks with some tokens each from one process with all, in outputs and gradients."""
    torch.set_default_dtype(torch.float64)
    try:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        tokens = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
        chosen = torch.tensor([[ROUTES[route](token, choice) for choice in range(2)] for token in range(TOKENS)])
        whole = Model()
        expected = whole(tokens, chosen)
        expected.square().mean().backward()
        model = spread(Model(), ep, zero=zero)
        mine = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
        with counted_rows(model) as rows:
            found = model(tokens[mine], chosen[mine])
        sent = torch.stack(list(rows.values())).sum(0)
        dist.all_reduce(sent)
        assert sent.tolist() == (2 * torch.bincount(chosen.view(-1), minlength=EXPERTS)).tolist()
        found.square().mean().backward()
        worst = [(found - expected[mine]).abs().max()]
        if zero == 3:
            # Weights after an update are compared, as gradients are sharded.
            for each in (whole, model):
                torch.optim.SGD(each.parameters(), lr=1.0).step()
            state = full_state_dict(model)
            worst += [(state[name] - value).abs().max() for name, value in whole.state_dict().items()]
            return float(torch.stack(worst).max())
        from redline.schedule.parallel.replicas import whole_gradient

        for name, param in whole.named_parameters():
            worst.append((whole_gradient(model, name, model.get_parameter(name)) - param.grad).abs().max())
        return float(torch.stack(worst).max())
    finally:
        torch.set_default_dtype(torch.float32)


CASES = [("two", 0), ("two", 3), *(pytest.param("four", zero, marks=pytest.mark.slow) for zero in (0, 1, 3))]


@pytest.mark.parametrize(("ranks", "zero"), CASES)
@pytest.mark.parametrize("route", ROUTES)
def test_ranks_compute_the_same_as_one_process(request, route, ranks, zero):
    """Two of four ranks have the same experts."""
    for found in request.getfixturevalue(ranks).run(departure, route, zero):
        assert found < 1e-12


def limited(model, chosen, factor):
    """Reference for dropped rows: only the largest weights of each expert are kept, the others are set to 0."""
    most = math.ceil(factor * chosen.numel() / EXPERTS)
    dropped = []

    def drop(module, args):
        tokens, index, weights = args
        keep = torch.zeros_like(weights)
        for expert in range(EXPERTS):
            rows = [(float(weights[t, k].detach()), -t, -k) for t, k in torch.nonzero(index == expert).tolist()]
            for _, t, k in sorted(rows, reverse=True)[:most]:
                keep[-t, -k] = 1
        dropped.append(int((keep == 0).sum()))
        return tokens, index, weights * keep

    for each in model.blocks:
        each.experts.register_forward_pre_hook(drop)
    return model, dropped


def departure_with_capacity(route, factor, ep, zero=0, faulty=False, uneven=False):
    """Like `departure`, for experts with a capacity for each rank's tokens. Also returns dropped rows.

    With `uneven`, the first rank has 2 tokens more than its share, and the last one 2 less."""
    torch.set_default_dtype(torch.float64)
    sort = torch.Tensor.argsort
    try:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        tokens = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
        chosen = torch.tensor([[ROUTES[route](token, choice) for choice in range(2)] for token in range(TOKENS)])
        whole, parts = Model(), []
        ends = [each * TOKENS // ranks + (2 if uneven and 0 < each < ranks else 0) for each in range(ranks + 1)]
        for each in range(ranks):
            mine = slice(ends[each], ends[each + 1])
            copy, dropped = limited(Model(), chosen[mine], factor)
            copy.load_state_dict(whole.state_dict())
            expected = copy(tokens[mine], chosen[mine])
            expected.square().mean().backward()
            parts.append((mine, expected, dropped, copy))
        sch = create_schedule(Model(), *([mesh(dp=ranks)] if ranks > 1 else []))
        sch = (sch.shard_experts(ep) if ep > 1 else sch).limit_experts(factor)
        model, _ = build(sch.shard_data(zero=zero) if ranks > 1 else sch)
        if uneven:
            expect_unequal_tokens(model)
        mine, expected, dropped, _ = parts[rank]
        if faulty:  # keeps an expert's first rows instead of those with the largest weights
            torch.Tensor.argsort = lambda each, **given: (
                torch.arange(len(each)) if each.is_floating_point() else sort(each, **given)
            )
        found = model(tokens[mine], chosen[mine])
        found.square().mean().backward()
        worst = [(found - expected).detach().abs().max()]
        assert dropped_rows(model) == (sum(dropped), 2 * chosen[mine].numel())
        from redline.schedule.parallel.replicas import whole_gradient

        for name, param in model.named_parameters():
            mean = sum(copy.get_parameter(name).grad for _, _, _, copy in parts) / ranks
            gradient = param.grad if ranks == 1 else whole_gradient(model, name, param)
            worst.append((gradient - mean).abs().max())
        return float(torch.stack(worst).max()), sum(dropped)
    finally:
        torch.Tensor.argsort = sort
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3, 3])
@pytest.mark.parametrize("route", ROUTES)
def test_experts_keep_the_rows_with_the_largest_weights_up_to_their_capacity(route, factor):
    found, dropped = departure_with_capacity(route, factor, 1)
    assert found < 1e-12
    fullest = {"to experts of one rank": 2, "to the last expert alone, twice": 4}.get(route, 1)
    assert (dropped > 0) == (factor < fullest)


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("route", ROUTES)
def test_ranks_that_share_experts_drop_the_same_rows_as_ranks_that_have_all(two, route, ep):
    for found, dropped in two.run(departure_with_capacity, route, 0.8, ep, 1):
        assert found < 1e-12 and dropped > 0


def exchanges(factor, training):
    """Counts the exchanges of a forward and backward pass of two mixtures. Returns the sizes that a rank sends."""
    seen, send = [], parallel.all_to_all_rows

    def counted(tensor, sent, received, axis):
        seen.append((sent, received))
        return send(tensor, sent, received, axis)

    parallel.all_to_all_rows = counted
    try:
        sch = create_schedule(Model(), mesh(dp=2)).shard_experts(2)
        model, _ = build((sch.limit_experts(factor) if factor else sch).shard_data())
        chosen = torch.full((TOKENS, 2), EXPERTS - 1)
        out = model.train(training)(torch.randn(TOKENS, WIDTH, requires_grad=True), chosen)
        out.sum().backward()
        return seen, dropped_rows(model)
    finally:
        parallel.all_to_all_rows = send


def test_with_a_capacity_all_sizes_are_equal_and_none_is_asked_for(two):
    for sent, dropped in two.run(exchanges, 1.0, True):
        # Each mixture sends there and back in both passes; C = 24 rows / 4 experts, and a rank has two experts.
        assert sent == [([12, 12], [12, 12])] * 8
        assert dropped == (2 * (24 - 6), 2 * 24)
    for sent, dropped in two.run(exchanges, None, True):
        assert len(sent) == 10 and dropped is None


def departure_of_whole(route, ep, averaged=True):
    """Largest departure from one process of ranks that share layers, each with whole experts for some of the tokens."""
    torch.set_default_dtype(torch.float64)
    try:
        tokens = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
        chosen = torch.tensor([[ROUTES[route](token, choice) for choice in range(2)] for token in range(TOKENS)])
        whole = Model()
        expected = whole(tokens, chosen)
        expected.square().mean().backward()
        sch = create_schedule(Model(), mesh(tp=2)).shard_experts(ep, whole=True)
        model, _ = build(sch.shard_data() if ep == 1 and averaged else sch)
        with counted_rows(model) as rows:
            found = model(tokens, chosen)
        assert all(int(each.sum()) == TOKENS for each in rows.values()), "half of the rows"
        found.square().mean().backward()
        worst = [(found - expected).detach().abs().max()]
        from redline.schedule.parallel.replicas import whole_gradient

        for name, param in whole.named_parameters():
            worst.append((whole_gradient(model, name, model.get_parameter(name)) - param.grad).abs().max())
        return float(torch.stack(worst).max())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("route", ROUTES)
def test_ranks_that_share_layers_divide_the_tokens_of_whole_experts(two, route, ep):
    for found in two.run(departure_of_whole, route, ep):
        assert found < 1e-12


def indivisible():
    model, _ = build(create_schedule(Model(), mesh(tp=2)).shard_experts(2, whole=True))
    with pytest.raises(
        ScheduleError, match="2 ranks share the tokens of unsharded experts, so they must divide 3 tokens"
    ):
        model(torch.randn(3, WIDTH), torch.zeros(3, 2, dtype=torch.long))
    return True


def test_tokens_that_ranks_cannot_divide_are_refused(two):
    assert two.run(indivisible) == [True, True]


def planned(model=None, ranks=2, **more):
    return create_schedule(model or Model(), PlannedMesh(dp=ranks, **more))


def planned_cut():
    sch = planned(tp=2)
    sch["blocks.0.experts"].shard("up_proj", axis=1)
    return sch.shard_experts(2, whole=True)


def planned_shared():
    sch = planned(tp=2)
    sch["blocks.0"].share_samples(1)
    return sch


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: planned()["blocks.0"].shard_experts(2), "call it on the root's schedule"),
        (lambda: planned().shard_experts(1), "ep must be a whole number of at least 2, but is 1"),
        (lambda: planned().shard_experts(True), "ep must be a whole number of at least 2, but is True"),
        (lambda: planned(ranks=3).shard_experts(3), "3 ranks must divide the 4 experts of 'blocks.0.experts'"),
        (lambda: planned(ranks=3).shard_experts(2), "2 must divide the ranks of the mesh's dp axis, but it has 3"),
        (lambda: planned(nn.Sequential(nn.Linear(4, 4))).shard_experts(2), "ep: the model has no experts"),
        (lambda: create_schedule(Model()).shard_experts(2), "but there is none"),
        (lambda: planned().shard_experts(2).shard_experts(2), "experts are spread once, and they already are"),
        (lambda: planned().shard_data().shard_experts(2), "call it before shard_data"),
        (lambda: planned(ranks=4).shard_experts(2).shard_data(3, hsdp=2), "so hsdp must be 1"),
        (lambda: planned().shard_experts(2, whole=True), "whole beside the mesh's tp axis, but there is none"),
        (lambda: planned(tp=2).shard_experts(0, whole=True), "ep must be a whole number of at least 1, but is 0"),
        (lambda: planned(ranks=1, tp=3).shard_experts(2, whole=True), "ep must divide the 3 ranks of the tp axis, or"),
        (lambda: planned(ranks=1, tp=2).shard_experts(4, whole=True), "divides the 2 ranks of the tp and dp axes"),
        (planned_cut, "the experts of 'blocks.0.experts' are cut over the tp axis already"),
        (lambda: planned_shared().shard_experts(2, whole=True), "but share_samples divides these"),
        (
            lambda: planned(tp=2).shard_experts(2)["blocks.0"].share_samples(1),
            "call it before shard, sync and shard_experts",
        ),
        (lambda: planned().limit_experts(0), "capacity_factor must be a number above 0, but is 0"),
        (lambda: planned().limit_experts(True), "capacity_factor must be a number above 0, but is True"),
        (lambda: planned().limit_experts(1).limit_experts(2), "experts have one capacity, and they have one already"),
        (lambda: planned(nn.Sequential(nn.Linear(4, 4))).limit_experts(1), "it has no experts whose rows could be"),
    ],
    ids=range(21),
)
def test_invalid_expert_parallelism_is_refused_and_changes_nothing(call, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        call()
