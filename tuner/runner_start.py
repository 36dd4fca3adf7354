"""The runner of a search, of which as much as possible starts while the task is resolved and predicted."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.device import Device, detect, usable_cores
from ..base.errors import RunnerError
from ..base.option import option
from ..estimator.hardware import find_hardware
from ..models import Workload
from ..models.flops import flops_of
from ..models.presets import ServerModel
from ..results import RunFolder
from ..runners import FunctionRunner, Runner, TimingPlan, TrialTerms
from ..runners.dispatch import DryRunner, DryRuns
from ..runners.host.client import PLAIN_IMPORTS, HostAgent
from ..runners.place.emulate import HUGE_PAGES
from ..runners.place.ray_cluster import DeviceKind, RaySetup, choose_kind, kinds_text
from ..runners.place.ray_runner import RayDriver, RayRunner, cluster_address
from ..runners.registry import runner_on
from ..runners.runner import Work
from ..runners.trial.function import Calls
from .emulating import EMULATE, emulator, may_compile
from .request.options import IN_PROCESS, Request
from .request.target import Task

if TYPE_CHECKING:
    from ..estimator import Estimator


class RunnerStart:
    """Starts a host agent on this machine, or Ray, before the task is known. `begin`, once it is, starts the rest, and
    `runner` waits until trials can start.

    Args:
        request: the request.
        stack: closes everything started here.
        warn: receives messages for the user.

    Raises:
        UsageError: the cluster does not have the requested kind of devices.
        RunnerError: the cluster cannot be joined, or a node cannot describe its devices.
    """

    def __init__(self, request: Request, stack: contextlib.ExitStack, warn: Callable[[str], None]) -> None:
        self._request, self._stack, self._warn = request, stack, warn
        self._here = request.runs_on in ("local", EMULATE)
        self._on_ray = request.runs_on == RayRunner.name
        self._agent: HostAgent | None = None
        self._driver: RayDriver | None = None
        self._starting: DryRunner | None = None
        self.joins = self._on_ray and cluster_address(request.ray_address) is not None
        """True if trials run on a Ray cluster that exists."""
        self.kind: DeviceKind | None = None
        """The devices of that cluster."""
        early = _imports_early(request.target)
        if self._here and early:
            self._start_agent()
        if self._on_ray and (self.joins or early):
            self._driver = RayDriver(request.ray_address)
            stack.callback(self._driver.close, 0)
            if self.joins:
                self.kind = _kind_of_cluster(request, self._driver, warn)
            if early:
                # Host agents take as long for their imports as the task takes to be resolved.
                self._driver.place(_placement(request, self.device or detect(), self.kind))

    @property
    def device(self) -> Device | None:
        """The devices to plan for, if they are not those of this machine."""
        if isinstance(self._request.runner, Runner):
            return self._request.runner.device
        return None if self.kind is None else self.kind.device

    @property
    def elsewhere(self) -> bool:
        """True if the cluster's devices are others than this machine's."""
        return self.kind is not None and self.kind.device != detect()

    def begin(self, task: Task, work: Work | None, limit_mib: float | None) -> None:
        """Starts what the task needs. Trials are placed on Ray while the space is predicted.

        Args:
            task: the target of the search.
            work: of `make_work`.
            limit_mib: memory of a rank, MiB; None for all of the device's memory.
        """
        self._task, self._work, self._limit_mib = task, work, limit_mib
        if self._here and task.own is not None and self._agent is None:
            self._start_agent()
        if self._on_ray and work is not None:
            listener = self._request.listener
            self._starting = self._started(
                work,
                ray={
                    "driver": self._driver,
                    "kind": self.kind,
                    "patience_s": self._request.budget.seconds,
                    "say": listener.on_wait if listener is not None else lambda stage: None,
                    "warn": self._warn,
                },
            )
            self._stack.callback(self._starting.close)

    def settle(self) -> None:
        """Waits until nothing is starting any more, as a measurement of this machine needs."""
        starting = self._starting or self._agent
        if starting is not None:
            with contextlib.suppress(RunnerError):  # raised again when trials are to begin
                starting.wait_ready()

    def runner(self, estimator: "Estimator | None") -> Runner:
        """Returns the requested runner, ready for the first trial.

        Args:
            estimator: predicts the time of emulated trials.
        """
        request, task, work = self._request, self._task, self._work
        if isinstance(request.runner, Runner):
            return request.runner
        if task.emulated:
            return emulator(request, task, self._limit_mib, estimator, agent=self._agent)
        if work is None:
            return FunctionRunner(task.callable, smaller=request.direction == "min")
        runner = self._starting or self._started(work)
        try:
            if task.own is not None:
                # Computed once here, while the workers start, rather than in every trial.
                flops_of(task.own)
            runner.wait_ready()
        except BaseException:
            runner.close()
            raise
        return runner

    def _start_agent(self) -> None:
        # Huge pages only for other hardware: the emulated memory of this CPU is compared with that of real ranks, which
        # use pages of the usual size.
        hardware = self._request.hardware if self._request.runs_on == EMULATE else None
        environment = HUGE_PAGES if hardware is not None and find_hardware(hardware).kind != "cpu" else {}
        self._agent = self._stack.enter_context(contextlib.closing(HostAgent(PLAIN_IMPORTS, environment)))

    def _started(self, work: Work, ray: dict[str, Any] | None = None) -> DryRunner:
        """Starts the runner of the task's trials, which may take some time until it is ready."""
        request, task = self._request, self._task
        at_once = request.concurrency
        terms = TrialTerms(
            device=task.device,
            devices=task.devices,
            memory_limit_mib=self._limit_mib,
            timeout_s=request.timeout_s,
            threads=max(1, usable_cores() // (task.devices * (at_once or 1))) if task.device.type == "cpu" else None,
            plan=TimingPlan(seconds=request.measure_s),
            seed=request.seed,
        )
        return runner_on(
            request.runs_on, work, terms, concurrency=at_once, address=request.ray_address, agent=self._agent, ray=ray
        )


def make_work(request: Request, task: Task) -> Work | None:
    """Returns the work of a trial's processes; None if there are none, or if a given runner starts them.

    Raises:
        UsageError: a callable cannot be sent to another process, or a command's program does not exist.
    """
    if request.runs_on == IN_PROCESS or isinstance(request.runner, Runner):
        return None
    if task.command is not None:
        task.command.check_program()
        return task.command
    if task.workload is not None:
        return DryRuns(task.workload, compiles=may_compile(task.workload, task.space))
    return Calls(task.callable, smaller=request.direction == "min")


def _imports_early(target: Any) -> bool:
    """True if a host agent may import packages while the target is resolved. False for a Python file, which may set
    environment variables that imports read, and for a callable, which may not need the packages.
    """
    if isinstance(target, (Workload, ServerModel)):
        return True
    return isinstance(target, (str, Path)) and ".py" not in str(target)


def _kind_of_cluster(request: Request, driver: RayDriver, warn: Callable[[str], None]) -> DeviceKind:
    """Returns the kind of devices that the trials use: the requested one, that of the resumed run, or the most frequent one.

    Raises:
        UsageError: the cluster does not have the requested kind.
        RunnerError: the cluster cannot be joined, or a node cannot describe its devices.
    """
    kinds = driver.kinds()
    name = request.device_kind
    if name is None and request.resume and request.out is not None:
        earlier = (RunFolder.asked(request.out).get("devices") or {}).get("name")
        name = earlier if any(kind.device.name == earlier for kind in kinds) else None
    chosen = choose_kind(kinds, name)
    if len(kinds) > 1 and name is None:
        warn(
            f"the cluster has {kinds_text(kinds)}: trials use the {chosen.device.name}; {option('device_kind')} chooses others"
        )
    return chosen


def _placement(request: Request, device: Device, kind: DeviceKind | None) -> RaySetup:
    """Returns the placement of the trials of a model that is not resolved yet."""
    return RaySetup(
        devices=request.devices or device.count,
        cuda=device.type == "cuda",
        accelerator=None if kind is None else kind.accelerator,
        concurrency=request.concurrency,
        several_hosts=True,
        imports=PLAIN_IMPORTS,
        patience_s=request.budget.seconds,
    )
