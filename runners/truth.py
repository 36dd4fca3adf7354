"""Whether a candidate trains the same model: what it computes, against what the reference computes."""

import math
from collections.abc import Sequence

from ..results.probe import Computed, Probe
from ..training.first_step import StepPart
from ..training.gradients import ComputedPart
from ..training.probe import ProbePart
from .runner import Reference

# Multiples of u * sqrt(d), the unit roundoff of a format and the root of the depth, see `check`: some three
# times the largest that was seen over families, combinations and formats on a CPU.
LOGITS = 5.0
GRADIENT = 2.0
VECTORS = 6.0
"""Biases and norms: their gradients are sums over all tokens, in which much cancels."""
LOSS = 0.2
"""Of the size of the logits."""
LOSS_ITSELF = 4.0
"""Of the unit roundoff of what the loss is computed in, without the depth."""
FLOOR = 2.0**-16
"""Relative: sums of up to some million terms of float32, in another order or by another algorithm."""
NOISE = 0.1, 8.0
"""Of the logarithm of the noise: whatever the number of numbers it is made of, and over the root of that."""
NOISY_LOSS = 0.3
"""What dropout changes of a step's loss: a multiple of the noise over the root of its samples."""
NOISY_GRADIENT = 2.0
"""Of the logarithm of its gradients' norms, a multiple of the noise: few tokens can make up much of them."""


def together(parts: Sequence[ProbePart], firsts: Sequence[StepPart | None] = ()) -> Probe:
    """What the ranks' parts amount to.

    Args:
        parts: of all ranks of a trial, one at least.
        firsts: of their first steps.
    """
    logits = [each.logits for each in parts if each.logits]
    changed, size = sum(each.changed for each in parts), sum(each.size for each in parts)
    steps = [each for each in firsts if each is not None]
    comparable = steps and not any(each.by_batch for each in parts)
    return Probe(
        quiet=_computed([each.quiet for each in parts]),
        step=_computed([each.computed for each in steps]) if comparable else None,
        logits=tuple(sum(column) for column in zip(*logits)),
        noise=math.sqrt(changed / size) if size else 0.0,
        noise_numbers=max(each.noise_numbers for each in parts),
        still=tuple(sorted({name for each in steps for name in each.still})),
        brought=tuple(sorted({name for each in parts for name in each.brought})),
        depth=parts[0].depth,
        roundoff=parts[0].roundoff,
        loss_roundoff=max(each.loss_roundoff for each in parts),
    )


def _computed(parts: Sequence[ComputedPart]) -> Computed:
    squares = [sum(column) for column in zip(*(each.squares for each in parts))]
    vectors = [sum(column) for column in zip(*(each.vectors for each in parts))]
    return Computed(
        loss=sum(each.loss for each in parts) / len(parts),
        gradient=math.sqrt(sum(squares)),
        blocks=tuple(map(math.sqrt, squares[:-1])),
        vectors=tuple(map(math.sqrt, vectors)),
        samples=parts[0].samples,
    )


def check(probe: Probe, reference: Reference | None, *, loss: float, last_loss: float) -> str:
    """Why a candidate computes something else than the reference, or an empty string.

    Every operation rounds its result by up to the unit roundoff u of its format: 2**-24 for float32, 2**-11
    for float16, 2**-8 for bfloat16. The d layers on the way add errors of that size whose signs are as good
    as random, so that they grow as sqrt(d): the logits depart by some u * sqrt(d) of their size, each element
    of a gradient by some more, having come back as well. A gradient's norm departs by a part of it, since
    errors hardly point along the gradient. Sums over many terms add what float32 itself leaves (`FLOOR`), and
    a loss that is a bfloat16 number the rounding of that. Candidate and reference both depart from what exact
    arithmetic would give, each by its own format: their tolerances add.

    The noise of dropout is drawn anew in every configuration. Its logarithm, as the root mean square of n
    numbers, has a standard deviation of about 1 / sqrt(n). In a training step it leaves the loss, a mean over
    samples, to chance by a part of noise over the root of their number, and gradients by a part of the noise.

    Args:
        probe: what the candidate computed.
        reference: what it must be; without one to be compared with (`why_not`), all must be finite.
        loss: of the first training step.
        last_loss: of the last.

    Source: Higham, Accuracy and Stability of Numerical Algorithms (2002), 2.8, on random signs of rounding.
    """
    losses = {"the first step": loss, "the last step": last_loss, "the probe": probe.quiet.loss}
    for what, value in losses.items():
        if not math.isfinite(value):
            return f"loss is {value} at {what}"
    if not (probe.quiet.finite and math.isfinite(sum(probe.logits))):
        return f"what it computes is not finite: the gradient's norm is {probe.quiet.gradient}"
    if reference is None or why_not(probe, reference):
        return ""
    expected = reference.probe
    return (
        _logits(probe, expected)
        or _departure(probe, expected, probe.quiet, expected.quiet, where="on the probe")
        or _noise(probe, expected)
        or _step(probe, expected)
        or _still(probe, expected)
    )


