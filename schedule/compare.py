"""Two models, by what they computed: the one comparison of `verify`, of the numerics table and of a dry run's `wrong`."""

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
SAID: Mapping[Kind, str] = {
    "outputs": "{}",
    "loss": "{}",
    "gradients": "the gradient of {}",
    "inputs": "the gradient of {}",
    "weights": "{} after the optimizer's steps",
}
"""What sentences call a tensor of a kind."""
ALIKE = 0.9
"""What is this share of the gravest is as grave: which of them is named hangs on no rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """What a model computed, gathered over ranks: whole tensors, or a summary of them where `on` is given.

    A summary has projections of the logits for outputs, norms for gradients, and of weights which a step did not move;
    its names are what sentences call them. What one of two has none of is not compared, but for outputs of a summary.
    """

    outputs: Tensors = field(default_factory=dict)
    """Floating-point tensors of the output by name; of a summary one at most."""
    loss: float | None = None
    """The loss; None where another rank computes it, and where it says nothing."""
    gradients: Tensors = field(default_factory=dict)
    """By the parameter's name, None where there is none."""
    inputs: Tensors = field(default_factory=dict)
    """Gradients of the inputs, by name."""
    vectors: Collection[str] = ()
    """Which of a summary's norms are of biases and norms alone."""
    weights: Tensors = field(default_factory=dict)
    """After optimizer steps, by name."""
    still: Collection[str] = ()
    """Names of weights with a gradient that a step left as they were."""
    noise: float | None = None
    """By how much outputs in training depart from these, relative to their size: what dropout does."""
    on: str = ""
    """Of a summary: on which samples it is, in words."""

    @property
    def finite(self) -> bool:
        """Whether all are finite."""
        tensors = [each for kind in SAID for each in self.of(kind).values() if each is not None]
        return all(bool(each.isfinite().all()) for each in tensors) and math.isfinite(self.noise or 0.0)

    def of(self, kind: Kind) -> Tensors:
        """The tensors of a kind, by name."""
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
    """By how much one of the numbers departs, and how much it may."""

    kind: Kind
    """Of what kind it is."""
    by: float
    """Relative to its `rounding.scale`; infinite where shapes or presence differ."""
    allowed: float
    """The most that rounding may do."""
    said: str
    """What departs, and how: a sentence."""

    @property
    def holds(self) -> bool:
        """Whether it is within what rounding may do."""
        return self.by <= self.allowed

    @property
    def share(self) -> float:
        """How many times what is allowed it is."""
        return self.by / max(self.allowed, 1e-30)


@dataclass(frozen=True, slots=True)
class Comparison:
    """By how much everything departs that two models computed, in the order in which they compute it."""

    departures: tuple[Departure, ...]
    """All of them, those within rounding included."""

    @property
    def holds(self) -> bool:
        """Whether all are within what rounding may do."""
        return all(each.holds for each in self.departures)

    @property
    def wrong(self) -> Departure | None:
        """The gravest of the first kind of which one is more than rounding, of several that are as grave the first; None
        where all are within it."""
        over = [each for each in self.departures if not each.holds]
        if not over:
            return None
        grave = ALIKE * self.gravest(over[0].kind).share
        return next(each for each in over if each.share >= grave)

    def of(self, kind: Kind) -> tuple[Departure, ...]:
        """Those of a kind."""
        return tuple(each for each in self.departures if each.kind == kind)

    def gravest(self, kind: Kind) -> Departure:
        """The one of a kind that takes most of what is allowed to it; there must be one."""
        return max(self.of(kind), key=lambda each: each.share)


def compare(expected: Numbers, found: Numbers, tolerance: Tolerance) -> Comparison:
    """By how much a model departs from another that it is to be the same as.

    Args:
        expected: of the other.
        found: of the model; of one that is spread over ranks, what this rank has.
        tolerance: what rounding may do to either.
    """
    return Comparison(tuple(_Pair(expected, found, tolerance, largest(expected.gradients)).departures()))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Gradients as one process has them, on every rank that has the parameter, by all names of tied ones, which pipeline
    stages hold under different ones; None where there is none. All ranks call it."""
    replicas = model.__dict__.get("replicas")
    out: dict[str, torch.Tensor | None] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        gradient = whole_gradient(model, name, param)
        elsewhere = replicas is not None and replicas.has_owner(param)
        out[name] = None if param.grad is None and not elsewhere else gradient.clone()
    return out


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights as one process has them, by the names of `gradients_of`. All ranks call it."""
    params = model.named_parameters(remove_duplicate=False)
    return {name: whole(*owner(model, name), param.detach().clone()) for name, param in params}


