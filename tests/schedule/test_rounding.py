"""Rounding errors stay within the tolerances of schedule/rounding.py, which are not much larger."""

import math

import numeric
import pytest
import torch
from redline.schedule.rounding import (
    DEVIATIONS,
    adamw_allowance,
    allowance,
    departure,
    largest,
    loss_allowance,
    scale,
    unit_roundoff,
)
from torch import nn


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_formats_round_as_they_are_defined():
    assert unit_roundoff(torch.float64) == 2**-53 and unit_roundoff(torch.float32) == 2**-24
    assert unit_roundoff(torch.float16) == 2**-11 and unit_roundoff(torch.bfloat16) == 2**-8


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


def test_a_part_in_a_narrower_format_rounds_as_that_does():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    part = allowance(model, 8, {"2": torch.bfloat16})
    assert part == pytest.approx(DEVIATIONS * 2 * 2**-8, rel=1e-3)
    half = allowance(model, 8, {"": torch.float16})
    assert allowance(model, 8, dtype=torch.bfloat16) > half > allowance(model, 8)
    assert loss_allowance(part, 16) == pytest.approx(part / 4, rel=1e-3)


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
