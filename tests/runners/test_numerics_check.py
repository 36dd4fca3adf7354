"""A candidate that does not train the same model is wrong, however fast: tolerances and reasons."""

import math
from dataclasses import replace

import pytest
from probes import BF16, FP32, part, probe
from redline.results.probe import Computed, Probe
from redline.runners.trial.numerics_check import numerics_mismatch, together, why_incomparable
from redline.training.probe import StepPart

PROBE = probe()
QUIET, STEP = PROBE.quiet, PROBE.step
REFERENCE = PROBE


def verdict(found, reference=REFERENCE, loss=9.1, last_loss=8.0):
    return numerics_mismatch(found, reference, loss=loss, last_loss=last_loss)


def changed(**values):
    """The reference's numbers with some of those on the fixed batch replaced."""
    return replace(PROBE, quiet=replace(QUIET, **values))


def test_the_same_numbers_are_right():
    assert verdict(PROBE) is None
    assert verdict(changed(loss=9.0001, blocks=(1.00001, 1.2))) is None


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (replace(PROBE, logits=(0.5, -0.5, 0.5, -0.499)), "the logits depart by 0.002 of their size"),
        (replace(PROBE, logits=()), "it returns no logits than the reference"),
        (changed(loss=9.01), "the loss on the probe is 9.01, the reference's 9 (tolerance 0.00028)"),
        (changed(blocks=(1.0, 1.201)), "of repeated block 1 on the probe is 1.201, the reference's 1.2 (tolerance"),
        (changed(vectors=(0.1, 0.11, 0.2)), "of biases and norms of repeated block 1 on the probe is 0.11"),
        (changed(vectors=(0.1, 0.1, 0.21)), "of biases and norms outside of repeated blocks on the probe is 0.21"),
        (changed(gradient=2.001), "the norm of the gradient on the probe is 2.001, the reference's 2 (tolerance"),
        (replace(PROBE, step=replace(STEP, loss=9.2)), "the loss in the first step is 9.2, the reference's 9.1"),
        (replace(PROBE, step=replace(STEP, gradient=2.0)), "the norm of the gradient in the first step is 2, the"),
        (replace(PROBE, still=("a.weight",)), "the first step leaves a.weight as it was, in spite of a gradient"),
        (replace(PROBE, still=("a", "b")), "the first step leaves a and 1 more as it was"),
        (replace(PROBE, noise=0.1), "in training the logits depart by 0.1 of their size from those without dropout"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_deviations_are_wrong_with_the_tolerance_in_the_reason(found, message):
    assert message in verdict(found)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_losses_are_wrong_without_a_reference(bad):
    assert verdict(PROBE, None, loss=bad) == f"loss is {bad} at the first step"
    assert verdict(PROBE, None, last_loss=bad) == f"loss is {bad} at the last step"
    assert verdict(changed(loss=bad), None) == f"loss is {bad} at the probe"
    assert verdict(changed(blocks=(bad, 1.0)), None) == "the probe's results are not finite: the gradient's norm is 2.0"
    assert verdict(replace(PROBE, logits=(bad,)), None) is not None
    assert verdict(PROBE, None) is None


def test_a_narrow_format_is_granted_its_rounding_by_depth_and_no_more():
    # u * sqrt(d) is 2 % for 25 layers of bfloat16.
    rounded = replace(changed(blocks=(1.03, 1.2)), roundoff=BF16)
    assert verdict(rounded) is None
    assert "repeated block 0" in verdict(replace(rounded, roundoff=FP32))
    assert "repeated block 0" in verdict(replace(changed(blocks=(1.05, 1.2)), roundoff=BF16))
    shallow = replace(PROBE, depth=4)
    assert "repeated block 0" in verdict(replace(rounded, depth=4), shallow)


def noisy(noise, **values):
    return replace(PROBE, noise=noise, noise_numbers=4096, **values)


def test_dropout_may_draw_other_masks_but_not_be_off_or_stronger():
    reference = noisy(0.4)
    assert verdict(noisy(0.37), reference) == verdict(noisy(0.43), reference) is None
    assert "depart by 0 of their size from those without dropout, the reference's by 0.4" in verdict(PROBE, reference)
    assert "by 0.57" in verdict(noisy(0.57), reference)  # twice the rate
    assert "by 0.28" in verdict(noisy(0.28), reference)  # half of the dropouts


def test_probes_of_other_weights_or_samples_are_not_compared_with_a_note():
    brought = replace(changed(loss=5.0), brought=("fused.weight", "fused.bias"))
    assert verdict(brought) is None
    assert why_incomparable(brought, REFERENCE) == (
        "not compared with the reference, which has other weights: fused.bias and 1 more"
    )
    assert "probed with 2 samples, not 4" in why_incomparable(changed(samples=4), REFERENCE)
    assert verdict(replace(brought, logits=(math.nan,))) is not None
    known = replace(PROBE, weights=1000)
    wider = replace(changed(loss=5.0), weights=2000)
    assert verdict(wider, known) is None
    assert why_incomparable(wider, known) == (
        "not compared with the reference, whose model has 1,000 weights, not 2,000"
    )
    assert verdict(replace(wider, weights=1000), known) and verdict(wider), "as large, or of an earlier version"


def test_parameters_unchanged_in_the_reference_may_stay_unchanged():
    assert verdict(replace(PROBE, still=("a",)), replace(PROBE, still=("a", "b"))) is None


def test_parts_of_ranks_add_up():
    steps = [
        Computed(loss=8.0, gradient=norm, blocks=(of_block,), vectors=(0.0, 0.0), samples=8)
        for norm, of_block in ((2.0, 1.0), (3.0, 2.0), (6.0, 2.0))
    ]
    # A pipeline's parts: the first rank has no logits.
    parts = [
        part((9.0, 1.0), (), loss_roundoff=0.0, roundoff=BF16),
        part((0.0, 6.0), (0.25, 0.5), brought=("x",), changed=1.0, size=4.0, noise_numbers=64, roundoff=BF16),
        part((0.0, 0.0), (0.25, -0.25), changed=1.0, size=4.0, noise_numbers=64, roundoff=BF16),
    ]
    firsts = [StepPart(computed=step, still=names) for step, names in zip(steps, (("b",), (), ("a", "b")))]
    found = together(parts, firsts)
    assert found == Probe(
        quiet=Computed(loss=9.0, gradient=4.0, blocks=(3.0,), vectors=(0.0, math.sqrt(0.75)), samples=2),
        step=Computed(loss=8.0, gradient=7.0, blocks=(3.0,), vectors=(0.0, 0.0), samples=8),
        logits=(0.5, 0.25), noise=0.5, noise_numbers=64, still=("a", "b"), brought=("x",), depth=3, roundoff=BF16,
        loss_roundoff=FP32,
    )  # fmt: skip
    assert together(parts, [None, None, None]).step is None
