"""The comparison of two models: departures, their names, and the rounding that each kind is allowed."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numeric
import pytest
import torch
from numerics_table import adamw_allowance
from redline.schedule.comparison import (
    DEVIATIONS,
    FLOOR,
    Numbers,
    Tolerance,
    allowance,
    compare,
    departure,
    largest,
    scale,
    unit_roundoff,
)
from redline.schedule.random_state import quiet
from torch import nn

LIMIT = 1e-5
TENSORS = Tolerance.of_tensors(LIMIT)
PLAIN = Numbers(
    outputs={"output 0": torch.tensor([1.0, -4.0])},
    loss=2.0,
    gradients={"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1e-9]), "c": None},
    weights={"a": torch.tensor([5.0, 6.0])},
)


def norms(*values, on=" on the probe"):
    return Numbers(gradients=dict(zip("abc", map(torch.tensor, values))), vectors=("b",), on=on)


def summaries(u=2.0**-8, **values):
    side = SimpleNamespace(roundoff=u, loss_roundoff=u, depth=4)
    return Tolerance.of_summaries(side, side, **{"size": 3.0, **values})


def test_the_same_departs_nowhere_and_every_kind_is_looked_at():
    found = compare(PLAIN, PLAIN, TENSORS)
    assert found.holds and found.wrong is None
    assert [each.by for each in found.departures] == [0.0] * 6
    assert [len(found.of(kind)) for kind in ("outputs", "loss", "gradients", "weights")] == [1, 1, 3, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": {"output 0": torch.tensor([1.0, -4.1])}}, "output 0 departs by 0.025"),
        ({"outputs": {"output 0": torch.tensor([1.0])}}, "output 0 has shape (1,), not (2,)"),
        ({"outputs": {**PLAIN.outputs, "output 1": torch.ones(1)}}, "outputs number 2, not 1"),
        ({"loss": 2.1}, "the loss departs by 0.05"),
        ({"loss": math.nan}, "the loss departs by inf"),
        ({"gradients": {**PLAIN.gradients, "a": None}}, "the gradient of a is missing"),
        ({"gradients": {**PLAIN.gradients, "c": torch.ones(1)}}, "the gradient of c was not there before"),
        ({"gradients": {**PLAIN.gradients, "a": torch.tensor([1.0, math.inf])}}, "the gradient of a departs by inf"),
        ({"weights": {"a": torch.tensor([5.0, 6.006])}}, "a after the optimizer's steps departs by 0.001"),
        ({"still": ("a", "b")}, "the first step leaves a and 1 more as it was, in spite of a gradient"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_departures_are_named(change, message):
    assert compare(PLAIN, replace(PLAIN, **change), TENSORS).wrong.description == message


def test_the_largest_departure_of_the_first_failing_kind_is_named():
    def named(**departs):
        expected = Numbers(loss=1.0, gradients={name: torch.tensor([1.0]) for name in departs})
        found = {name: torch.tensor([1.0 + by]) for name, by in departs.items()}
        return compare(expected, replace(expected, gradients=found), TENSORS).wrong.description

    assert named(a=0.1, b=0.5).startswith("the gradient of b")
    assert named(a=0.49, b=0.5).startswith("the gradient of a")
    assert named(a=0.97 * LIMIT, b=1.03 * LIMIT).startswith("the gradient of b")  # the other difference is rounding
    everything = replace(PLAIN, loss=3.0, weights={"a": torch.zeros(2)})
    assert compare(PLAIN, everything, TENSORS).wrong.kind == "loss"


def test_a_tensor_that_is_nothing_but_rounding_is_held_to_the_largest_of_its_kind():
    tiny = replace(PLAIN, gradients={**PLAIN.gradients, "b": torch.tensor([9e-9])})
    assert compare(PLAIN, tiny, TENSORS).holds
    zeros = replace(PLAIN, gradients={**PLAIN.gradients, "c": torch.zeros(1)})
    assert compare(PLAIN, zeros, TENSORS).holds
    grown = replace(PLAIN, gradients={**PLAIN.gradients, "b": torch.tensor([1e-5])})
    assert compare(PLAIN, grown, TENSORS).wrong.description.startswith("the gradient of b")


def test_norms_may_depart_by_format_and_depth_of_both_sides():
    tolerance = summaries()
    error = 2 * 2.0**-8 * math.sqrt(4)
    assert tolerance.gradients == 2.0 * error + 2 * FLOOR and tolerance.vectors == 6.0 * error + 2 * FLOOR
    expected = norms(1.0, 1.0, 2.0)
    assert compare(expected, norms(1.0, 1.09, 2.0), tolerance).holds  # the norm of vectors
    wrong = compare(expected, norms(1.09, 1.0, 2.0), tolerance).wrong
    assert wrong.description == "a on the probe is 1.09, the reference's 1 (tolerance 0.031)"


def test_a_loss_may_depart_by_a_part_of_the_size_of_the_logits_it_is_made_of():
    expected = Numbers(loss=2.0, on=" on the probe")
    allowed = 0.2 * 2 * 2.0**-8 * math.sqrt(4) * 3.0 + 2.0 * (4.0 * 2 * 2.0**-8 + 2 * FLOOR)
    for times, holds in ((0.99, True), (1.01, False)):
        assert compare(expected, replace(expected, loss=2.0 + times * allowed), summaries()).holds == holds


def test_dropout_widens_a_step_and_neither_way_beyond_its_factor():
    tolerance = summaries(noise=0.4, samples=4)
    assert tolerance.ratio == math.exp(0.8)
    expected = norms(1.0, 1.0, 2.0)
    for value, holds in ((2.2, True), (0.45, True), (2.3, False), (0.4, False)):
        assert compare(expected, norms(value, 1.0, 2.0), tolerance).holds == holds


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(4)
        self.memory = nn.LSTM(4, 4, num_layers=2, dropout=0.2)
        self.attention_dropout, self.threshold = 0.1, 0.5


@pytest.mark.parametrize("training", [True, False])
def test_a_quiet_model_drops_nothing_and_is_restored(training):
    model = Recurrent()
    model.norm.eval()
    with pytest.raises(ZeroDivisionError), quiet(model, training=training):
        assert (model.drop.p, model.memory.dropout, model.attention_dropout, model.threshold) == (0, 0, 0, 0.5)
        assert model.training == model.norm.training == training and model.memory.training
        raise ZeroDivisionError
    assert (model.drop.p, model.memory.dropout, model.attention_dropout) == (0.3, 0.2, 0.1)
    assert model.training and model.memory.training and not model.norm.training


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("terms", [64, 4096])
def test_a_sum_in_the_worst_order_stays_within_the_rule(seed, terms):
    """Terms are added one by one, the worst order; libraries add blocks."""
    products = randn(256, terms, seed=seed) * randn(256, terms, seed=seed + 1000)
    exact = products.double().sum(1)
    found = torch.zeros(256)
    for each in products.unbind(1):
        found = found + each
    allowed = DEVIATIONS * math.sqrt(terms) * unit_roundoff(torch.float32)
    numeric.within(departure(exact, found), allowed, "a sum")


def test_depth_and_width_add_up_as_independent_errors_do():
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    one, four = allowance(model[:1], rows=1), allowance(model, rows=1)
    assert four == pytest.approx(2 * one, rel=1e-2)
    wide = allowance(nn.Sequential(nn.Linear(256, 256, bias=False)), rows=1)
    assert wide == pytest.approx(2 * one, rel=1e-2)
    assert allowance(model, rows=4096) > four


def test_a_departure_is_relative_to_the_largest_magnitude_and_never_to_almost_nothing():
    expected = torch.tensor([1.0, -4.0])
    assert departure(expected, torch.tensor([1.0, -5.0])) == 0.25
    over = largest({"a": expected, "b": None})
    assert departure(torch.tensor([1e-9]), torch.tensor([3e-9]), over) < 1e-7
    assert over == 4 and scale(torch.zeros(2), over) == 0.04
    assert departure(expected, torch.tensor([1.0, math.nan])) == math.inf
    assert departure(torch.empty(0), torch.empty(0)) == 0


def stepped(gradients, eps, lr=1e-3):
    weight = nn.Parameter(torch.ones(gradients.shape[1], dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=lr, eps=eps)
    for weight.grad in gradients.unbind():
        optimizer.step()
    return weight.detach()


def test_adamw_carries_a_gradient_s_departure_into_a_weight_as_the_rule_says(seed):
    """Gradients of all magnitudes, down to almost zero, depart by the tolerance."""
    error, wide = 1e-6, torch.float64
    gradients = randn(3, 1000, seed=seed, dtype=wide) * torch.logspace(-9, -1, 1000, dtype=wide)
    other = gradients + error * randn(3, 1000, seed=seed + 1000, dtype=wide).sign()
    departs = (stepped(gradients, 1e-2) - stepped(other, 1e-2)).abs().max()
    allowed = adamw_allowance(error, torch.ones(1), lr=1e-3, eps=1e-2, steps=3)
    numeric.within(departs, allowed, "a weight")
    assert departs > 0.05 * allowed
    # With the usual epsilon they reverse whole steps in any format, so no check is possible.
    assert (stepped(gradients, 1e-8) - stepped(other, 1e-8)).abs().max() > 1e-3