def why_not(probe: Probe, reference: Reference) -> str:
    """Why a candidate cannot be compared with the reference, or an empty string."""
    expected = reference.probe
    mine, others = probe.quiet.samples, expected.quiet.samples
    if mine != others:
        return f"not compared with the reference, which was probed with {others} samples, not {mine}"
    if other := sorted(set(probe.brought) ^ set(expected.brought)):
        return f"not compared with the reference, which has other weights: {_names(other)}"
    return ""


def _rounding(*probes: Probe) -> float:
    return sum(each.roundoff * math.sqrt(each.depth) for each in probes)


def _logits(found: Probe, expected: Probe) -> str:
    if len(found.logits) != len(expected.logits):
        return f"it returns {'other' if found.logits else 'no'} logits than the reference"
    allowed = LOGITS * _rounding(found, expected) + 2 * FLOOR
    departure = max((abs(a - b) for a, b in zip(found.logits, expected.logits)), default=0.0)
    size = expected.logits_size
    if departure <= allowed * size:
        return ""
    return f"the logits depart by {departure / (size or 1.0):.2g} of their size (tolerance {allowed:.2g})"


def _departure(
    found: Probe, expected: Probe, mine: Computed, wanted: Computed, *, where: str, noise: float = 0.0
) -> str:
    """How loss and gradients on the same samples depart, or nothing.

    Args:
        found: the candidate's formats.
        expected: the reference's.
        mine: what the candidate computed.
        wanted: what the reference computed.
        where: on which samples, in words.
        noise: what dropout changes of the logits, where it was on.
    """
    rounding = _rounding(found, expected)
    own = LOSS_ITSELF * (found.loss_roundoff + expected.loss_roundoff) + 2 * FLOOR
    own += NOISY_LOSS * noise / math.sqrt(wanted.samples)
    allowed = own * abs(wanted.loss) + LOSS * rounding * (expected.logits_size or abs(wanted.loss))
    if abs(mine.loss - wanted.loss) > allowed:
        return (
            f"the loss {where} is {mine.loss:.6g}, the reference's {wanted.loss:.6g} "
            f"(tolerance {allowed:.2g})"
        )
    ratio = math.exp(NOISY_GRADIENT * noise)
    for name, factor, norm, norm_wanted in _norms(mine, wanted):
        allowed = factor * rounding + 2 * FLOOR
        # What has no gradient to speak of is held to the scale of the whole.
        slack = allowed * max(norm_wanted, FLOOR * wanted.gradient)
        if not norm_wanted / ratio - slack <= norm <= norm_wanted * ratio + slack:
            return (
                f"the norm of the gradient{name} {where} is {norm:.6g}, the reference's {norm_wanted:.6g} "
                f"(tolerance {slack + (ratio - 1) * norm_wanted:.2g})"
            )
    return ""


def _norms(found: Computed, expected: Computed) -> list[tuple[str, float, float, float]]:
    """Which norm, the multiple of the rounding it may depart by, the candidate's and the reference's."""
    count = len(expected.blocks)
    places = [*(f" of repeated block {number}" for number in range(count)), " outside of repeated blocks"]
    vectors = [f" of biases and norms{place}" for place in places]
    return [
        *((name, GRADIENT, a, b) for name, a, b in zip(places[:count], found.blocks, expected.blocks)),
        *((name, VECTORS, a, b) for name, a, b in zip(vectors, found.vectors, expected.vectors)),
        ("", GRADIENT, found.gradient, expected.gradient),
    ]


def _noise(found: Probe, expected: Probe) -> str:
    least = max(1, min(found.noise_numbers, expected.noise_numbers))
    ratio = math.exp(NOISE[0] + NOISE[1] / math.sqrt(least))
    slack = LOGITS * _rounding(found, expected) + 2 * FLOOR
    # Rounding is independent of the masks: squares add.
    low, high = math.hypot(found.noise, slack), math.hypot(expected.noise * ratio, slack)
    if found.noise <= high and expected.noise / ratio <= low:
        return ""
    return (
        f"in training the logits depart by {found.noise:.2g} of their size from those without dropout, the "
        f"reference's by {expected.noise:.2g}"
    )


def _step(found: Probe, expected: Probe) -> str:
    mine, wanted = found.step, expected.step
    if mine is None or wanted is None or mine.samples != wanted.samples:
        return ""
    noise = max(found.noise, expected.noise)
    return _departure(found, expected, mine, wanted, noise=noise, where="in the first step")


def _still(found: Probe, expected: Probe) -> str:
    still = [name for name in found.still if name not in expected.still]
    return f"the first step leaves {_names(still)} as it was, in spite of a gradient" if still else ""


def _names(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
