"""Compares the results of two models, for `verify`, the numerics table and a dry run's status `wrong`."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from .parallel.replicas import whole_gradient
from .parallel.sharding import owner, whole
from .rounding import FEW, Tolerance, departure, factor_between, largest, scale

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
    return Comparison(tuple(_Pair(expected, actual, tolerance, largest(expected.gradients)).departures()))


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
    steepest: float
    """Largest magnitude in any gradient."""

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
        if kind == "weights" and granted.weights is not None:
            gradient = scale(self.expected.gradients.get(name), self.steepest, granted.least)
            return granted.weights(granted.gradients * gradient, self.actual.weights[name]) / over
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
