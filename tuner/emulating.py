"""Emulated trials of a search: their runner, their memory, and what is refused."""

from typing import TYPE_CHECKING, Any

from ..base.device import Device, available_memory_mib, usable_cores
from ..base.errors import UsageError
from ..estimator.constants import Constants
from ..estimator.hardware import find_hardware, recognise
from ..runners import Runner, TimingPlan, TrialTerms
from ..runners.emulate import EmulateRunner, EmulationTerms, wire_here
from ..runners.host import HostAgent

if TYPE_CHECKING:
    from ..estimator import Estimator
    from .request import Request
    from .task import Task

EMULATE = "emulate"
"""The runner's name."""
HOST_SHARE = 0.9
"""Of the host's free memory, what an emulated rank may take."""


def memory_of_emulated(hardware: Any, device: Device, devices: int, given_mib: float | None) -> float | None:
    """Memory of an emulated rank, MiB: that of the hardware, and no more than the device here has. On the CPU that is
    emulated as itself, each rank's share.

    Raises:
        UsageError: the hardware is unknown.
    """
    if device.type == "cuda":
        named = None if hardware is None else find_hardware(hardware).memory_mib - Constants().context_mib
        return _least(given_mib, named)
    room = float(int(available_memory_mib() * HOST_SHARE))
    if given_mib is not None:
        return min(given_mib, room)
    if hardware is None:
        return float(int(room / devices))
    found = find_hardware(hardware)
    return float(int(min(found.memory_mib - (Constants().context_mib if found.kind != "cpu" else 0.0), room)))


def _least(*values: float | None) -> float | None:
    return min((each for each in values if each is not None), default=None)


def emulator(
    request: "Request",
    task: "Task",
    limit_mib: float | None,
    estimator: "Estimator | None",
    plan: TimingPlan,
    agent: HostAgent | None,
    compiles: bool,
) -> Runner:
    """The runner of emulated trials, ready for the first.

    Raises:
        UsageError: the hardware is neither known nor measurable here, or its times cannot be measured on this device.
    """
    assert task.workload is not None, "what is emulated is a workload"
    if estimator is None:
        raise UsageError(
            "the runner 'emulate' prices communication by the hardware's links, but this machine could not be measured: "
            "name its hardware by --hardware NAME or FILE"
        )
    hardware, device = estimator.hardware, task.device
    if not request.memory_only and not _is(hardware.name, hardware.kind, device):
        raise UsageError(
            f"times measured on {device.name} say nothing about {hardware.name}: add --memory-only, which measures memory and "
            "predicts the time, or leave --hardware out"
        )
    threads = max(1, usable_cores() // task.devices) if device.type == "cpu" else None
    terms = TrialTerms(
        device=device,
        devices=task.devices,
        memory_limit_mib=limit_mib,
        timeout_s=request.timeout_s,
        threads=(usable_cores() if request.memory_only else threads) if device.type == "cpu" else None,
        plan=plan,
        seed=request.seed,
    )
    made = EmulateRunner(
        task.workload,
        terms,
        EmulationTerms(hardware=hardware, ranks=request.ranks, memory_only=request.memory_only),
        wire=wire_here(hardware, task.devices, threads or 1),
        estimator=estimator,
        compiles=compiles,
        agent=agent,
    )
    try:
        made.wait_ready()
    except BaseException:
        made.close()
        raise
    return made


def _is(name: str, kind: str, device: Device) -> bool:
    """True if hardware is the device here."""
    if device.type == "cpu":
        return kind == "cpu"
    found = recognise(device.name, device.memory_mib)
    return name.startswith("this-") or (found is not None and found.name == name)
