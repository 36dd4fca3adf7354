"""Two models, by what they computed: the one comparison of `verify`, of the numerics table and of a dry run's `wrong`."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from .parallel.replicas import whole_gradient
from .parallel.sharding import owner, whole
from .rounding import Tolerance, departure, largest, scale

Tensors = Mapping[str, torch.Tensor | None]
Kind = Literal["outputs", "loss", "gradients", "dropout", "weights"]
WHAT = {
    "outputs": "{}",
    "loss": "{}",
    "gradients": "the gradient of {}",
    "weights": "{} after the optimizer's steps",
}
"""What sentences call a tensor of a kind."""
ALIKE = 1 - 1e-4
"""Departures that are this near are equally grave."""


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
        groups = (self.outputs, self.gradients, self.weights)
        tensors = [each for group in groups for each in group.values() if each is not None]
        numbers = [each for each in (self.loss, self.noise) if each is not None]
        return all(map(math.isfinite, numbers)) and all(bool(each.isfinite().all()) for each in tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """By how much one of the numbers departs, and how much it may."""

    kind: Kind
    """Of what kind it is."""
    name: str
    """Which of them: as `Numbers` has it."""
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

    def __str__(self) -> str:
        return self.said


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
        """The gravest of the first kind of which one is more than rounding; None where all are within it."""
        if self.holds:
            return None
        kind = next(each.kind for each in self.departures if not each.holds)
        return next(each for each in self.of(kind) if each.share >= ALIKE * self.gravest(kind).share)

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
    kinds = (_outputs, _loss, _gradients, _dropout, _weights)
    return Comparison(tuple(each for kind in kinds for each in kind(expected, found, tolerance)))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Gradients as one process has them, on every rank that has the parameter, by all names of tied ones, which pipeline
    stages hold under different ones; None where there is none. All ranks call it."""
    replicas = model.__dict__.get("replicas")
    elsewhere = replicas is not None and replicas.owners
    out: dict[str, torch.Tensor | None] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        gradient = whole_gradient(model, name, param)
        out[name] = None if param.grad is None and not elsewhere else gradient.clone()
    return out


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights as one process has them, by the names of `gradients_of`. All ranks call it."""
    params = model.named_parameters(remove_duplicate=False)
    return {name: whole(*owner(model, name), param.detach().clone()) for name, param in params}


def and_more(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _outputs(expected: Numbers, found: Numbers, tolerance: Tolerance) -> Iterator[Departure]:
    pair = expected.outputs, found.outputs
    if len(found.outputs) == len(expected.outputs):
        size = tolerance.size if found.on else None
        yield from _each("outputs", *pair, tolerance, lambda name, over: tolerance.outputs, size=size)
    elif found.on or found.outputs:  # of a pipeline only the last stage has any
        said = f"outputs number {len(found.outputs)}, not {len(expected.outputs)}"
        if found.on:
            said = f"it returns {'other' if found.outputs else 'no'} logits than the reference"
        yield Departure(kind="outputs", name="", by=math.inf, allowed=tolerance.outputs, said=said)


def _loss(expected: Numbers, found: Numbers, tolerance: Tolerance) -> Iterator[Departure]:
    def allowed(name: str, over: float) -> float:
        return tolerance.loss + tolerance.loss_of_outputs * (tolerance.size or over) / over

    if expected.loss is not None and found.loss is not None:
        wanted, mine = ({"the loss": torch.tensor(each, dtype=torch.float64)} for each in (expected.loss, found.loss))
        yield from _each("loss", wanted, mine, tolerance, allowed, on=found.on)


def _gradients(expected: Numbers, found: Numbers, tolerance: Tolerance) -> Iterator[Departure]:
    def allowed(name: str, over: float) -> float:
        return tolerance.vectors if name in expected.vectors else tolerance.gradients

    pair = expected.gradients, found.gradients
    return _each("gradients", *pair, tolerance, allowed, on=found.on, ratio=tolerance.ratio)


def _dropout(expected: Numbers, found: Numbers, tolerance: Tolerance) -> Iterator[Departure]:
    if expected.noise is None or found.noise is None:
        return
    # Rounding is independent of the masks: squares add.
    high = math.hypot(expected.noise * tolerance.noise, tolerance.outputs)
    low = math.hypot(found.noise, tolerance.outputs)
    said = (
        f"in training the logits depart by {found.noise:.2g} of their size from those without dropout, the "
        f"reference's by {expected.noise:.2g}"
    )
    by = max(found.noise / high, expected.noise / tolerance.noise / low)
    yield Departure(kind="dropout", name="", by=by, allowed=1.0, said=said)


def _weights(expected: Numbers, found: Numbers, tolerance: Tolerance) -> Iterator[Departure]:
    steepest = largest(expected.gradients)

    def allowed(name: str, over: float) -> float:
        if tolerance.weights is None:
            return tolerance.gradients
        gradient = tolerance.gradients * scale(expected.gradients.get(name), steepest, tolerance.least)
        return tolerance.weights(gradient, found.weights[name]) / over

    yield from _each("weights", expected.weights, found.weights, tolerance, allowed)
    if still := [name for name in found.still if name not in expected.still]:
        said = f"the first step leaves {and_more(still)} as it was, in spite of a gradient"
        yield Departure(kind="weights", name=still[0], by=math.inf, allowed=0.0, said=said)


def _each(
    kind: Kind,
    expected: Tensors,
    found: Tensors,
    tolerance: Tolerance,
    allowed: Callable[[str, float], float],
    *,
    on: str = "",
    size: float | None = None,
    ratio: float = 1.0,
) -> Iterator[Departure]:
    """Departures of the tensors that both have; `allowed` is of a name and of what it is held to, which is `size` for
    projections of outputs."""
    most = largest(expected)
    for name, wanted in expected.items():
        if name not in found:
            continue
        mine = found[name]
        over = scale(wanted, most, tolerance.least) if size is None else size or 1e-30
        limit, by = allowed(name, over), math.inf
        what = name + on if on or size is not None else WHAT[kind].format(name)
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
            if size is not None:
                how = f"depart by {by:.2g} of their size (tolerance {limit:.2g})"
            elif on:
                slack = limit * over + (ratio - 1) * float(wanted)
                how = f"is {float(mine):.6g}, the reference's {float(wanted):.6g} (tolerance {slack:.2g})"
        yield Departure(kind=kind, name=name, by=by, allowed=limit, said=f"{what} {how}")
