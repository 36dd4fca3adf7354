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
    """Results of a model, gathered over ranks: whole tensors, or a summary of them if `on` is given.

    A summary has projections of the logits as outputs, norms as gradients, and weights that a step did not move; its
    names are used in messages. Kinds that one of two models lacks are not compared, except outputs of a summary.
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
        tensors = [each for kind in DESCRIPTIONS for each in self.of(kind).values() if each is not None]
        return all(bool(each.isfinite().all()) for each in tensors) and math.isfinite(self.noise or 0.0)

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
        return self.by / max(self.allowed, 1e-30)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Departures of all results of two models, in the order of computation."""

    departures: tuple[Departure, ...]
    """All departures, including those within rounding."""

    @property
    def holds(self) -> bool:
        """True if all are within their limits."""
        return all(each.holds for each in self.departures)

    @property
    def wrong(self) -> Departure | None:
        """The largest departure, relative to its limit, of the first kind with one beyond its limit, the first of
        nearly equal ones; None if all are within their limits.
        """
        over = [each for each in self.departures if not each.holds]
        if not over:
            return None
        least = ALIKE * self.largest_of(over[0].kind).share
        return next(each for each in over if each.share >= least)

    def of(self, kind: Kind) -> tuple[Departure, ...]:
        return tuple(each for each in self.departures if each.kind == kind)

    def largest_of(self, kind: Kind) -> Departure:
        """The departure of a kind that is largest relative to its limit; there must be one."""
        return max(self.of(kind), key=lambda each: each.share)


def compare(expected: Numbers, found: Numbers, tolerance: Tolerance) -> Comparison:
    """Compares the results of a model, those of this rank, with a reference's."""
    return Comparison(tuple(_Pair(expected, found, tolerance, largest(expected.gradients)).departures()))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Whole gradients on every rank that has the parameter, by all names of tied ones, which pipeline stages have
    under different names; None if there is no gradient. All ranks call it.
    """
    replicas = model.__dict__.get("replicas")
    out: dict[str, torch.Tensor | None] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        gradient = whole_gradient(model, name, param)
        elsewhere = replicas is not None and replicas.has_owner(param)
        out[name] = None if param.grad is None and not elsewhere else gradient.clone()
    return out


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole weights, by the names of `gradients_of`. All ranks call it."""
    params = model.named_parameters(remove_duplicate=False)
    return {name: whole(*owner(model, name), param.detach().clone()) for name, param in params}


def and_more(names: Sequence[str]) -> str:
    """The first of some names, and the number of the others."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


@dataclass(frozen=True, slots=True)
class _Pair:
    """Results of a model and its reference."""

    expected: Numbers
    found: Numbers
    tolerance: Tolerance
    steepest: float
    """Largest magnitude in any gradient."""

    def departures(self) -> Iterator[Departure]:
        yield from self._count()
        for kind in ("outputs", "loss", "gradients", "inputs"):
            yield from self._of(kind)
        yield from self._dropout()
        yield from self._of("weights")
        if still := [name for name in self.found.still if name not in self.expected.still]:
            description = f"the first step leaves {and_more(still)} as it was, in spite of a gradient"
            yield Departure(kind="weights", by=math.inf, allowed=0.0, description=description)

    def _of(self, kind: Kind) -> Iterator[Departure]:
        """Departures of tensors that both have."""
        expected, found, on = self.expected.of(kind), self.found.of(kind), self.found.on
        most, least = largest(expected), self.tolerance.least
        projected = kind == "outputs" and bool(on)
        ratio = self.tolerance.ratio if kind == "gradients" else 1.0
        for name, wanted in expected.items():
            if name not in found:
                continue
            actual, by = found[name], math.inf
            over = max(self.tolerance.size, 1e-30) if projected else scale(wanted, most, least)
            allowed = self._allowed(kind, name, over)
            what = DESCRIPTIONS[kind].format(name) if not on else name if projected else name + on
            if wanted is None or actual is None:
                # An unused parameter may have a gradient of zeros instead of none.
                present = wanted if wanted is not None else actual
                by = math.inf if present is not None and present.any() else 0.0
                how = "is missing" if actual is None else "was not there before"
            elif wanted.shape != actual.shape:
                how = f"has shape {tuple(actual.shape)}, not {tuple(wanted.shape)}"
            else:
                by = departure(wanted, actual, over=over, ratio=ratio)
                how = f"departs by {by:.2g}"
                most_factor = self.tolerance.factor
                if most_factor and by <= allowed and wanted.numel() >= FEW and scale(wanted) >= over:
                    factor = factor_between(wanted, actual)
                    if abs(factor) > most_factor:
                        by, how = allowed * abs(factor) / most_factor, f"is {1 + factor:.4g} times as large"
                if projected:
                    how = f"depart by {by:.2g} of their size (tolerance {allowed:.2g})"
                elif on:
                    slack = allowed * over + (ratio - 1) * float(wanted)
                    how = f"is {float(actual):.6g}, the reference's {float(wanted):.6g} (tolerance {slack:.2g})"
            yield Departure(kind=kind, by=by, allowed=allowed, description=f"{what} {how}")

    def _allowed(self, kind: Kind, name: str, over: float) -> float:
        """Largest departure of a tensor by rounding, relative to `over`."""
        granted = self.tolerance
        if kind == "outputs":
            return granted.outputs
        if kind == "loss":
            return granted.loss + granted.loss_of_outputs * (granted.size or over) / over
        if kind == "gradients" and name in self.expected.vectors:
            return granted.vectors
        if kind == "weights" and granted.weights is not None:
            gradient = scale(self.expected.gradients.get(name), self.steepest, granted.least)
            return granted.weights(granted.gradients * gradient, self.found.weights[name]) / over
        return granted.gradients

    def _count(self) -> Iterator[Departure]:
        """Departure of the number of outputs; only the last stage of a pipeline has outputs."""
        actual, wanted = (
            [None if each is None else each.shape for each in of.outputs.values()] for of in (self.found, self.expected)
        )
        description = ""
        if self.found.on and actual != wanted:
            description = f"it returns {'other' if actual else 'no'} logits than the reference"
        elif actual and len(actual) != len(wanted):
            description = f"outputs number {len(actual)}, not {len(wanted)}"
        if description:
            yield Departure(kind="outputs", by=math.inf, allowed=0.0, description=description)

    def _dropout(self) -> Iterator[Departure]:
        """Departure of the rate of dropout."""
        actual, wanted, slack = self.found.noise, self.expected.noise, self.tolerance.outputs
        if actual is None or wanted is None:
            return
        # Rounding is independent of the masks: squares add.
        most, others = math.hypot(wanted * self.tolerance.noise, slack), math.hypot(actual, slack)
        description = (
            f"in training the logits depart by {actual:.2g} of their size from those without dropout, the "
            f"reference's by {wanted:.2g}"
        )
        by = max(actual / most, wanted / self.tolerance.noise / others)
        yield Departure(kind="dropout", by=by, allowed=1.0, description=description)
