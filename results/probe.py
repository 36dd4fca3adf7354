"""Numerical results of a configuration, compared to detect one that trains something else."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from ..base.errors import UsageError
from .schema import count, number, shortened


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
    names: tuple[str, ...] = ()
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

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready mapping; numbers that JSON cannot represent are the texts `nan`, `inf`, `-inf`."""
        return _as_data(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Probe":
        """Inverse of `to_dict`; unknown keys are ignored.

        Raises:
            UsageError: a field is missing or of another type.
        """
        values = _read(cls, data)
        for name in ("quiet", "step"):
            if values.get(name) is not None:
                values[name] = _make(Computed, _read(Computed, values[name]))
        return _make(cls, values)


_COUNTS = ("samples", "weights", "depth", "noise_numbers")
_NAMES = ("still", "brought", "rates", "trained", "frozen")
_LISTS = ("logits", "blocks", "vectors", "parameters")
_NOT_STORED = ("names",)
_COMPUTED = ("quiet", "step")


def _as_data(value: Any) -> Any:
    if isinstance(value, Probe | Computed):
        return {
            field.name: _as_data(getattr(value, field.name)) for field in fields(value) if field.name not in _NOT_STORED
        }
    if isinstance(value, tuple):
        return [_as_data(element) for element in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read(cls: type, data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise UsageError(f"a probe is a mapping, but got {shortened(data)}")
    values = {
        field.name: data[field.name] for field in fields(cls) if field.name in data and field.name not in _NOT_STORED
    }
    for name, value in values.items():
        if name in _NAMES or name in _LISTS:
            texts = name in _NAMES
            if not isinstance(value, list | tuple) or (texts and not all(isinstance(item, str) for item in value)):
                of = "texts" if texts else "numbers"
                raise UsageError(f"a probe's {name} must be a list of {of}, but got {shortened(value)}")
            values[name] = tuple(item if texts else _number(name, item) for item in value)
        elif name in _COUNTS:
            if not count(value):
                raise UsageError(f"a probe's {name} must be a whole number, but got {shortened(value)}")
        elif name not in _COMPUTED:
            values[name] = _number(name, value)
    return values


def _number(name: str, value: Any) -> float:
    if isinstance(value, float) or number(value) or value in ("nan", "inf", "-inf"):
        return float(value)
    raise UsageError(f"a probe's {name} must be a number, but got {shortened(value)}")


def _make(cls: type, values: dict[str, Any]) -> Any:
    missing = [field.name for field in fields(cls) if field.default is MISSING and values.get(field.name) is None]
    if missing:
        raise UsageError(f"a probe has no {', '.join(missing)}")
    return cls(**values)
