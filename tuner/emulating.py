"""Emulated trials of a search: their runner, their memory, and the checks of a request for them."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..base.device import Device, share_of_host, usable_cores
from ..base.errors import UsageError
from ..estimator.constants import Constants
from ..estimator.hardware import find_hardware
from ..estimator.measuring import table_entry
from ..estimator.time import BINDS
from ..frameworks.registry import find_launcher
from ..models import Workload
from ..models.architecture import Architecture
from ..models.families.standard import StandardSchedule
from ..results import Measurement, Status
from ..runners import Runner, TimingPlan, TrialTerms
from ..runners.command.command import Command
from ..runners.host.client import HostAgent
from ..runners.place.emulate import EmulateRunner, EmulationTerms
from ..runners.runner import TrialRequest
from ..space import Space

if TYPE_CHECKING:
    from ..estimator import Estimator
    from ..estimator.estimate import Estimate
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
            "name its hardware by --hardware NAME or FILE"
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


def emulates_command(request: "Request") -> bool:
    """True if the request is for a command whose framework can run one rank alone.

    Raises:
        UsageError: the command would run elsewhere.
    """
    if not (isinstance(request.target, Command) and request.target.emulate):
        return False
    if request.runs_on not in ("local", EMULATE):
        raise UsageError(
            f"emulate runs one rank of a command here, by --runner local, but got runner='{request.runs_on}'"
        )
    return True


class EmulatedCommands(Runner):
    """Runs of a command's first rank alone. Its memory is the measured one; the missing time of communication is the
    estimate's share of links and bubble.

    Args:
        runner: starts the command.
        task: the task that is tuned.
        estimator: estimator of the training that the command runs; None if it is unknown.
    """

    def __init__(self, runner: Runner, task: "Task", estimator: "Estimator | None") -> None:
        self.name = runner.name  # type: ignore[misc]  # that of the trials
        self.slots, self.isolated, self.confirms = runner.slots, runner.isolated, False
        self.per_host, self.device = runner.per_host, runner.device
        self._runner, self._task, self._estimator = runner, task, estimator

    def wait_ready(self) -> None:
        self._runner.wait_ready()

    def stop(self, log: str) -> None:
        self._runner.stop(log)

    def close(self) -> None:
        self.closed = True
        self._runner.close()

    def run(self, request: TrialRequest) -> Measurement:
        measured = self._runner.run(request)
        known: dict[str, Any] = {"devices": self._task.devices, "emulated_ranks": "0", "ranks": ()}
        if not measured.ok:
            return replace(measured, reason=self._failure_reason(measured), **known)
        share = 0.0 if self._estimator is None else communicated(self._estimator(request.config))
        slower = 1 / (1 - share)
        note = f"emulated rank 0 of {self._task.devices}, " + (
            f"{100 * share:.0f} % of the step priced for communication and other stages"
            if self._estimator is not None
            else "its time is without communication"
        )
        steps: dict[str, Any] = {
            name: None if (value := getattr(measured, name)) is None else value * slower
            for name in ("step_ms", "step_ms_spread")
        }
        rates: dict[str, Any] = {
            name: None if (value := getattr(measured, name)) is None else value / slower
            for name in ("throughput", "tokens_per_second", "samples_per_second")
        }
        modelled = None if measured.step_ms is None else measured.step_ms * (slower - 1) / 1e3
        reason = "; ".join(filter(None, [measured.reason, note]))
        return replace(measured, reason=reason, seconds_modelled=modelled, **steps, **rates, **known)

    def _failure_reason(self, measured: Measurement) -> str:
        """Reason of a failure; if the framework does not know the mode, that it is too old."""
        command = self._task.command
        assert command is not None and command.requested.launcher is not None
        mode = find_launcher(command.requested.launcher).emulated
        option, _, value = mode.partition(" ")
        if measured.status is Status.CRASH and (option in measured.reason or (value and value in measured.reason)):
            return f"this version of {command.requested.launcher} has no {mode}: {measured.reason}"
        return measured.reason


def communicated(estimate: "Estimate") -> float:
    """Share of an estimated step that a single rank does not take: links, and waiting for other stages; below 1."""
    lacking = sum(
        value
        for name, value in estimate.breakdown.items()
        if name.startswith("time.") and BINDS.get(name.removeprefix("time.")) in ("links", "bubble")
    )
    return min(0.95, max(0.0, lacking / estimate.step_ms))
