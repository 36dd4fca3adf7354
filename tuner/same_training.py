"""What may vary of a training that goes on: how fast it computes, not what."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..base.device import Device
from ..base.errors import SpaceError
from ..knobs.lossy import LOSSY
from ..models import Workload
from ..models.spaces import fix_knob, make_space
from ..space import Config, Space

COMPUTED: Mapping[str, str] = {"precision": "fp32", "reduce_dtype": "fp32"}
"""The knobs that say what is computed beside how fast, those of `LOSSY`, and what a configuration without them has.
Attention, fusion and kernels compute the same up to rounding."""


def training_space(
    workload: Workload,
    device: Device,
    devices: int,
    like: Mapping[str, Any] | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> tuple[Space, tuple[str, ...]]:
    """The default space without what would make it another training, and what had to change all the same, in words.

    Args:
        workload: what is trained.
        device, devices: as for `make_space`.
        like: the configuration of before; None where the training begins.
        fixed: knobs that do not vary, whatever was before.

    Raises:
        SpaceError: the devices cannot share the global batch; a knob cannot have the value that is fixed.
    """
    fixed = fixed or {}
    lossy = like is not None and any(like.get(name) in values for name, values in LOSSY.items())
    space = make_space(workload, device, devices, allow=("lossy",) if lossy and workload.space is None else ())
    for name, value in fixed.items():
        fix_knob(space, name, value)
    told = []
    for name, plain in COMPUTED.items() if like is not None else ():
        assert like is not None
        if name not in space.by_name or space[name].derived or name in fixed:
            continue
        value = like.get(name, plain)
        try:
            space.fix(name, value)
        except SpaceError as error:
            exact = [each for each in space[name].values if each not in LOSSY[name]]
            space.override(name, exact or list(space[name].values))
            told.append(f"{name}={value} could not be kept: {error}")
    return space, tuple(told)


def with_samples_of(workload: Workload, like: Mapping[str, Any] | None) -> Workload:
    """The workload with as many samples of a step as a configuration has that says it all, be that the workload's own
    global batch or one that was chosen with the configuration."""
    if like is None or "micro_batch" not in like or "grad_accum" not in like:
        return workload
    total = like["micro_batch"] * like["grad_accum"] * like.get("dp", 1)
    return workload if total == workload.global_batch else replace(workload, global_batch=total)


def beginning_with(space: Space, config: Config) -> Space:
    """A copy of a space of which this is the default configuration."""
    made = space.copy()
    for knob in made.knobs:
        if not knob.derived and knob.name in config:
            knob.default = config[knob.name]
    return made


def smallest(space: Space) -> Space:
    """The part of a space that needs the least memory, as far as its knobs say so one by one."""
    made = space.copy()
    for knob in space.free:
        if knob.monotone_memory and knob.ordered:
            ascending = sorted(knob.values, key=lambda value: float(value or 0))
            value = ascending[0 if knob.monotone_memory > 0 else -1]
            with suppress(SpaceError):  # not beside the others
                made.fix(knob.name, value)
    return made
