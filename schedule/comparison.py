"""Compares the results of two models, and limits the departure that rounding explains.

`verify` compares whole tensors of a scheduled model and an untouched copy of it; a dry run compares summaries, a probe of
the candidate with the reference's (`runners/trial/numerics_check.py`). The tests take their tolerances from here, too.

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import nn

from .parallel.replicas import whole_gradient
from .parallel.sharding import owner, whole

Tensors = Mapping[str, torch.Tensor | None]
Kind = Literal["outputs", "loss", "gradients", "inputs", "dropout", "weights"]
DESCRIPTIONS: Mapping[Kind, str] = {
    "outputs": "{}",
    "loss": "{}",
    "gradients": "the gradient of {}",
    "inputs": "the gradient of {}",
    "weights": "{} after the optimizer's steps",
}
"""Description of each kind of tensor in messages."""
ALIKE = 0.9
"""Departures of at least this share of the largest count as equal, so that the named one does not depend on rounding."""

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
    """For gradients, or norms of them, and for weights after a step."""
    vectors: float
    """For norms of the gradients of biases and norms only."""
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
    def of_tensors(cls, allowed: float) -> "Tolerance":
        """Returns the tolerance of full tensors.

        Args:
            allowed: the larger `allowance` of the two models; it covers two orders of the sums, so both models.
        """
        return cls(outputs=allowed, loss=allowed, gradients=allowed, vectors=allowed, factor=allowed / DEVIATIONS)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Results of a model, gathered over ranks: unsharded tensors, or a summary of them if `on` is given.

    A summary has projections of the logits as outputs, norms as gradients, and the weights that a step did not change;
    its names are used in messages. A kind that only one model has is not compared, except outputs of a summary.
    """

    outputs: Tensors = field(default_factory=dict)
    """Floating-point tensors of the output by name; at most one in a summary."""
    loss: float | None = None
    """The loss; None if another rank computes it, or if it carries no information."""
    gradients: Tensors = field(default_factory=dict)
    """By parameter name, None for no gradient."""
    inputs: Tensors = field(default_factory=dict)
    """Gradients of the inputs, by name."""
    vectors: Collection[str] = ()
    """Names of a summary's norms that are of biases and norms only."""
    weights: Tensors = field(default_factory=dict)
    """Weights after optimizer steps, by name."""
    still: Collection[str] = ()
    """Names of weights with a gradient that a step did not change."""
    noise: float | None = None
    """Relative change of the outputs by dropout in training."""
    on: str = ""
    """Description of a summary's samples."""

    @property
    def finite(self) -> bool:
        tensors = [tensor for kind in DESCRIPTIONS for tensor in self.of(kind).values() if tensor is not None]
        return all(bool(tensor.isfinite().all()) for tensor in tensors) and math.isfinite(self.noise or 0.0)

    def of(self, kind: Kind) -> Tensors:
        """Tensors of a kind, by name."""
        if kind == "loss":
            return {} if self.loss is None else {"the loss": torch.tensor(self.loss, dtype=torch.float64)}
        return {
            "outputs": self.outputs,
            "gradients": self.gradients,
            "inputs": self.inputs,
            "weights": self.weights,
        }.get(kind, {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """Departure of one result, and its limit."""

    kind: Kind
    by: float
    """Relative to its `rounding.scale`; infinite if shapes or presence differ."""
    allowed: float
    """Largest departure by rounding."""
    description: str
    """One sentence."""

    @property
    def holds(self) -> bool:
        return self.by <= self.allowed

    @property
    def share(self) -> float:
        """Departure over its limit."""
        return self.by / max(self.allowed, 1e-30)  # a limit of 0 does not divide by zero


@dataclass(frozen=True, slots=True)
class Comparison:
    """Departures of all results of two models, in the order of computation."""

    departures: tuple[Departure, ...]
    """All departures, including those within rounding."""

    @property
    def holds(self) -> bool:
        """True if all are within their limits."""
        return all(departure.holds for departure in self.departures)

    @property
    def wrong(self) -> Departure | None:
        """The largest departure relative to its limit, among those of the first kind that exceeds a limit.

        Nearly equal ones count as equal, and the first is returned; None if all are within their limits.
        """
        exceeding = [departure for departure in self.departures if not departure.holds]
        if not exceeding:
            return None
        threshold = ALIKE * self.largest_of(exceeding[0].kind).share
        return next(departure for departure in exceeding if departure.share >= threshold)

    def of(self, kind: Kind) -> tuple[Departure, ...]:
        return tuple(departure for departure in self.departures if departure.kind == kind)

    def largest_of(self, kind: Kind) -> Departure:
        """Returns the departure of a kind that is largest relative to its limit; the kind must have one."""
        return max(self.of(kind), key=lambda departure: departure.share)


def compare(expected: Numbers, actual: Numbers, tolerance: Tolerance) -> Comparison:
    """Compares the results of a model on this rank with those of the reference."""
    return Comparison(tuple(_Pair(expected, actual, tolerance).departures()))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the unsharded gradients of the parameters of this rank, None for no gradient. All ranks call it.

    A tied parameter has an entry for each of its names, since pipeline stages have it under different names.
    """
    replicas = model.__dict__.get("replicas")
    gradients: dict[str, torch.Tensor | None] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        gradient = whole_gradient(model, name, param)
        has_owner = replicas is not None and replicas.has_owner(param)
        gradients[name] = None if param.grad is None and not has_owner else gradient.clone()
    return gradients


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the unsharded weights, by the names of `gradients_of`. All ranks call it."""
    params = model.named_parameters(remove_duplicate=False)
    return {name: whole(*owner(model, name), param.detach().clone()) for name, param in params}


def and_more(names: Sequence[str]) -> str:
    """Returns the first of some names, and the number of the others."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


@dataclass(frozen=True, slots=True)
class _Pair:
    """Results of a model and its reference."""

    expected: Numbers
    actual: Numbers
    tolerance: Tolerance

    def departures(self) -> Iterator[Departure]:
        yield from self._count()
        for kind in ("outputs", "loss", "gradients", "inputs"):
            yield from self._of(kind)
        yield from self._dropout()
        yield from self._of("weights")
        if still := [name for name in self.actual.still if name not in self.expected.still]:
            description = f"the first step leaves {and_more(still)} as it was, in spite of a gradient"
            yield Departure(kind="weights", by=math.inf, allowed=0.0, description=description)

    def _of(self, kind: Kind) -> Iterator[Departure]:
        """Yields the departures of tensors that both have."""
        expected, computed, on = self.expected.of(kind), self.actual.of(kind), self.actual.on
        most, least = largest(expected), self.tolerance.least
        projected = kind == "outputs" and bool(on)
        ratio = self.tolerance.ratio if kind == "gradients" else 1.0
        for name, reference in expected.items():
            if name not in computed:
                continue
            actual, by = computed[name], math.inf
            over = max(self.tolerance.size, 1e-30) if projected else scale(reference, most, least)
            allowed = self._allowed(kind, name, over)
            subject = DESCRIPTIONS[kind].format(name) if not on else name if projected else name + on
            if reference is None or actual is None:
                # An unused parameter may have a gradient of zeros instead of none.
                present = reference if reference is not None else actual
                by = math.inf if present is not None and present.any() else 0.0
                difference = "is missing" if actual is None else "was not there before"
            elif reference.shape != actual.shape:
                difference = f"has shape {tuple(actual.shape)}, not {tuple(reference.shape)}"
            else:
                by = departure(reference, actual, over=over, ratio=ratio)
                difference = f"departs by {by:.2g}"
                most_factor = self.tolerance.factor
                if most_factor and by <= allowed and reference.numel() >= FEW and scale(reference) >= over:
                    factor = factor_between(reference, actual)
                    if abs(factor) > most_factor:
                        by, difference = allowed * abs(factor) / most_factor, f"is {1 + factor:.4g} times as large"
                if projected:
                    difference = f"depart by {by:.2g} of their size (tolerance {allowed:.2g})"
                elif on:
                    slack = allowed * over + (ratio - 1) * float(reference)
                    difference = (
                        f"is {float(actual):.6g}, the reference's {float(reference):.6g} (tolerance {slack:.2g})"
                    )
            yield Departure(kind=kind, by=by, allowed=allowed, description=f"{subject} {difference}")

    def _allowed(self, kind: Kind, name: str, over: float) -> float:
        """Returns the largest departure of a tensor that rounding explains, relative to `over`."""
        granted = self.tolerance
        if kind == "outputs":
            return granted.outputs
        if kind == "loss":
            return granted.loss + granted.loss_of_outputs * (granted.size or over) / over
        if kind == "gradients" and name in self.expected.vectors:
            return granted.vectors
        return granted.gradients

    def _count(self) -> Iterator[Departure]:
        """Yields a departure if the numbers of outputs differ; only the last stage of a pipeline has outputs."""
        actual, reference = (
            [None if output is None else output.shape for output in numbers.outputs.values()]
            for numbers in (self.actual, self.expected)
        )
        description = ""
        if self.actual.on and actual != reference:
            description = f"it returns {'other' if actual else 'no'} logits than the reference"
        elif actual and len(actual) != len(reference):
            description = f"outputs number {len(actual)}, not {len(reference)}"
        if description:
            yield Departure(kind="outputs", by=math.inf, allowed=0.0, description=description)

    def _dropout(self) -> Iterator[Departure]:
        """Yields the departure of the outputs' noise by dropout, which detects another rate."""
        actual, reference, slack = self.actual.noise, self.expected.noise, self.tolerance.outputs
        if actual is None or reference is None:
            return
        # Rounding is independent of the masks: squares add.
        most, expected_most = math.hypot(reference * self.tolerance.noise, slack), math.hypot(actual, slack)
        description = (
            f"in training the logits depart by {actual:.2g} of their size from those without dropout, the "
            f"reference's by {reference:.2g}"
        )
        by = max(actual / most, reference / self.tolerance.noise / expected_most)
        yield Departure(kind="dropout", by=by, allowed=1.0, description=description)


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
