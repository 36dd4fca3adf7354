"""How far rounding alone may bring two runs of the same computation apart, and how far apart two are.

Every numeric comparison takes its tolerance from here: that of `verify`, of the numerics table, of a dry run's `wrong`
and of the tests.

Notation:
    u   unit roundoff of a number format, the relative error of one rounding: 2**-24 in float32, 2**-11 in
        float16, 2**-8 in bfloat16
    n   terms of a sum: what a product contracts, or the rows that the gradient of a weight is summed over
    d   operations one after another, forth and back

Two orders of a sum of n terms depart by about sqrt(n) u of the magnitude of the terms (one standard
deviation: roundings go up as often as down; Higham and Mary, "A New Approach to Probabilistic Rounding Error
Analysis", 2019). d operations in a row add theirs as independent errors add: sqrt(n d) u. Formats narrower
than float32 are summed in float32 and rounded once, so that n is 1 for them.

A `Tolerance` has two ways to be made. Of whole tensors the largest difference of an element counts, within `allowance`,
which knows every layer: nothing in it was fitted to what some machine gave. Of summaries (projections of outputs, norms of
gradients) only u is kept and the number d of layers with weights. Logits depart by some u sqrt(d) of their size. Elements of
a gradient depart by more, having come back as well, but its norm by a part of that, since errors hardly point along the
gradient. How many u sqrt(d) it is for each kind is some three times the largest that was seen over families, combinations and
formats on a CPU.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

DEVIATIONS = 5.0
"""Standard deviations that are granted: of N elements the worst is sqrt(2 ln N) out, 5 of 300,000."""
OPERATIONS = 4
"""Roundings that a module without children stands for: its own and those of what a model computes between
modules (products of attention, residual sums), each forth and back."""
SMALL = 0.01
"""A tensor is held to its own largest magnitude, or to this share of the largest in any where that is more:
some gradients are nothing but rounding (that of a key's bias), which is relative to terms that cancel."""

FEW = 64
"""Elements of a tensor below which a factor between two of them is not told from rounding."""
FLOOR = 2.0**-16
"""Of one side's summary, relative: sums of up to some million terms of float32, in another order or by another algorithm. A
norm is held to its own size, or to this share of the whole gradient's where that is more."""
LOGITS = 5.0
"""Of u sqrt(d), as the next three."""
GRADIENT = 2.0
VECTORS = 6.0
"""Biases and norms: their gradients are sums over all tokens, in which much cancels."""
LOSS = 0.2
"""Of the size of the logits."""
LOSS_ITSELF = 4.0
"""Of the unit roundoff of what the loss is computed in, without the depth."""
NOISE = 0.1, 8.0
"""Of the logarithm of the noise of dropout: whatever the number of numbers it is made of, and over the root of that."""
NOISY_LOSS = 0.3
"""What dropout changes of a step's loss: a multiple of the noise over the root of its samples."""
NOISY_GRADIENT = 2.0
"""Of the logarithm of its gradients' norms, a multiple of the noise: few tokens can make up much of them."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to a floating-point format."""
    return torch.finfo(dtype).eps / 2


def allowance(
    module: nn.Module,
    rows: int,
    formats: Mapping[str, torch.dtype] | None = None,
    dtype: torch.dtype | None = None,
) -> float:
    """How far an output or a gradient may depart by rounding, relative as in `departure`.

    DEVIATIONS * sqrt(sum of OPERATIONS n u**2 over the modules without children + rows u**2): what comes
    through the layers, forth and back, and the sum over rows that the gradient of a weight is.

    Args:
        module: the model, which may be on the meta device.
        rows: samples times tokens (or pixels) of the batch.
        formats: formats that parts are going to be cast to, by the path of the part.
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


def loss_allowance(outputs: float, rows: int, dtype: torch.dtype = torch.float32) -> float:
    """How far a mean loss may depart, relative to itself, where what it is made of may depart by `outputs`.

    It is the mean of `rows` terms that round independently; the sum that makes it rounds once more.
    """
    return outputs / math.sqrt(rows) + DEVIATIONS * unit_roundoff(dtype)


def adamw_allowance(gradient: float, weight: torch.Tensor, *, lr: float, eps: float, steps: int) -> float:
    """How far a weight may depart after some steps of AdamW, absolutely.

    A step is lr m / (s + eps), where m is a mean of gradients and s the root of a mean of their squares, |m|
    <= s. Where gradients depart by g, so do m and s, and the step by lr g (1 / (s + eps) + s / (s +
    eps)**2), at most lr g / eps, where s is zero: with the usual eps of 1e-8 the rounding of a gradient that
    is almost zero turns a whole step around, and nothing can be told. So eps must be of the gradients' own
    size. What weights depart by changes the following gradients; it is granted as much again with every
    step. Each step rounds the weight twice (decay and update), in either run.

    Args:
        gradient: how far the gradient may depart, absolutely.
        weight: the weight.
        lr: learning rate.
        eps: AdamW's.
        steps: steps taken.
    """
    rounded = 4 * steps * unit_roundoff(weight.dtype) * scale(weight)
    return lr / eps * gradient * (2**steps - 1) + rounded


class Arithmetic(Protocol):
    """What the rounding of one model follows from, as far as is kept with a summary."""

    @property
    def roundoff(self) -> float:
        """u of its products."""

    @property
    def loss_roundoff(self) -> float:
        """u of what the loss is computed in."""

    @property
    def depth(self) -> int:
        """d, layers with weights of at least two dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """How far what two models compute may depart, each kind relative to its `scale`; both sides' rounding counted."""

    outputs: float
    """Of outputs, or projections of them."""
    loss: float
    """Of the loss, relative to itself."""
    loss_of_outputs: float = 0.0
    """Of the loss besides, relative to `size`."""
    gradients: float
    """Of gradients, or norms of them."""
    vectors: float
    """Of norms of the gradients of biases and norms alone."""
    weights: Callable[[float, torch.Tensor], float] | None = None
    """How far a weight may depart after optimizer steps, absolutely, given how far its gradient may; without it as far as
    gradients."""
    least: float = SMALL
    """The share of the largest of its kind that a tensor is at least held to."""
    size: float = 0.0
    """What projections are held to: the size of the outputs, a root mean square; 0 where it is not known."""
    ratio: float = 1.0
    """By what factor norms of gradients may differ besides, since dropout draws other masks."""
    noise: float = 1.0
    """By what factor the noise of dropout may differ."""
    factor: float = 0.0
    """By how much the factor between two whole tensors may differ from 1; 0 compares none."""

    @classmethod
    def of_tensors(
        cls,
        allowed: float,
        *,
        terms: int | None = None,
        weights: Callable[[float, torch.Tensor], float] | None = None,
    ) -> "Tolerance":
        """Of whole tensors.

        Args:
            allowed: the `allowance` of the model that rounds more, which is that of two orders, so of both sides.
            terms: what the loss is a mean of: tokens, or samples; None where that is not known.
            weights: what the optimizer makes of it, such as `adamw_allowance`.
        """
        loss = allowed if terms is None else loss_allowance(allowed, terms)
        return cls(
            outputs=allowed, loss=loss, gradients=allowed, vectors=allowed, weights=weights, factor=allowed / DEVIATIONS
        )

    @classmethod
    def of_summaries(
        cls, *sides: Arithmetic, size: float, noise: float = 0.0, samples: int = 1, noise_numbers: int = 1
    ) -> "Tolerance":
        """Of summaries, whose errors add: both models depart from exact arithmetic, each by its own format.

        The noise of dropout is drawn anew in every configuration. Its logarithm, as the root mean square of n numbers,
        has a standard deviation of about 1 / sqrt(n). In a training step it leaves the loss, a mean over samples, to
        chance by a part of noise over the root of their number, and gradients by a part of the noise.

        Args:
            sides: both models.
            size: root mean square of the logits.
            noise: what dropout changes of the logits, where it is on.
            samples: what the loss is a mean of.
            noise_numbers: of how many numbers the noise is the root mean square, where they are fewer.
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
    """By what factor the noise of dropout of two runs may differ, a root mean square of so many numbers each."""
    return math.exp(NOISE[0] + NOISE[1] / math.sqrt(max(1, numbers)))


def scale(tensor: torch.Tensor | None, largest: float = 0.0, least: float = SMALL) -> float:
    """What a departure is relative to; `largest` is the largest magnitude in any tensor of its kind."""
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
    """The largest difference of two tensors of one shape over the `scale` of the first, or over `over`, beyond a factor `ratio`
    if there is one; infinite where one holds what is no number."""
    if not expected.numel():
        return 0.0
    over = over or scale(expected, largest)
    expected, found = expected.detach().double(), found.detach().double()
    if ratio == 1:
        apart = (expected - found).abs()
    else:
        apart = torch.maximum(expected / ratio - found, found - expected * ratio)
    value = float(apart.max()) / over
    return value if math.isfinite(value) else math.inf


def factor_between(expected: torch.Tensor, found: torch.Tensor) -> float:
    """By how much the factor between two tensors differs from 1.

    The factor is the projection of the one on the other, <found, expected> / <expected, expected>: the errors of N
    elements average out in it, so that it may differ by one standard deviation of an element, not by DEVIATIONS.
    """
    e, f = expected.detach().double().flatten(), found.detach().double().flatten()
    norm = float(e @ e)
    return float(f @ e) / norm - 1 if norm > 0 else 0.0


def largest(tensors: Mapping[str, torch.Tensor | None]) -> float:
    """The largest magnitude in any of some tensors."""
    return max((scale(each) for each in tensors.values() if each is not None), default=0.0)


def _sum(terms: int, dtype: torch.dtype) -> float:
    """Variance of a sum, relative to its terms."""
    u = unit_roundoff(dtype)
    return (terms if u <= unit_roundoff(torch.float32) else 1) * u**2


def _cast(path: str, formats: Mapping[str, torch.dtype]) -> torch.dtype | None:
    holding = [each for each in formats if not each or path == each or path.startswith(f"{each}.")]
    return formats[max(holding, key=len)] if holding else None
