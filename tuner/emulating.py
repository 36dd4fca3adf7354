"""Emulated trials of a search: their runner, their memory, and the checks of a request for them."""

from typing import TYPE_CHECKING, Any

from ..base.device import Device, share_of_host, usable_cores
from ..base.errors import UsageError
from ..base.option import option
from ..estimator.constants import Constants
from ..estimator.hardware import find_hardware
from ..estimator.measuring import table_entry
from ..models import Workload
from ..models.architecture import Architecture
from ..models.families.standard import StandardSchedule
from ..runners import Runner, TimingPlan, TrialTerms
from ..runners.host.client import HostAgent
from ..runners.place.emulate import EmulateRunner, EmulationTerms
from ..space import Space

if TYPE_CHECKING:
    from ..estimator import Estimator
    from .request.options import Request
    from .request.target import Task

EMULATE = "emulate"
"""The runner's name."""


def memory_of_emulated(hardware: Any, device: Device, devices: int, given_mib: float | None) -> float | None:
    """Memory of an emulated rank, MiB: that of the hardware, but at most that of the device here. A CPU that is
    emulated as itself has each rank's share.

    Raises:
        UsageError: the hardware is unknown.
    """
    if device.type == "cuda":
        named = None if hardware is None else find_hardware(hardware).memory_mib - Constants().context_mib
        return min((each for each in (given_mib, named) if each is not None), default=None)
    room = share_of_host()
    if given_mib is not None:
        return min(given_mib, room)
    if hardware is None:
        return share_of_host(devices)
    found = find_hardware(hardware)
    return float(int(min(found.memory_mib - (Constants().context_mib if found.kind != "cpu" else 0.0), room)))


def may_compile(workload: Workload, space: Space) -> bool:
    """True if configurations may compile: some have `fusion`, or the user defines the model or its schedule."""
    if not isinstance(workload.model, Architecture) or not isinstance(workload.schedule, StandardSchedule):
        return True
    fusion = space.by_name.get("fusion")
    return fusion is not None and (fusion.derived or True in fusion.values)


def emulator(
    request: "Request",
    task: "Task",
    limit_mib: float | None,
    estimator: "Estimator | None",
    *,
    agent: HostAgent | None = None,
) -> Runner:
    """Returns the runner of emulated trials, ready for the first trial.

    Args:
        request, task: the request, and the task it was resolved to.
        limit_mib: memory of a rank, MiB.
        estimator: estimator of the task.
        agent: an agent that was started beforehand.

    Raises:
        UsageError: the hardware is neither known nor measurable here.
    """
    assert task.workload is not None, "what is emulated is a workload"
    if estimator is None:
        raise UsageError(
            "the runner 'emulate' prices communication by the hardware's links, but this machine could not be measured: "
            f"name its hardware by {option('hardware')} NAME or FILE"
        )
    hardware, device = estimator.hardware, task.device
    # Times measured here do not apply to other hardware.
    memory_only = not _is(hardware.name, hardware.kind, device)
    threads = max(1, usable_cores() // task.devices) if device.type == "cpu" else None
    terms = TrialTerms(
        device=device,
        devices=task.devices,
        memory_limit_mib=limit_mib,
        timeout_s=request.timeout_s,
        threads=(usable_cores() if memory_only else threads) if device.type == "cpu" else None,
        plan=TimingPlan(seconds=request.measure_s),
        seed=request.seed,
    )
    made = EmulateRunner(
        task.workload,
        terms,
        EmulationTerms(hardware=hardware, memory_only=memory_only),
        estimator=estimator,
        compiles=may_compile(task.workload, task.space),
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
    found = table_entry(device)
    return name.startswith("this-") or (found is not None and found.name == name)
