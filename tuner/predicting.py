"""What is predicted before anything runs: the estimate a search begins with, and the cluster that is simulated."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import RunnerError, UsageError
from ..models import Workload
from ..models.device import Device
from ..space import Config, Space

if TYPE_CHECKING:
    from ..runners.estimate import Estimator, Hardware

SAMPLE = 256
"""Configurations that are predicted to see whether predicting works."""


def described(hardware: "str | Path | Hardware | None") -> "Hardware":
    """The hardware to simulate.

    Raises:
        UsageError: none is given, or it is unknown.
    """
    from ..runners.estimate.hardware import find_hardware

    if hardware is None:
        raise UsageError(
            "the runner 'simulate' needs the hardware to simulate: --hardware NAME or FILE, such as h100-80gb"
        )
    return find_hardware(hardware)


def device_of(hardware: "Hardware") -> Device:
    """It as a kind of device."""
    from ..runners.estimate.planning import device_of as described_device

    return described_device(hardware)


def estimator_of(
    workload: Workload,
    space: Space,
    *,
    devices: int,
    hardware: "str | Path | Hardware | None",
    memory_limit_mib: float | None,
    free_batch: bool = False,
) -> "Estimator":
    """An estimator of these trials; nothing is traced yet.

    Args:
        workload: what is trained.
        space: what may vary.
        devices: of a trial.
        hardware: a name, a file or `Hardware`; None for this machine, which is measured for a second where it is
            not in the table, and remembered.
        memory_limit_mib: of a device; None for what it has.
        free_batch: whether the samples of a step vary.

    Raises:
        UsageError: the hardware is unknown.
    """
    from ..runners.estimate import Estimator, TrainingSetup
    from ..runners.estimate.question import machine_of, without_knobs

    machine, _ = machine_of(hardware, devices)
    setup = TrainingSetup(
        devices=devices,
        seq_len=workload.seq_len,
        global_batch=None if free_batch else workload.global_batch,
        memory_limit_mib=memory_limit_mib,
        **without_knobs(space),
    )
    return Estimator(workload, machine, setup)


def usable(estimator: "Estimator", space: Space, warn: Callable[[str], None]) -> "Estimator | None":
    """The estimator if it can predict this space; else None, and why is said once.

    Traces the model, which is cached on disk.
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
    """What `estimator_of` makes; None, and why is said once, where this machine cannot be measured."""
    try:
        return estimator_of(workload, space, **how)
    except RunnerError as error:
        warn(f"the search begins without an estimate: {error}")
        return None


def peak_rate(estimator: "Estimator") -> Callable[[Config], float]:
    """Peak FLOP/s of a device at a configuration's precision."""
    default = estimator.training.precision
    return lambda config: estimator.hardware.rate(str(config.get("precision", default)))


def simulator(estimator: "Estimator", *, concurrency: int | None, **terms: Any) -> Any:
    """The runner that answers for a cluster one does not have."""
    from ..runners.simulate import SimulateRunner, SimulationTerms

    return SimulateRunner(estimator, SimulationTerms(**terms), slots=concurrency or 1)
