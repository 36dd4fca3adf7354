"""Limits on the departure of two runs of the same computation by rounding, and measures of departure.

`verify`, the numerics table, a dry run's status `wrong` and the tests take their tolerances from here.

Notation:
    u   unit roundoff of a number format, the relative error of one rounding: 2**-24 in float32, 2**-11 in
        float16, 2**-8 in bfloat16
    n   terms of a sum: the contracted dimension of a product, or the rows that the gradient of a weight is summed over
    d   consecutive operations, forward and backward

Two orders of a sum of n terms depart by about sqrt(n) u of the magnitude of the terms (one standard deviation:
roundings go up as often as down; Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019).
The errors of d consecutive operations add like independent errors: sqrt(n d) u. Formats narrower than float32 are
summed in float32 and rounded once, so that n is 1 for them.

A `Tolerance` is made in one of two ways. For full tensors the largest difference of an element is compared with
`allowance`, which uses every layer and has no fitted constants. For summaries (projections of outputs, norms of
gradients) only u and the number d of layers with weights are known. Logits depart by some u sqrt(d) of their size.
Elements of a gradient depart by more, because of the backward pass, but its norm by less than these, since errors are
hardly parallel to the gradient. The factor of u sqrt(d) for each kind is about three times the largest that was measured
over families, combinations and formats on a CPU.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

DEVIATIONS = 5.0
"""Allowed number of standard deviations: the largest of N normal errors is about sqrt(2 ln N) of them, 5 for N = 300,000."""
OPERATIONS = 4
"""Number of roundings per module without children: its own and those of the model between modules (products of
attention, residual sums), each forward and backward.
"""
SMALL = 0.01
"""A tensor is compared relative to its own largest magnitude, or to this share of the largest in any tensor if that
is more: some gradients are only rounding errors (that of a key's bias), which are relative to terms that cancel.
"""

FEW = 64
"""Number of elements of a tensor below which rounding hides a factor between two tensors."""
FLOOR = 2.0**-16
"""Relative tolerance of one side's summary: sums of up to some million terms of float32, in another order or by
another algorithm. A norm is compared relative to its own size, or to this share of the norm of the full gradient if
that is larger.
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
    """Returns the largest relative error of one rounding to a floating-point format."""
    return torch.finfo(dtype).eps / 2


def allowance(
    module: nn.Module,
    rows: int,
    formats: Mapping[str, torch.dtype] | None = None,
    dtype: torch.dtype | None = None,
) -> float:
    """Returns the largest departure of an output or a gradient by rounding, relative as in `departure`.

    DEVIATIONS * sqrt(sum of OPERATIONS n u**2 over the modules without children + rows u**2): errors through the
    layers, forward and backward, and the sum over rows in the gradient of a weight.

    Args:
        module: the model, which may be on the meta device.
        rows: samples times tokens (or pixels) of the batch.
        formats: formats that modules will be cast to, by the module's path.
        dtype: the format of all operations; by default that of a module's weights, float32 without any.
    """
    variance = _sum(rows, dtype or torch.float32)
    for path, submodule in module.named_modules():
        if any(True for _ in submodule.children()):
            continue
        weights = [param for param in submodule.parameters(recurse=False) if param.is_floating_point()]
        module_dtype = dtype or _cast(path, formats or {}) or (weights[0].dtype if weights else torch.float32)
        terms = max((max(weight.shape[0], weight[0].numel()) for weight in weights if weight.dim()), default=1)
        variance += OPERATIONS * _sum(terms, module_dtype)
    return DEVIATIONS * math.sqrt(variance)


def loss_allowance(outputs: float, rows: int) -> float:
    """Returns the largest departure of a mean loss, relative to itself, if the outputs may depart by `outputs`.

    It is the mean of `rows` terms that round independently; the sum rounds once more.
    """
    return outputs / math.sqrt(rows) + DEVIATIONS * unit_roundoff(torch.float32)


def adamw_allowance(gradient: float, weight: torch.Tensor, *, lr: float, eps: float, steps: int) -> float:
    """Returns the largest absolute departure of a weight after some steps of AdamW.

    A step is lr m / (s + eps), where m is a mean of gradients and s the root of a mean of their squares, |m| <= s. If
    gradients depart by g, so do m and s, and the step by lr g (1 / (s + eps) + s / (s + eps)**2), at most lr g / eps,
    where s is zero. With the usual eps of 1e-8 the rounding of a gradient that is almost zero therefore reverses a
    step, and the comparison is meaningless: eps must be of the gradients' magnitude. The departure of weights changes
    the following gradients, so that each step doubles it. Each step rounds the weight twice (decay and update), in
    both runs.

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
        """Returns the tolerance of full tensors.

        Args:
            allowed: the larger `allowance` of the two models; it covers two orders of the sums, so both models.
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
        """Returns the tolerance of summaries. Both models depart from exact arithmetic, each by its format: errors add.

        Every configuration draws other dropout masks. The logarithm of the noise, a root mean square of n numbers, has
        a standard deviation of about 1 / sqrt(n). In a training step the masks change the loss, a mean over samples, by
        a multiple of the noise over the root of their number, and gradients by a multiple of the noise.

        Args:
            size: root mean square of the logits.
            noise: relative change of the logits by dropout, if it is on.
            samples: number of samples of the mean loss.
            noise_numbers: number of values in the noise's root mean square, if there are fewer.
        """
        error = sum(side.roundoff * math.sqrt(side.depth) for side in sides)
        floor = FLOOR * len(sides)
        own_rounding = LOSS_ITSELF * sum(side.loss_roundoff for side in sides) + floor
        return cls(
            outputs=LOGITS * error + floor,
            loss=own_rounding + NOISY_LOSS * noise / math.sqrt(samples),
            loss_of_outputs=LOSS * error,
            gradients=GRADIENT * error + floor,
            vectors=VECTORS * error + floor,
            least=FLOOR,
            size=size,
            ratio=math.exp(NOISY_GRADIENT * noise),
            noise=noise_ratio(noise_numbers),
        )


def noise_ratio(numbers: int) -> float:
    """Returns the factor by which dropout's noise of two runs may differ, each a root mean square of `numbers` values."""
    return math.exp(NOISE[0] + NOISE[1] / math.sqrt(max(1, numbers)))


def scale(tensor: torch.Tensor | None, largest: float = 0.0, least: float = SMALL) -> float:
    """Returns the magnitude that a departure is relative to; `largest` is the largest magnitude of a tensor of its kind."""
    magnitude = float(tensor.detach().abs().max()) if tensor is not None and tensor.numel() else 0.0
    return max(magnitude, least * largest, 1e-30)


def departure(
    expected: torch.Tensor,
    actual: torch.Tensor,
    largest: float = 0.0,
    *,
    over: float = 0.0,
    ratio: float = 1.0,
) -> float:
    """Returns the largest difference of two tensors of one shape, over the `scale` of the first or over `over`.

    With a `ratio` only differences beyond that factor count. Infinite if a tensor contains NaN.
    """
    if not expected.numel():
        return 0.0
    over = over or scale(expected, largest)
    expected, actual = expected.detach().double(), actual.detach().double()
    if ratio == 1:
        differences = (expected - actual).abs()
    else:
        differences = torch.maximum(expected / ratio - actual, actual - expected * ratio)
    value = float(differences.max()) / over
    return value if math.isfinite(value) else math.inf


def factor_between(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Returns the difference from 1 of the factor between two tensors.

    The factor is the projection <actual, expected> / <expected, expected>. The errors of N elements average out in it, so
    one standard deviation of an element is allowed instead of DEVIATIONS.
    """
    expected_values, actual_values = expected.detach().double().flatten(), actual.detach().double().flatten()
    norm = float(expected_values @ expected_values)
    return float(actual_values @ expected_values) / norm - 1 if norm > 0 else 0.0


def largest(tensors: Mapping[str, torch.Tensor | None]) -> float:
    """Returns the largest magnitude in any of some tensors."""
    return max((scale(tensor) for tensor in tensors.values() if tensor is not None), default=0.0)


def _sum(terms: int, dtype: torch.dtype) -> float:
    """Returns the variance of a sum by rounding, relative to its terms."""
    u = unit_roundoff(dtype)
    # Narrower formats are summed in float32 and rounded once.
    return (terms if u <= unit_roundoff(torch.float32) else 1) * u**2


def _cast(path: str, formats: Mapping[str, torch.dtype]) -> torch.dtype | None:
    ancestors = [
        ancestor for ancestor in formats if not ancestor or path == ancestor or path.startswith(f"{ancestor}.")
    ]
    return formats[max(ancestors, key=len)] if ancestors else None
