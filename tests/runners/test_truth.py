"""A candidate that does not train the same model is wrong, however fast."""

import math
from dataclasses import replace

import pytest

from redline.runners import Reference
from redline.runners.truth import check

REFERENCE = Reference(losses=(9.0, 8.5, 8.1), samples_per_step=32)


def test_the_same_losses_are_right():
    assert check((9.0001, 8.501, 8.099), REFERENCE, samples_per_step=32) == ""


def test_another_first_loss_is_wrong_and_says_by_how_much():
    assert check((9.2, 8.5, 8.1), REFERENCE, samples_per_step=32) == (
        "loss 9.2 at step 1 is not the reference's 9 (tolerance 0.009)"
    )


def test_a_wrong_update_shows_in_the_second_step():
    assert "step 2" in check((9.0, 8.9, 8.8), REFERENCE, samples_per_step=32)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_wrong_even_without_a_reference(bad):
    assert check((9.0, bad), None) == f"loss is {bad} at step 2"
    assert check((9.0,), None, last_loss=bad) == f"loss is {bad} at the last step"


def test_bfloat16_is_granted_its_rounding():
    losses = (9.05, 8.6, 8.2)
    assert check(losses, REFERENCE, samples_per_step=32, precision="bf16") == ""
    assert check(losses, REFERENCE, samples_per_step=32) != ""


def test_a_reference_in_half_precision_is_granted_its_rounding_too():
    losses, half = (9.05, 8.6, 8.2), replace(REFERENCE, precision="bf16")
    assert check(losses, half, samples_per_step=32, precision="fp32") == ""
    assert check((9.2, 8.6, 8.2), half, samples_per_step=32, precision="fp32") != ""


def test_dropout_is_granted_its_noise():
    losses = (9.15, 8.6, 8.2)
    assert check(losses, REFERENCE, samples_per_step=32, stochastic=True) == ""
    assert check(losses, REFERENCE, samples_per_step=32) != ""


def test_steps_over_other_samples_are_not_compared():
    assert check((5.0, 4.0), REFERENCE, samples_per_step=8) == ""
