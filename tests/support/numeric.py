"""Comparisons of numeric tests.

A numeric test takes the fixture `seed`, from which it makes weights and data. Tolerances are defined in one place,
`redline/schedule/comparison.py`, by number format, depth and optimizer. `make test-portable` runs the numeric tests with
many seeds and with the code paths that a maths library may take on other machines.
"""

from collections.abc import Mapping

import numerics_table as numerics
from redline.schedule import comparison
from redline.schedule.comparison import Comparison
from redline.schedule.parallel.replicas import whole_gradient

MARGIN = 3.0
"""A planted fault must exceed the tolerance by more than this factor."""
references: dict[tuple, numerics.Reference] = {}


def within(departure, allowed, what):
    """Asserts that a departure is within the tolerance of rounding."""
    assert departure <= allowed, f"{what} departs by {departure:.2g}; {allowed:.2g} is allowed"


def caught(departure, allowed, what):
    """Asserts that a planted fault departs by clearly more than the tolerance of rounding."""
    assert departure > MARGIN * allowed, f"{what} departs by {departure:.2g}; {allowed:.2g} is allowed"


def departure(workload, config, seed):
    """Returns `numerics.departure`; computes each reference once per process."""
    alone = numerics.for_one_process(config)
    key = (workload.id, seed, *alone.items())
    if key not in references:
        references[key] = numerics.reference(workload, seed, alone)
    return numerics.departure(workload, config, seed, references[key])


def hold(found: Comparison):
    """Asserts that a configuration trains as one process does."""
    assert found.of("weights")
    for each in (found.largest_of("loss"), found.largest_of("gradients"), found.largest_of("weights")):
        within(each.by, each.allowed, each.description)


def same(found, expected, allowed, what="the output"):
    """Asserts that tensors, or mappings of tensors, are equal up to rounding."""
    if not isinstance(expected, Mapping):
        found, expected = {what: found}, {what: expected}
    assert found.keys() <= expected.keys() and found
    over = comparison.largest(expected)
    for key, value in found.items():
        within(comparison.departure(expected[key], value, over), allowed, key)


def gradients(model):
    """Returns whole gradients by name, zero where there are none. All ranks must call it."""
    found = model.named_parameters(remove_duplicate=False)
    return {name: whole_gradient(model, name, param).clone() for name, param in found}


def trained(model, optimizer, passes):
    """Trains a model for as many steps of `numerics.adamw` as comparisons take. `passes()` runs a forward and a
    backward pass and returns the loss."""

    def update():
        optimizer.step()
        optimizer.zero_grad()

    optimizer.zero_grad()
    return numerics.trained(model, passes, update)
