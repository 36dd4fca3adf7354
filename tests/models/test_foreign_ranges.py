"""The handful of values that stand for a continuous range of another tool."""

import doctest

import pytest
from redline.models.foreign import ranges


def test_the_examples_of_ranges_hold():
    assert doctest.testmod(ranges).failed == 0 < doctest.testmod(ranges).attempted


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("low", "high"), [(1e-8, 1e-7), (100.0, 100.5), (3.0, 1e12), (0.1, 0.1000001)])
def test_values_of_a_range_are_apart_in_order_and_within(low, high, log):
    found = ranges.reals(low, high, log=log)
    assert found[0] == low and found[-1] == high and len(found) == 5
    assert found == sorted(set(found))


@pytest.mark.parametrize(("low", "high", "step"), [(1, 10**9, 1), (0, 17, 1), (5, 1000, 7), (16, 4096, 16)])
@pytest.mark.parametrize("log", [False, True])
def test_integers_of_a_range_are_on_its_steps(low, high, step, log):
    found = ranges.integers(low, high, step=step, log=log)
    assert found[0] == low and found[-1] == low + (high - low) // step * step
    assert all((each - low) % step == 0 for each in found) and found == sorted(set(found))
