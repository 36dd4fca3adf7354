"""Numerical results of a configuration, compared to detect one that trains something else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """Loss and gradients on some samples, over all ranks or of one rank's share."""

    loss: float
    """Mean loss."""
    gradient: float
    """Norm of the gradient of all parameters."""
    blocks: tuple[float, ...] = ()
    """Norm of the gradient of each repeated block, in the model's order."""
    vectors: tuple[float, ...] = ()
    """Gradient norm of each block's biases and norms alone, then of those outside blocks. Ranks that do not sum their
    parts of these hardly change the total norm.
    """
    parameters: tuple[float, ...] = ()
    """Norm of the gradient of each parameter, in the model's order."""
    samples: int

    @classmethod
    def together(cls, shares: "Sequence[Computed]") -> "Computed":
        """Combines the shares of all ranks: equal losses, and gradients that are pieces of the whole."""
        return cls(
            loss=sum(share.loss for share in shares) / len(shares),
            gradient=math.hypot(*(share.gradient for share in shares)),
            blocks=tuple(math.hypot(*norms) for norms in zip(*(share.blocks for share in shares))),
            vectors=tuple(math.hypot(*norms) for norms in zip(*(share.vectors for share in shares))),
            parameters=tuple(math.hypot(*norms) for norms in zip(*(share.parameters for share in shares))),
            samples=shares[0].samples,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Results of a configuration on one fixed batch with all randomness off, and in its first training step.

    Samples, weights and projections follow from the run's seed. Between configurations these numbers may differ only
    by rounding, and in training also by dropout.
    """

    quiet: Computed
    """On the fixed batch."""
    step: Computed | None = None
    """In the first training step that was not skipped; None for models with statistics over micro-batches."""
    logits: tuple[float, ...] = ()
    """Random projections of the logits on the fixed batch, each of a logit's size; empty without logits."""
    noise: float = 0.0
    """Deviation of the logits in training from these, relative to their size, caused by dropout."""
    noise_numbers: int = 0
    """Number of values whose root mean square is `noise`."""
    still: tuple[str, ...] = ()
    """Parameters that have a gradient and that the first step left unchanged."""
    brought: tuple[str, ...] = ()
    """Parameters that the schedule added. A model with other weights computes something else."""
    rates: tuple[str, ...] = ()
    """Rates of dropout that are active in training, as `path=rate` with a star for each number in the path."""
    trained: tuple[str, ...] = ()
    """Parameters that are trained, by such paths; empty if unknown."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not, by such paths."""
    names: tuple[str, ...] = field(default=(), metadata={"stored": False})
    """Names of the parameters, in the model's order. Not stored: they are those of the reference's model."""
    weights: int = 0
    """Number of weights of the model before it is scheduled; 0 if unknown. A user's own knob may change it."""
    depth: int = 1
    """Layers with weights of at least two dimensions, for the growth of rounding."""
    roundoff: float
    """Unit roundoff of the arithmetic: half the distance from 1 to the next number."""
    loss_roundoff: float
    """Unit roundoff of the format in which the loss is computed."""

    @property
    def logits_size(self) -> float:
        """Root mean square of the projections, an estimate of that of the logits; 0 without any."""
        return math.sqrt(sum(projection**2 for projection in self.logits) / max(1, len(self.logits)))
