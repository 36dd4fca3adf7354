"""Predictions of a search: the estimator of its task."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import RunnerError, UsageError
from ..models import Workload
from ..space import Config, Space

if TYPE_CHECKING:
    from ..estimator import Estimator, Hardware

SAMPLE = 256
"""Number of configurations that are predicted to check that predicting works."""


def estimator_of(
    workload: Workload,
    space: Space,
    *,
    devices: int,
    hardware: "str | Path | Hardware | None",
    memory_limit_mib: float | None,
    free_batch: bool = False,
    without: Mapping[str, Any] | None = None,
    settle: Callable[[], None] = lambda: None,
) -> "Estimator":
    """Returns an estimator of a task's trials; nothing is traced yet.

    Args:
        workload: the one to train.
        space: what may vary.
        devices: devices of a trial.
        hardware: a name, a file or `Hardware`; None for this machine, which is measured for a second if it is not in
            the table; the result is cached.
        memory_limit_mib: memory of a device; None for all of it.
        free_batch: True if the samples per step vary.
        without: values of knobs that a configuration may lack.
        settle: called before this machine is measured; returns when the process's own background work is done.

    Raises:
        UsageError: the hardware is unknown.
    """
    from ..estimator import Estimator, TrainingSetup
    from ..estimator.request import machine_of, without_knobs

    machine, _ = machine_of(hardware, devices, settle)
    setup = TrainingSetup(
        devices=devices,
        seq_len=workload.seq_len,
        memory_limit_mib=memory_limit_mib,
        **{
            "global_batch": None if free_batch else workload.global_batch,
            **without_knobs(space),
            **(without or {}),
        },
    )
    return Estimator(workload, machine, setup)


def usable(estimator: "Estimator", space: Space, warn: Callable[[str], None]) -> "Estimator | None":
    """Returns the estimator if it can predict this space; otherwise None, and warns with the reason.

    Traces the model's variants; traces are cached on disk.
    """
    try:
        table = estimator.table(space.sample(min(SAMPLE, len(space)) if space.enumerable else SAMPLE, seed=0))
    except UsageError as error:
        warn(f"the search begins without an estimate: {error}")
        return None
    if not np.isfinite(table.step_ms).any():
        warn("the search begins without an estimate: no configuration has a finite one")
        return None
    return estimator


def estimate_to_begin_with(
    workload: Workload, space: Space, warn: Callable[[str], None], **how: Any
) -> "Estimator | None":
    """Returns the result of `estimator_of`; None if this machine cannot be measured, and warns with the reason."""
    try:
        found = estimator_of(workload, space, **how)
    except RunnerError as error:
        warn(f"the search begins without an estimate: {error}")
        return None
    if found.hardware.note:
        warn(found.hardware.note)
    return found


def peak_rate(estimator: "Estimator") -> Callable[[Config], float]:
    """Peak FLOP/s of a device at a configuration's precision."""
    default = estimator.training.precision
    return lambda config: estimator.hardware.rate(str(config.get("precision", default)))
