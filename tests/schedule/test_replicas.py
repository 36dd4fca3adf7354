"""Replicas average their gradients once a step, in buckets, during the backward pass."""

import copy

import numeric
import numerics_table as numerics
import pytest
import torch
import torch.distributed as dist
from ranks import mesh
from redline.schedule import build, create_schedule
from redline.schedule.comparison import allowance, unit_roundoff
from torch import nn


class Tower(nn.Module):
    """Layers, some of which the forward pass can omit."""

    def __init__(self, layers=4, width=8, bias=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias) for _ in range(layers))

    def forward(self, x, without=()):
        for number, layer in enumerate(self.layers):
            if number not in without:
                x = torch.tanh(layer(x))
        return x


def data(seed=0, size=4, width=8):
    """The whole batch, and this rank's half of it."""
    whole = torch.randn(2 * size, width, generator=torch.Generator().manual_seed(seed))
    return whole, whole.chunk(2)[dist.get_rank()]


def replicated(model, zero=0, make=torch.optim.AdamW, **options):
    sch = create_schedule(model, mesh(dp=2))
    sch.shard_data(zero, **options)
    return build(sch, optimizer=make, device="cpu")


def tower(**sizes):
    torch.manual_seed(0)
    return Tower(**sizes)


class Exchanges:
    """Counts collectives and records the progress of the backward pass when each starts."""

    def __init__(self, patch, *names):
        self.calls = []
        for name in names:
            patch.setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name, function):
        def call(tensor, *args, **kwargs):
            self.calls.append((name, tensor.numel(), tensor.dtype))
            return function(tensor, *args, **kwargs)

        return call


def check_buckets(zero):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redline.schedule.parallel.replicas.BUCKET_BYTES", 2 * (8 * 8 + 8) * 4)
        model, optimizer = replicated(tower(), zero)
        made = Exchanges(patch, "all_reduce", "reduce", "broadcast")
        model.replicas.passes = 3
        started = []
        first = model.layers[0].weight
        first.register_hook(lambda grad: started.append(len(made.calls)))
        for seed in range(3):
            model(data(seed)[1]).sum().backward()
            assert bool(made.calls) == (seed == 2)  # only the last pass of a step sends
        sent = [size for _, size, _ in made.calls]
        held = sum(each.grad is not None for each in model.parameters())
        optimizer.step()
        return sent, started[-1], held, [name for name, *_ in made.calls], optimizer.state


def test_gradients_travel_in_buckets_once_a_step_while_the_backward_pass_runs(two):
    for sent, started, held, names, _ in two.run(check_buckets, 0):
        # A bucket has two layers, followed by one number per parameter.
        assert sent == [2 * 72 + 4, 2 * 72 + 4] and names == ["all_reduce"] * 2
        assert started == 1  # the last two layers' bucket, before the first layer's gradient exists
        assert held == 8


def aligned(zero):
    """Returns True if the weights and gradients of odd sizes begin at multiples of 16 bytes, and are those of one process."""
    model, _ = replicated(tower(width=7), zero)
    plain = tower(width=7)
    whole, mine = data(width=7)
    model(mine).mean().backward()
    plain(whole).mean().backward()
    for found, expected in zip(model.parameters(), plain.parameters()):
        assert torch.equal(found, expected)
        if found.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad)
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return bool(grads) and all(each.data_ptr() % 16 == 0 for each in (*model.parameters(), *grads))


@pytest.mark.parametrize("zero", [0, 1])
def test_weights_and_gradients_in_buckets_are_aligned(two, zero):
    assert two.run(aligned, zero) == [True, True]


def check_training(zero, seed, layers, without, bias):
    """Compares replicas in which rank r omits the layers `without[r]` with one process that does the same."""
    torch.manual_seed(seed)
    plain = Tower(layers, bias=bias)
    model, optimizer = replicated(copy.deepcopy(plain), zero, numerics.adamw)
    whole, mine = data(seed)
    before = copy.deepcopy(plain.state_dict())

    def of_replica(each, x, rank):
        return each(x, without[rank]).pow(2).mean()

    def passes():
        loss = of_replica(model, mine, dist.get_rank())
        loss.backward()
        both = [torch.empty_like(loss) for _ in range(2)]
        dist.all_gather(both, loss.detach())
        return sum(both) / 2

    def alone():
        loss = sum(of_replica(plain, x, rank) for rank, x in enumerate(whole.chunk(2))) / 2
        loss.backward()
        return loss

    allowed = allowance(plain, len(whole))
    expected = numeric.trained(plain, numerics.adamw(plain.parameters()), alone)
    found = numeric.trained(model, optimizer, passes)
    numeric.hold(numerics.compare(expected, found, allowed, len(whole)))
    unused = set.intersection(*map(set, without))
    return all(torch.equal(model.layers[at].weight, before[f"layers.{at}.weight"]) for at in unused)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("without", [[[3], [3]], [[2], []], [[0], [1, 3]]], ids=["none", "one", "others"])
def test_partly_used_gradients_are_averaged_and_unused_ones_left_alone(two, seed, zero, without):
    # With a gradient of zeros AdamW would shrink parameters that no replica uses.
    assert all(two.run(check_training, zero, seed, 4, without, True))


def check_format(seed):
    torch.manual_seed(seed)
    plain = Tower()
    with pytest.MonkeyPatch.context() as patch:
        model, _ = replicated(copy.deepcopy(plain), reduce_dtype=torch.bfloat16)
        made = Exchanges(patch, "all_reduce")
        whole, mine = data(seed)
        model(mine).mean().backward()
    plain(whole).mean().backward()
    expected = {name: each.grad for name, each in plain.named_parameters()}
    found = {name: each.grad for name, each in model.named_parameters()}
    # Each half and their sum are rounded.
    numeric.same(found, expected, 3 * unit_roundoff(torch.bfloat16))
    rounded = any(not torch.equal(expected[name], found[name]) for name in found)
    return {dtype for *_, dtype in made.calls}, {each.dtype for each in found.values()}, rounded


def test_gradients_can_travel_in_bfloat16_and_are_kept_in_float32(two, seed):
    for sent, kept, rounded in two.run(check_format, seed):
        assert sent == {torch.bfloat16} and kept == {torch.float32} and rounded
