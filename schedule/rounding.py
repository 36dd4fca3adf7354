"""Limits on the departure of two runs of the same computation by rounding, and measures of departure.

Every numeric comparison takes its tolerance from here: that of `verify`, of the numerics table, of a dry run's status
`wrong` and of the tests.

Notation:
    u   unit roundoff of a number format, the relative error of one rounding: 2**-24 in float32, 2**-11 in
        float16, 2**-8 in bfloat16
    n   terms of a sum: the contracted dimension of a product, or the rows that the gradient of a weight is summed over
    d   consecutive operations, forward and backward

Two orders of a sum of n terms depart by about sqrt(n) u of the magnitude of the terms (one standard deviation:
roundings go up as often as down; Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019).
The errors of d consecutive operations add like independent errors: sqrt(n d) u. Formats narrower than float32 are
summed in float32 and rounded once, so that n is 1 for them.

A `Tolerance` is made in one of two ways. For whole tensors the largest difference of an element counts, within
`allowance`, which uses every layer: nothing in it was fitted to measurements. For summaries (projections of outputs,
norms of gradients) only u and the number d of layers with weights are known. Logits depart by some u sqrt(d) of their
size. Elements of a gradient depart by more, because of the backward pass, but its norm by a part of that, since errors
are hardly parallel to the gradient. The factor of u sqrt(d) for each kind is about three times the largest that was
seen over families, combinations and formats on a CPU.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

DEVIATIONS = 5.0
"""Number of standard deviations that are allowed: of N elements the worst is sqrt(2 ln N) out, 5 of 300,000."""
OPERATIONS = 4
"""Number of roundings per module without children: its own and those of the model between modules (products of
attention, residual sums), each forward and backward.
"""
SMALL = 0.01
"""A tensor is compared relative to its own largest magnitude, or to this share of the largest in any tensor if that
is more: some gradients are only rounding errors (that of a key's bias), which are relative to terms that cancel.
"""

FEW = 64
"""Number of elements of a tensor below which a factor between two tensors cannot be told from rounding."""
FLOOR = 2.0**-16
"""Relative tolerance of one side's summary: sums of up to some million terms of float32, in another order or by
another algorithm. A norm is compared relative to its own size, or to this share of the whole gradient's if that is
more.
"""
LOGITS = 5.0
"""Factor of u sqrt(d), like the next three."""
GRADIENT = 2.0
VECTORS = 6.0
"""Biases and norms: their gradients are sums over all tokens, in which much cancels."""
LOSS = 0.2
"""Relative to the size of the logits."""
LOSS_ITSELF = 4.0
"""Factor of the unit roundoff of the loss's format, without the depth."""
NOISE = 0.1, 8.0
"""Tolerance of the logarithm of dropout's noise: a constant, and one over the root of the number of values."""
NOISY_LOSS = 0.3
"""Effect of dropout on a step's loss: a multiple of the noise over the root of its samples."""
NOISY_GRADIENT = 2.0
"""Effect on the logarithm of gradient norms, a multiple of the noise: few tokens can dominate them."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to a floating-point format."""
    return torch.finfo(dtype).eps / 2


def allowance(
    module: nn.Module,
    rows: int,
    formats: Mapping[str, torch.dtype] | None = None,
    dtype: torch.dtype | None = None,
) -> float:
    """Largest departure of an output or a gradient by rounding, relative as in `departure`.

    DEVIATIONS * sqrt(sum of OPERATIONS n u**2 over the modules without children + rows u**2): errors through the
    layers, forward and backward, and the sum over rows in the gradient of a weight.

    Args:
        module: the model, which may be on the meta device.
        rows: samples times tokens (or pixels) of the batch.
        formats: formats that parts will be cast to, by the path of the part.
        dtype: the format of all operations; by default that of a module's weights, float32 without any.
    """
    variance = _sum(rows, dtype or torch.float32)
    for path, each in module.named_modules():
        if any(True for _ in each.children()):
            continue
        weights = [p for p in each.parameters(recurse=False) if p.is_floating_point()]
        own = dtype or _cast(path, formats or {}) or (weights[0].dtype if weights else torch.float32)
        terms = max((max(p.shape[0], p[0].numel()) for p in weights if p.dim()), default=1)
        variance += OPERATIONS * _sum(terms, own)
    return DEVIATIONS * math.sqrt(variance)


def loss_allowance(outputs: float, rows: int) -> float:
    """Largest departure of a mean loss, relative to itself, if the outputs may depart by `outputs`.

    It is the mean of `rows` terms that round independently; the sum rounds once more.
    """
    return outputs / math.sqrt(rows) + DEVIATIONS * unit_roundoff(torch.float32)


def adamw_allowance(gradient: float, weight: torch.Tensor, *, lr: float, eps: float, steps: int) -> float:
    """Largest departure of a weight after some steps of AdamW, absolute.

    A step is lr m / (s + eps), where m is a mean of gradients and s the root of a mean of their squares, |m| <= s. If
    gradients depart by g, so do m and s, and the step by lr g (1 / (s + eps) + s / (s + eps)**2), at most lr g / eps,
    where s is zero: with the usual eps of 1e-8 the rounding of a gradient that is almost zero reverses a whole step,
    and nothing can be concluded. So eps must be of the gradients' own size. The departure of weights changes the
    following gradients; every step adds as much again. Each step rounds the weight twice (decay and update), in either
    run.

    Args:
        gradient: largest departure of the gradient, absolute.
    """
    rounded = 4 * steps * unit_roundoff(weight.dtype) * scale(weight)
    return lr / eps * gradient * (2**steps - 1) + rounded


class Arithmetic(Protocol):
    """Properties of a model that determine its rounding, as kept in a summary."""

    @property
    def roundoff(self) -> float:
        """u of its products."""

    @property
    def loss_roundoff(self) -> float:
        """u of the loss's format."""

    @property
    def depth(self) -> int:
        """d, number of layers with weights of at least two dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Largest departures between two models, each kind relative to its `scale`; includes the rounding of both."""

    outputs: float
    """For outputs, or projections of them."""
    loss: float
    """For the loss, relative to itself."""
    loss_of_outputs: float = 0.0
    """Additional tolerance of the loss, relative to `size`."""
    gradients: float
    """For gradients, or norms of them."""
    vectors: float
    """For norms of the gradients of biases and norms only."""
    weights: Callable[[float, torch.Tensor], float] | None = None
    """Largest departure of a weight after optimizer steps, absolute, as a function of its gradient's; without it the
    same as for gradients.
    """
    least: float = SMALL
    """Smallest reference magnitude of a tensor, as a share of the largest of its kind."""
    size: float = 0.0
    """Reference size of projections: the root mean square of the outputs; 0 if unknown."""
    ratio: float = 1.0
    """Additional factor of the norms of gradients, because dropout draws other masks."""
    noise: float = 1.0
    """Factor by which the noise of dropout may differ."""
    factor: float = 0.0
    """Largest difference from 1 of the factor between two whole tensors; 0 disables the comparison."""

    @classmethod
    def of_tensors(
        cls,
        allowed: float,
        *,
        terms: int | None = None,
        weights: Callable[[float, torch.Tensor], float] | None = None,
    ) -> "Tolerance":
        """Tolerance of whole tensors.

        Args:
            allowed: the larger `allowance` of the two models, which covers two orders, so both sides.
            terms: number of terms of the mean loss: tokens, or samples; None if unknown.
            weights: effect of the optimizer, such as `adamw_allowance`.
        """
        loss = allowed if terms is None else loss_allowance(allowed, terms)
        return cls(
            outputs=allowed, loss=loss, gradients=allowed, vectors=allowed, weights=weights, factor=allowed / DEVIATIONS
        )

    @classmethod
    def of_summaries(
        cls, *sides: Arithmetic, size: float, noise: float = 0.0, samples: int = 1, noise_numbers: int = 1
    ) -> "Tolerance":
        """Tolerance of summaries, whose errors add: both models depart from exact arithmetic, each by its own format.

        The noise of dropout is drawn again in every configuration. Its logarithm, as the root mean square of n
        numbers, has a standard deviation of about 1 / sqrt(n). In a training step it randomises the loss, a mean over
        samples, by a multiple of the noise over the root of their number, and gradients by a multiple of the noise.

        Args:
            size: root mean square of the logits.
            noise: relative change of the logits by dropout, if it is on.
            samples: number of samples of the mean loss.
            noise_numbers: number of values in the noise's root mean square, if there are fewer.
        """
        error = sum(each.roundoff * math.sqrt(each.depth) for each in sides)
        floor = FLOOR * len(sides)
        itself = LOSS_ITSELF * sum(each.loss_roundoff for each in sides) + floor
        return cls(
            outputs=LOGITS * error + floor,
            loss=itself + NOISY_LOSS * noise / math.sqrt(samples),
            loss_of_outputs=LOSS * error,
            gradients=GRADIENT * error + floor,
            vectors=VECTORS * error + floor,
            least=FLOOR,
            size=size,
            ratio=math.exp(NOISY_GRADIENT * noise),
            noise=noise_ratio(noise_numbers),
        )


def noise_ratio(numbers: int) -> float:
    """Factor by which the noise of dropout of two runs may differ, each a root mean square of this number of values."""
    return math.exp(NOISE[0] + NOISE[1] / math.sqrt(max(1, numbers)))


def scale(tensor: torch.Tensor | None, largest: float = 0.0, least: float = SMALL) -> float:
    """Reference magnitude of a departure; `largest` is the largest magnitude in any tensor of its kind."""
    own = float(tensor.detach().abs().max()) if tensor is not None and tensor.numel() else 0.0
    return max(own, least * largest, 1e-30)


def departure(
    expected: torch.Tensor,
    found: torch.Tensor,
    largest: float = 0.0,
    *,
    over: float = 0.0,
    ratio: float = 1.0,
) -> float:
    """Largest difference of two tensors of one shape over the `scale` of the first, or over `over`, beyond a factor
    `ratio` if there is one; infinite if one contains NaN.
    """
    if not expected.numel():
        return 0.0
    over = over or scale(expected, largest)
    expected, found = expected.detach().double(), found.detach().double()
    if ratio == 1:
        differences = (expected - found).abs()
    else:
        differences = torch.maximum(expected / ratio - found, found - expected * ratio)
    value = float(differences.max()) / over
    return value if math.isfinite(value) else math.inf


def factor_between(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Difference from 1 of the factor between two tensors.

    The factor is the projection of the one on the other, <found, expected> / <expected, expected>: the errors of N
    elements average out in it, so it may differ by one standard deviation of an element, not by DEVIATIONS.
    """
    e, f = expected.detach().double().flatten(), found.detach().double().flatten()
    norm = float(e @ e)
    return float(f @ e) / norm - 1 if norm > 0 else 0.0


def largest(tensors: Mapping[str, torch.Tensor | None]) -> float:
    """Largest magnitude in any of some tensors."""
    return max((scale(each) for each in tensors.values() if each is not None), default=0.0)


def _sum(terms: int, dtype: torch.dtype) -> float:
    """Variance of a sum, relative to its terms."""
    u = unit_roundoff(dtype)
    return (terms if u <= unit_roundoff(torch.float32) else 1) * u**2


def _cast(path: str, formats: Mapping[str, torch.dtype]) -> torch.dtype | None:
    holding = [each for each in formats if not each or path == each or path.startswith(f"{each}.")]
    return formats[max(holding, key=len)] if holding else None
