"""Lossy values: those that trade accuracy for speed, so that a configuration with one is another training.

They are in a space only where somebody asked for them. run.yaml says under `asked.lossy`, for each knob that
has some, which of its values in the space they are; from there every trial knows of itself (`Trial.lossy`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LOSSY: Mapping[str, Mapping[Any, str]] = {
    "precision": {
        "bf16_pure": "there are no fp32 master weights",
        "fp8": "matrix products are computed in 8 bits",
        "fp8_rowwise": "matrix products are computed in 8 bits",
    },
    "reduce_dtype": {"bf16": "gradients are rounded to bf16 before replicas average them"},
}
"""Of the standard knobs, values that are another training than float32's, and why: small updates are lost, or what
is multiplied or added up is rounded coarsely. Autocast (`bf16`, `fp16`) keeps fp32 weights and sums."""

Lossy = Mapping[str, Sequence[Any]]
"""Of each knob that has some, its lossy values."""


def lossy_of(document: Mapping[str, Any] | None) -> Lossy:
    """The lossy values of the run that a run.yaml is of; none where it does not say."""
    asked = (document or {}).get("asked")
    found = asked.get("lossy") if isinstance(asked, Mapping) else None
    if not isinstance(found, Mapping):
        return {}
    return {str(name): tuple(values) for name, values in found.items() if isinstance(values, list | tuple)}


def lossy_in(config: Mapping[str, Any], lossy: Lossy) -> tuple[str, ...]:
    """The knobs of a configuration that have a lossy value."""
    return tuple(name for name, values in lossy.items() if name in config and config[name] in values)


def lossy_values(config: Mapping[str, Any], knobs: Iterable[str]) -> str:
    """What these knobs of a configuration have, as `precision=bf16_pure`; empty for no knobs."""
    return ", ".join(f"{name}={config[name]}" for name in knobs)


def exactness(knobs: Iterable[str]) -> str:
    """What configurations without a lossy value of these knobs have, in words; empty for no knobs."""
    return "without lossy values" if set(knobs) else ""
