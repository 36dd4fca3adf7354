"""Comparisons of numeric tests, which record how close each came to its tolerance.

A numeric test takes the fixture `seed`, from which it makes weights and data. Tolerances are defined in one place,
`redline/schedule/comparison.py`, by number format, depth and optimizer. `make test-portable` runs the numeric tests with
many seeds and with the code paths that a maths library may take on other machines, and shows the largest share of its
tolerance that each test used.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import numerics_table as numerics
from redline.schedule import comparison
from redline.schedule.comparison import Comparison
from redline.schedule.parallel.replicas import whole_gradient

MARGIN = 3.0
"""A planted fault must exceed the tolerance by more than this factor; everything else must stay below it by the same
factor (`bench/portability.py`)."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison."""

    what: str
    departure: float
    allowed: float
    fault: bool = False
    """True if it compares a planted fault."""


checks: list[Check] = []
"""Checks of the running test; those of other ranks arrive with their answers."""


references: dict[tuple, numerics.Reference] = {}


def within(departure, allowed, what):
    """Asserts that a departure is within the tolerance of rounding."""
    checks.append(Check(what, float(departure), float(allowed)))
    assert departure <= allowed, f"{what} departs by {departure:.2g}; {allowed:.2g} is allowed"


def caught(departure, allowed, what):
    """Asserts that a planted fault departs by clearly more than the tolerance of rounding."""
    checks.append(Check(what, float(departure), float(allowed), fault=True))
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


def record_verify():
    """Makes `verify` record the comparisons that it accepts."""
    module = importlib.import_module("redline.schedule.verify")
    compare = module.compare

    def recorded(expected, found, tolerance):
        result = compare(expected, found, tolerance)
        if result.holds:
            worst = max(result.departures, key=lambda each: each.share)
            checks.append(Check(f"verify: {worst.description}", worst.by, worst.allowed))
        return result

    module.compare = recorded
