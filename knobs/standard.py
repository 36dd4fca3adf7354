"""The standard knobs: what each asks for where it asks nothing, and which values it can have."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .meaning import FORMATS, REDUCED

MOST_DEVICES = 1 << 20
"""Of one training."""


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, and not a flag."""
    return isinstance(value, int) and not isinstance(value, bool)


def _degree(value: Any) -> bool:
    return is_whole(value) and 1 <= value <= MOST_DEVICES


def _size(value: Any) -> bool:
    return is_whole(value) and value >= 1


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


class StandardKnob(NamedTuple):
    """A knob that means the same whatever is tuned."""

    neutral: Any
    """The value that asks nothing of a framework."""
    can_be: Callable[[Any], bool]
    """Whether it can have a value: a callable's space may call other things by its name."""
    memory: int = 0
    """1 where a larger value needs more memory whoever trains, -1 where it needs less, 0 where neither is certain."""


STANDARD: Mapping[str, StandardKnob] = {
    "tp": StandardKnob(1, _degree, -1),
    "sp": StandardKnob(1, _degree, -1),
    "cp": StandardKnob(1, _degree, -1),
    "pp": StandardKnob(1, _degree, -1),
    "dp": StandardKnob(1, _degree),
    "zero": StandardKnob(0, lambda value: is_whole(value) and 0 <= value <= 3, -1),
    "hsdp": StandardKnob(1, _degree, 1),
    "sequence_parallel": StandardKnob(False, _flag),
    "pipeline_schedule": StandardKnob(None, lambda value: value is None or isinstance(value, str)),
    "virtual_stages": StandardKnob(1, _degree),
    "micro_batch": StandardKnob(1, _size, 1),
    "grad_accum": StandardKnob(1, _size),
    "checkpoint_ratio": StandardKnob(0, _share, -1),
    "precision": StandardKnob("fp32", lambda value: value in FORMATS),
    "attention": StandardKnob(None, lambda value: value is None or isinstance(value, str)),
    "fusion": StandardKnob(False, _flag),
    "fused_optimizer": StandardKnob(None, lambda value: value is None or _flag(value)),
    "kernels": StandardKnob(False, _flag),
    "offload": StandardKnob("none", lambda value: isinstance(value, str)),
    "reduce_dtype": StandardKnob("fp32", lambda value: value in REDUCED),
}
