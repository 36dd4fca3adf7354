"""The comparison of two models: departures, their names, and the rounding tolerance of each kind."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from redline.schedule.compare import Numbers, compare
from redline.schedule.quiet import quiet
from redline.schedule.rounding import FLOOR, Tolerance, adamw_allowance
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


def test_tensors_of_other_ranks_are_not_compared():
    part = Numbers(gradients={"a": PLAIN.gradients["a"], "other": torch.ones(1)})
    found = compare(PLAIN, part, TENSORS)
    assert found.holds and len(found.departures) == 1


def test_a_weight_may_depart_by_what_the_optimizer_makes_of_its_gradients_departure():
    def adamw(gradient, weight):
        return adamw_allowance(gradient, weight, lr=1e-3, eps=1e-2, steps=1)

    tolerance = Tolerance.of_tensors(LIMIT, terms=4, weights=adamw)
    most = adamw(LIMIT * 2.0, PLAIN.weights["a"])
    for times, holds in ((0.5, True), (2.0, False)):
        stepped = replace(PLAIN, weights={"a": PLAIN.weights["a"].double() + times * most})
        assert compare(PLAIN, stepped, tolerance).holds == holds
    assert tolerance.loss == pytest.approx(LIMIT / 2, rel=0.1)


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
