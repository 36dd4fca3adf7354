"""Two models, by what they computed: the one comparison of `verify`, of the numerics table and of a dry run's `wrong`."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from .parallel.replicas import whole_gradient
from .parallel.sharding import owner, whole
from .rounding import Tolerance, departure, largest, scale

Kind = Literal["outputs", "loss", "gradients", "dropout", "weights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """What a model computed, gathered over ranks: whole tensors, or a summary of them where `on` is given.

    A summary has projections of the logits for outputs, norms for gradients, and of weights which a step did not move.
    What one of two has none of is not compared.
    """

    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Floating-point tensors of the output by what they are; of a summary one at most."""
    loss: float | None = None
    """The loss; None where another rank computes it, and where it says nothing."""
    gradients: Mapping[str, torch.Tensor | None] = field(default_factory=dict)
    """By the parameter's name, None where there is none; of a summary norms, by what they are the gradient of."""
    vectors: Collection[str] = ()
    """Which of a summary's norms are of biases and norms alone."""
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """After optimizer steps, by name."""
    still: Collection[str] = ()
    """Names of weights with a gradient that a step left as they were."""
    noise: float | None = None
    """By how much outputs in training depart from these, relative to their size: what dropout does."""
    on: str = ""
    """Of a summary: of which samples it is, in words."""

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

    @classmethod
    def of(
        cls,
        kind: Kind,
        name: str,
        what: str,
        expected: torch.Tensor | None,
        found: torch.Tensor | None,
        *,
        allowed: float,
        over: float,
        ratio: float = 1.0,
        number: bool = False,
    ) -> "Departure":
        """By how much a tensor departs.

        Args:
            kind: of what kind it is.
            name: which of them.
            what: what the sentence calls it.
            expected: what it is to be.
            found: what it is.
            allowed: the most that rounding may do, relative to `over`.
            over: what it is held to.
            ratio: a factor by which it may differ besides.
            number: whether the sentence states its value.
        """
        by = math.inf
        if expected is None or found is None:
            # A parameter that takes no part may have a gradient of zeros instead of none.
            present = expected if expected is not None else found
            by = math.inf if present is not None and present.any() else 0.0
            how = "is missing" if found is None else "was not there before"
        elif expected.shape != found.shape:
            how = f"has shape {tuple(found.shape)}, not {tuple(expected.shape)}"
        else:
            by = departure(expected, found, over=over, ratio=ratio)
            how = f"departs by {by:.2g}"
            if number:
                most = allowed * over + (ratio - 1) * float(expected)
                how = f"is {float(found):.6g}, the reference's {float(expected):.6g} (tolerance {most:.2g})"
        return cls(kind=kind, name=name, by=by, allowed=allowed, said=f"{what} {how}")

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
    def wrong(self) -> Departure | None:
        """The gravest of the first kind of which one is more than rounding; None where all are within it."""
        first = next((each for each in self.departures if not each.holds), None)
        return None if first is None else self.gravest(first.kind)

    @property
    def holds(self) -> bool:
        """Whether all are within what rounding may do."""
        return self.wrong is None

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
    parts = (_outputs, _loss, _gradients, _dropout, _weights)
    return Comparison(tuple(each for part in parts for each in part(expected, found, tolerance)))


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


def _outputs(expected: Numbers, found: Numbers, tolerance: Tolerance) -> Iterator[Departure]:
    if not found.outputs:
        return
    if found.on:
        yield _projections(expected, found, tolerance)
    elif len(expected.outputs) != len(found.outputs):
        said = f"outputs number {len(found.outputs)}, not {len(expected.outputs)}"
        yield Departure(kind="outputs", name="", by=math.inf, allowed=tolerance.outputs, said=said)
    else:
        most = largest(expected.outputs)
        for name, wanted in expected.outputs.items():
            over, allowed = scale(wanted, most, tolerance.least), tolerance.outputs
            yield Departure.of("outputs", name, name, wanted, found.outputs[name], allowed=allowed, over=over)


def _projections(expected: Numbers, found: Numbers, tolerance: Tolerance) -> Departure:
    ((name, wanted),), ((_, mine),) = expected.outputs.items(), found.outputs.items()
    if wanted.shape == mine.shape:
        by = departure(wanted, mine, over=tolerance.size or 1e-30)
        said = f"the {name} depart by {by:.2g} of their size (tolerance {tolerance.outputs:.2g})"
    else:
        by, said = math.inf, f"it returns {'other' if mine.numel() else 'no'} {name} than the reference"
    return Departure(kind="outputs", name=name, by=by, allowed=tolerance.outputs, said=said)


def _loss(expected: Numbers, found: Numbers, tolerance: Tolerance) -> Iterator[Departure]:
    if expected.loss is None or found.loss is None:
        return
    wanted, mine = (torch.tensor(each.loss, dtype=torch.float64) for each in (expected, found))
    over = scale(wanted)
    allowed = tolerance.loss + tolerance.loss_of_outputs * (tolerance.size or over) / over
    what, number = f"the loss{found.on}", bool(found.on)
    yield Departure.of("loss", "loss", what, wanted, mine, allowed=allowed, over=over, number=number)


def _gradients(expected: Numbers, found: Numbers, tolerance: Tolerance) -> Iterator[Departure]:
    most = largest(expected.gradients)
    for name, wanted in expected.gradients.items():
        if name in found.gradients:
            what = f"the norm of the gradient{name}{found.on}" if found.on else f"the gradient of {name}"
            yield Departure.of(
                "gradients",
                name,
                what,
                wanted,
                found.gradients[name],
                allowed=tolerance.vectors if name in expected.vectors else tolerance.gradients,
                over=scale(wanted, most, tolerance.least),
                ratio=tolerance.ratio,
                number=bool(found.on),
            )


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
    yield Departure(kind="dropout", name="noise", by=by, allowed=1.0, said=said)


def _weights(expected: Numbers, found: Numbers, tolerance: Tolerance) -> Iterator[Departure]:
    most, steepest = largest(expected.weights), largest(expected.gradients)
    for name, wanted in expected.weights.items():
        if name not in found.weights:
            continue
        mine, over = found.weights[name], scale(wanted, most, tolerance.least)
        allowed = tolerance.gradients
        if tolerance.weights is not None:
            gradient = tolerance.gradients * scale(expected.gradients.get(name), steepest, tolerance.least)
            allowed = tolerance.weights(gradient, mine) / over
        what = f"{name} after the optimizer's steps"
        yield Departure.of("weights", name, what, wanted, mine, allowed=allowed, over=over)
    still = [name for name in found.still if name not in expected.still]
    if still:
        said = f"the first step leaves {and_more(still)} as it was, in spite of a gradient"
        yield Departure(kind="weights", name=still[0], by=math.inf, allowed=0.0, said=said)


def and_more(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
