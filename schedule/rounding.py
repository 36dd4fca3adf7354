"""How far apart rounding alone may bring two runs of the same computation, and how far apart two are.

Every numeric comparison, of `verify`, of `models.numerics` and of the tests, takes its tolerance from here.

Notation:
    u   unit roundoff of a number format, the relative error of one rounding: 2**-24 in float32, 2**-8 in
        bfloat16
    n   terms of a sum: what a product contracts, or the rows that the gradient of a weight is summed over
    d   operations one after another, forth and back

Two orders of a sum of n terms depart by about sqrt(n) u of the magnitude of the terms (one standard
deviation: roundings go up as often as down; Higham and Mary, "A New Approach to Probabilistic Rounding Error
Analysis", 2019). d operations in a row add theirs as independent errors add: sqrt(n d) u. Formats narrower
than float32 are summed in float32 and rounded once, so that n is 1 for them. Nothing here was fitted to what
some machine gave.
"""

import math
from collections.abc import Mapping

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


def scale(tensor: torch.Tensor, largest: float = 0.0) -> float:
    """What a departure is relative to; `largest` is the largest magnitude in any tensor of its kind."""
    return max(float(tensor.detach().abs().max()) if tensor.numel() else 0.0, SMALL * largest, 1e-30)


def departure(expected: torch.Tensor, found: torch.Tensor, largest: float = 0.0) -> float:
    """The largest difference of two tensors over `scale`; infinite where one holds what is no number."""
    if not expected.numel():
        return 0.0
    expected, found = expected.detach().double(), found.detach().double()
    value = float((expected - found).abs().max()) / scale(expected, largest)
    return value if math.isfinite(value) else math.inf


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