def and_more(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two models, of which one is to be the same as the other."""

    expected: Numbers
    found: Numbers
    tolerance: Tolerance
    steepest: float
    """The largest magnitude in any gradient."""

    def departures(self) -> Iterator[Departure]:
        yield from self._count()
        for kind in ("outputs", "loss", "gradients", "inputs"):
            yield from self._of(kind)
        yield from self._dropout()
        yield from self._of("weights")
        if still := [name for name in self.found.still if name not in self.expected.still]:
            said = f"the first step leaves {and_more(still)} as it was, in spite of a gradient"
            yield Departure(kind="weights", by=math.inf, allowed=0.0, said=said)

    def _of(self, kind: Kind) -> Iterator[Departure]:
        """Of the tensors that both have."""
        expected, found, on = self.expected.of(kind), self.found.of(kind), self.found.on
        most, least = largest(expected), self.tolerance.least
        projected = kind == "outputs" and bool(on)
        ratio = self.tolerance.ratio if kind == "gradients" else 1.0
        for name, wanted in expected.items():
            if name not in found:
                continue
            mine, by = found[name], math.inf
            over = max(self.tolerance.size, 1e-30) if projected else scale(wanted, most, least)
            allowed = self._allowed(kind, name, over)
            what = SAID[kind].format(name) if not on else name if projected else name + on
            if wanted is None or mine is None:
                # A parameter that takes no part may have a gradient of zeros instead of none.
                present = wanted if wanted is not None else mine
                by = math.inf if present is not None and present.any() else 0.0
                how = "is missing" if mine is None else "was not there before"
            elif wanted.shape != mine.shape:
                how = f"has shape {tuple(mine.shape)}, not {tuple(wanted.shape)}"
            else:
                by = departure(wanted, mine, over=over, ratio=ratio)
                how = f"departs by {by:.2g}"
                most_factor = self.tolerance.factor
                if most_factor and by <= allowed and wanted.numel() >= FEW and scale(wanted) >= over:
                    apart = factor_between(wanted, mine)
                    if abs(apart) > most_factor:
                        by, how = allowed * abs(apart) / most_factor, f"is {1 + apart:.4g} times as large"
                if projected:
                    how = f"depart by {by:.2g} of their size (tolerance {allowed:.2g})"
                elif on:
                    slack = allowed * over + (ratio - 1) * float(wanted)
                    how = f"is {float(mine):.6g}, the reference's {float(wanted):.6g} (tolerance {slack:.2g})"
            yield Departure(kind=kind, by=by, allowed=allowed, said=f"{what} {how}")

    def _allowed(self, kind: Kind, name: str, over: float) -> float:
        """The most that rounding may do to a tensor, relative to `over`."""
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
        """That there are other outputs; of the stages of a pipeline only the last one has any."""
        mine, wanted = (
            [None if each is None else each.shape for each in of.outputs.values()] for of in (self.found, self.expected)
        )
        said = ""
        if self.found.on and mine != wanted:
            said = f"it returns {'other' if mine else 'no'} logits than the reference"
        elif mine and len(mine) != len(wanted):
            said = f"outputs number {len(mine)}, not {len(wanted)}"
        if said:
            yield Departure(kind="outputs", by=math.inf, allowed=0.0, said=said)

    def _dropout(self) -> Iterator[Departure]:
        """That dropout is of another rate."""
        mine, wanted, slack = self.found.noise, self.expected.noise, self.tolerance.outputs
        if mine is None or wanted is None:
            return
        # Rounding is independent of the masks: squares add.
        most, others = math.hypot(wanted * self.tolerance.noise, slack), math.hypot(mine, slack)
        said = (
            f"in training the logits depart by {mine:.2g} of their size from those without dropout, the "
            f"reference's by {wanted:.2g}"
        )
        by = max(mine / most, wanted / self.tolerance.noise / others)
        yield Departure(kind="dropout", by=by, allowed=1.0, said=said)
