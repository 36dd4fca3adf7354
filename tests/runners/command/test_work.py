"""Runs of a command are comparable with its first one if they count the same units and have the same loss curve."""

import math

import pytest
from redline.results import Measurement, Status
from redline.runners.command.comparison import TrainingComparison


def reported(unit="samples/s"):
    return Measurement(status=Status.OK, throughput=1.0, unit=unit)


def curve(start=10.0, rate=0.02, noise=0.0, steps=40):
    """A decreasing loss with deterministic scatter."""
    return {step: start * math.exp(-rate * step) + noise * math.sin(7 * step * step) for step in range(steps)}


@pytest.mark.parametrize(
    ("losses", "compares"),
    [
        (curve(), True),
        (curve(start=10.5), True),  # another order of the data, or another format
        (curve(rate=0.021), True),
        ({step: 1.5 * loss for step, loss in curve().items()}, False),
        ({step: 10.0 + step for step in range(40)}, False),  # it diverges
        ({step: loss / 8 for step, loss in curve().items()}, False),  # summed or averaged differently
        ({}, True),
        ({0: 99.0, 1: 99.0}, True),  # too few
        ({step + 1000: 99.0 for step in range(40)}, True),  # other steps
    ],
)
def test_a_loss_far_from_the_first_runs_at_the_same_steps_is_another_training(losses, compares):
    comparison = TrainingComparison()
    assert comparison.deviation(reported(), 32.0, curve()) is None
    reason = comparison.deviation(reported(), 32.0, losses)
    assert (reason is None) is compares
    if not compares:
        assert reason.startswith("its loss is ") and "at step 39, but that of the first run was 4.584" in reason


def test_noisy_losses_may_differ_by_their_noise():
    comparison = TrainingComparison()
    comparison.deviation(reported(), None, curve(start=1.0, noise=0.5))
    assert comparison.deviation(reported(), None, curve(start=1.6, noise=0.5)) is None


def test_steps_of_other_sizes_are_not_held_against_each_other():
    comparison = TrainingComparison()
    comparison.deviation(reported(), 32.0, curve())
    assert comparison.deviation(reported(), 64.0, curve(start=30.0)) is None
    assert comparison.deviation(reported("tokens/s"), 32.0, curve()).startswith(
        "it reported tokens/s, but samples/s before"
    )
