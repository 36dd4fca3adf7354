"""Builds the setup of a search: checks, memory, estimate, first trial, sampler, runner."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.device import SHARE_OF_HOST, Device, available_memory_mib, detect, share_of_host, usable_cores
from ..base.errors import RunnerError, SpaceError, UsageError, unknown
from ..base.gpus import gpu_use
from ..base.host_memory import memory_groups
from ..estimator.constants import Constants
from ..estimator.hardware import find_hardware
from ..estimator.measuring import hardware_of
from ..knobs.text import config_text
from ..models import Workload
from ..models.flops import flops_of
from ..models.server_model import ServerModel
from ..results import RunFolder
from ..runners import FunctionRunner, Runner, TimingPlan, TrialTerms
from ..runners.command.objective import DIRECTIONS
from ..runners.dispatch import DryRunner, DryRuns
from ..runners.host.client import PLAIN_IMPORTS, HostAgent
from ..runners.place.emulate import HUGE_PAGES
from ..runners.place.local import SharedDevices
from ..runners.place.ray_cluster import DeviceKind, RaySetup, choose_kind, kinds_text
from ..runners.place.ray_runner import RayDriver, RayRunner, cluster_address
from ..runners.registry import runner_on
from ..runners.trial.function import Calls
from ..runners.work import Work
from ..space import Config
from .default_prior import assumed_hardware, default_prior
from .emulating import (
    EMULATE,
    EmulatedCommands,
    emulates_command,
    emulator,
    may_compile,
    memory_of_emulated,
)
from .feasibility import HEADROOM
from .first_trial import FirstTrial, first_trial
from .predicting import estimate_to_begin_with, usable
from .refinement import check_refinable
from .request.options import IN_PROCESS, Request
from .request.record import asked_of
from .request.target import Task, resolve_task
from .samplers import Sampler, make_sampler
from .samplers.bayes import BayesSampler
from .samplers.judge import Judge
from .samplers.posterior import SurrogatePrior
from .warm_start import Transferred, WarmStart, take

if TYPE_CHECKING:
    from ..estimator import Estimator

LEAST_HELD_MIB = 300.0
"""Used memory of a GPU above which other processes count as using it, MiB: a context, which a desktop has as well."""


@dataclass(frozen=True, kw_only=True)
class SearchSetup:
    """State of a search before its first trial."""

    request: Request
    task: Task
    request_document: Mapping[str, Any]
    """Description of the request for run.yaml."""
    agent: HostAgent | None
    """A host agent that was started early; None if the runner starts its own."""
    starting: DryRunner | None
    """The runner, if it started early; `runner` waits until it is ready."""
    work: Work | None
    """Work of the processes of a trial; None if trials have no processes."""
    limit_mib: float | None
    """Memory of a rank, MiB; None for all of the device's memory."""
    estimator: "Estimator | None"
    """Predicts the task's configurations; None without a model, or if its machine cannot be measured."""
    initial: FirstTrial
    begin_with: tuple[Config, ...]
    """Configurations of the request to try after the first trial."""
    notes: tuple[str, ...]
    sampler: Sampler
    judge: Judge

    def runner(self) -> Runner:
        """Returns the runner of the trials."""
        return make_runner(
            self.request,
            self.task,
            work=self.work,
            limit_mib=self.limit_mib,
            estimator=self.estimator,
            agent=self.agent,
            starting=self.starting,
        )


def set_up(request: Request, stack: contextlib.ExitStack, warn: Callable[[str], None]) -> SearchSetup:
    """Builds the setup of a search from a request. Nothing is written, and no trial runs.

    Args:
        request: the arguments of `redline.tune`, with valid values.
        stack: closes everything opened here.
        warn: receives messages for the user.

    Raises:
        UsageError: parts of the request contradict each other, or one of them has no effect.
    """

    def started() -> HostAgent:
        # Huge pages only for other hardware: the emulated memory of this CPU is compared with that of real ranks, which
        # use pages of the usual size.
        stands_for_others = request.runs_on == EMULATE and request.hardware is not None
        environment = HUGE_PAGES if stands_for_others and find_hardware(request.hardware).kind != "cpu" else {}
        return stack.enter_context(contextlib.closing(HostAgent(PLAIN_IMPORTS, environment)))

    agent, driver = None, None
    if request.runs_on in ("local", EMULATE) and imports_early(request.target):
        agent = started()
    on_ray = request.runs_on == RayRunner.name
    joins = on_ray and cluster_address(request.ray_address) is not None
    if on_ray and (joins or imports_early(request.target)):
        # Ray starts while the task is resolved.
        driver = RayDriver(request.ray_address)
        stack.callback(driver.close, 0)
    kind = _kind_of_cluster(request, driver, warn) if driver is not None and joins else None
    if driver is not None and imports_early(request.target):
        # Host agents take as long for their imports as the task takes to be resolved.
        driver.place(_placement(request, detect() if kind is None else kind.device, kind))
    task = resolve_task(
        request,
        cluster=joins,
        emulated=request.runs_on == EMULATE or emulates_command(request),
        stands_for=find_hardware(request.hardware)
        if request.runs_on == EMULATE and request.hardware is not None
        else None,
        device=request.runner.device if isinstance(request.runner, Runner) else None if kind is None else kind.device,
    )
    if request.runs_on in ("local", EMULATE) and task.own is not None and agent is None:
        agent = started()

    request_document = asked_of(request, task)
    transferred = [
        take(run, task.space, request_document, task.own.unit if task.own else "") for run in request.earlier_runs
    ]
    _check(request, task, request_document)
    resumed = RunFolder.asked(request.out) if request.resume and request.out is not None else {}

    work = make_work(request, task)
    # On a CPU, ranks have a limit of their own.
    if work is not None and task.device.type == "cuda" and any(group.kills_all for group in memory_groups()):
        warn(
            "a trial that fills the host's memory ends this whole container (memory.oom.group is 1), unless singleProcessOOMKill "
            "of the kubelet is set"
        )
    elsewhere = kind is not None and kind.device != detect()
    limit_mib = memory_of_rank(request, task, warn, earlier_mib=resumed.get("rank_memory_mib"), elsewhere=elsewhere)
    if limit_mib is not None:
        request_document["rank_memory_mib"] = limit_mib

    starting = None
    if request.runs_on == RayRunner.name and work is not None:
        # Trials are placed while the space is predicted.
        say = request.listener.on_wait if request.listener is not None else lambda stage: None
        ray = {
            "driver": driver,
            "kind": kind,
            "title": task.name,
            "patience_s": request.budget.seconds,
            "say": say,
            "warn": warn,
        }
        starting = _start_runner(request, task, work, limit_mib, ray=ray)
        stack.callback(starting.close)
    hardware = request.hardware if kind is None else request.hardware or hardware_of(kind.device)
    if kind is not None and hardware is None and elsewhere:
        estimator = None  # measuring this machine says nothing about it
        if task.workload is not None:
            name = kind.device.name
            warn(f"the search begins without an estimate: {name} is not in the hardware table; --hardware names it")
    else:
        estimator = _estimator(task, limit_mib, starting or agent, hardware, warn)
    prior = _prior(request, task, estimator, transferred, warn)
    initial = first_trial(task.space, prior if task.workload is not None else None, HEADROOM)
    if initial.note:
        request_document["first_trial"] = initial.note

    begin_with, notes = _begin_with(request, task)
    surrogate_prior = _surrogate_prior(request, task, prior, transferred, warn)
    if request.sampler == BayesSampler.name:
        sampler: Sampler = BayesSampler(task.space, seed=request.seed, surrogate_prior=surrogate_prior)
    else:
        sampler = make_sampler(request.sampler, task.space, seed=request.seed)
        if request.prior is not None or transferred:
            warn(f"the sampler '{request.sampler}' does not use a prior or a warm start; '{BayesSampler.name}' does")
    return SearchSetup(
        request=request,
        task=task,
        request_document=request_document,
        agent=agent,
        starting=starting,
        work=work,
        limit_mib=limit_mib,
        estimator=estimator,
        initial=initial,
        begin_with=begin_with,
        notes=notes,
        sampler=sampler,
        judge=Judge(surrogate_prior),
    )


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
        warn(f"the cluster has {kinds_text(kinds)}: trials use the {chosen.device.name}; --device-kind chooses others")
    return chosen


def _placement(request: Request, device: Device, kind: DeviceKind | None) -> RaySetup:
    """Returns the placement of the trials of a model that is not resolved yet."""
    return RaySetup(
        title=Path(str(request.target)).name if isinstance(request.target, (str, Path)) else request.target.name,
        devices=request.devices or device.count,
        cuda=device.type == "cuda",
        accelerator=None if kind is None else kind.accelerator,
        concurrency=request.concurrency,
        several_hosts=True,
        imports=PLAIN_IMPORTS,
        patience_s=request.budget.seconds,
    )


def _check(request: Request, task: Task, request_document: Mapping[str, Any]) -> None:
    """Checks the request before slow preparations.

    Raises:
        UsageError: parts of the request contradict each other, or one of them has no effect.
    """
    check_honoured(request, task)
    deadline = request.timeout_s if request.given("trial_timeout") else None
    # Without a limit, GPUs run as many trials at once as there is room for.
    at_once = request.concurrency or (1 if task.device.type == "cpu" else None)
    request.budget.check_against(deadline, at_once, task.devices)
    if request.layerwise:
        check_refinable(task.own, task.space)
    make_sampler(request.sampler, task.space, seed=request.seed)
    if request.out is not None:
        RunFolder.resumable(request.out, request_document, storage=request.storage, resume=request.resume)


def _begin_with(request: Request, task: Task) -> tuple[tuple[Config, ...], tuple[str, ...]]:
    """Returns the configurations of `begin_with` that are valid here, and a note for each of the others."""
    from ..estimator.survey import checked_config

    valid, notes = dict[Config, None](), []
    for config in request.begin_with:
        try:
            valid[checked_config(task.space, config)] = None
        except SpaceError as error:
            invalid_text = config_text(config)
            notes.append(
                f"not tried, because it is not valid here: {invalid_text} ({' '.join(str(error).split())[:200]})"
            )
    return tuple(valid), tuple(notes)


def _estimator(
    task: Task,
    limit_mib: float | None,
    starting: HostAgent | DryRunner | None,
    hardware: Any,
    warn: Callable[[str], None],
) -> "Estimator | None":
    """Returns the estimator of the task's model. This machine is measured only when the runner has started, because its start
    would disturb the measurement.
    """

    def settle() -> None:
        if starting is not None:
            with contextlib.suppress(RunnerError):  # raised again when trials are to begin
                starting.wait_ready()

    if task.workload is None:
        return None
    return estimate_to_begin_with(
        task.workload,
        task.space,
        warn,
        devices=task.devices,
        hardware=hardware,
        memory_limit_mib=limit_mib,
        free_batch=task.free_batch,
        without=task.without,
        settle=settle,
    )


def _prior(
    request: Request,
    task: Task,
    estimator: "Estimator | None",
    transferred: Sequence[Transferred],
    warn: Callable[[str], None],
) -> Any:
    """Returns the prior of throughput and memory: the given one, the estimator, or a default by the names of the knobs."""
    if request.prior is not None:
        return request.prior
    if estimator is not None:
        if request.listener is not None:
            request.listener.on_wait("predicting")
        return usable(estimator, task.space, warn)
    if task.workload is None and not transferred and request.sampler == BayesSampler.name:
        return default_prior(task.space, task.devices, assumed_hardware(task.device, task.space, task.devices))
    return None


def _surrogate_prior(
    request: Request,
    task: Task,
    prior: Any,
    transferred: Sequence[Transferred],
    warn: Callable[[str], None],
) -> SurrogatePrior:
    """Returns the prior of the surrogate, with the trials of earlier runs if there are any."""
    if transferred:
        for run in transferred:
            warn(run.summary)
        prior = WarmStart(task.space, transferred, prior, warn)
    return SurrogatePrior(
        task.space,
        seed=request.seed,
        prior=prior,
        warn=warn,
        headroom=HEADROOM,
        # A command may count samples or steps where the estimate counts tokens.
        relative=task.command is not None,
    )


def imports_early(target: Any) -> bool:
    """True if a host agent may import packages while the target is resolved. False for a Python file, which may set
    environment variables that imports read, and for a callable, which may not need the packages.
    """
    if isinstance(target, (Workload, ServerModel)):
        return True
    return isinstance(target, (str, Path)) and ".py" not in str(target)


def check_honoured(request: Request, task: Task) -> None:
    """Checks that every requested option has an effect.

    Raises:
        UsageError: an option cannot be honoured.
    """
    requested_options = request.given(
        "trial_timeout", "memory_limit", "measure_time", "concurrency", "ray_address", "device_kind"
    )
    at_once = requested_options.get("concurrency", 1)
    for name in ("ray_address", "device_kind"):
        if name in requested_options and request.runs_on != "ray":
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} has no effect on the runner '{request.runs_on}'; request the runner 'ray', or leave it out"
            )
    if "device_kind" in requested_options and cluster_address(request.ray_address) is None:
        raise UsageError("--device-kind chooses among the devices of a cluster: --ray-address")
    runs_here = request.runs_on != EMULATE and task.device.type == "cpu"
    if (
        task.workload is not None
        and runs_here
        and request.hardware is not None
        and find_hardware(request.hardware).kind == "cuda"
    ):
        raise UsageError(
            "--hardware names GPUs, but this machine has none to run trials on: `redline estimate` predicts them"
        )
    if request.soak and task.emulated:
        raise UsageError("--soak trains a workload's winner on all of its ranks; it has no part in emulated trials")
    if request.soak and task.own is None:
        raise UsageError(
            "--soak trains a workload's winner on batches of varied lengths; it cannot be used with a command or a "
            "callable, which has its own"
        )
    if request.direction is not None:
        if request.direction not in DIRECTIONS:
            raise UsageError(unknown("direction", request.direction, DIRECTIONS))
        if task.function is None:
            raise UsageError(
                "direction is for a callable; a command has its own: redline.Command(..., direction='min')"
            )
    if task.own is not None:
        return
    if task.command is not None and task.command.shares_metric_file and at_once > 1:
        raise UsageError(
            f"{at_once} trials at once would write to the same metric_file, and read each other's numbers: put {{trial_dir}} "
            "into its path, or leave --concurrency out"
        )
    if "measure_time" in requested_options and task.command is None:
        raise UsageError(
            "--measure-time is for a workload or a command, whose steps are timed; a callable measures itself"
        )
    if request.hardware is not None and task.workload is None:
        raise UsageError("--hardware is for a workload, whose time and memory are estimated")
    if request.runs_on != IN_PROCESS:
        return
    for name in ("trial_timeout", "memory_limit"):
        if name in requested_options:
            raise UsageError(
                f"{name}={requested_options[name]} needs a process that can be ended, but isolate=False calls the function "
                "in this one; leave one of the two out"
            )
    if at_once > 1:
        raise UsageError(
            f"isolate=False calls the function in this process, one call at a time, but got concurrency={at_once}"
        )


def memory_of_rank(
    request: Request,
    task: Task,
    warn: Callable[[str], None] = lambda message: None,
    *,
    earlier_mib: float | None = None,
    elsewhere: bool = False,
) -> float | None:
    """Returns the memory of a rank, MiB; None for all of the device's memory, or if the target limits its own memory.

    Estimate and trials get the same limit: the memory that other processes use on this machine's GPUs is subtracted
    for both.

    Args:
        request, task: the request and its task.
        warn: receives a message about memory used by other processes.
        earlier_mib: limit of the trials of the resumed run, which further trials get too.
        elsewhere: True if the devices are those of other hosts than this one.

    Raises:
        UsageError: this host has less memory left than the earlier trials had.
    """
    requested = request.limit_mib
    if isinstance(request.runner, Runner):
        return requested  # the free memory of other machines is not known here
    if task.own is None:
        return requested
    if task.emulated:
        return memory_of_emulated(request.hardware, task.device, task.devices, requested)
    if task.device.type == "cuda":
        return _left_of_gpus(requested, warn) if request.runs_on == "local" else requested
    if requested is not None:
        return requested
    ranks = task.devices * (request.concurrency or 1)
    if elsewhere:
        return float(int(task.device.memory_mib * SHARE_OF_HOST / ranks))
    if earlier_mib is None:
        return share_of_host(ranks)
    if (free := available_memory_mib()) < earlier_mib * ranks:
        raise UsageError(
            f"the trials of '{request.out}' had {earlier_mib:,.0f} MiB a rank, but this host has {free / ranks:,.0f} MiB a "
            f"rank left: end other processes that use its memory, or start another run with --out DIR"
        )
    return earlier_mib


def _left_of_gpus(requested: float | None, warn: Callable[[str], None]) -> float | None:
    """Returns the memory of each GPU that other processes leave for a rank's allocator, MiB; the requested limit if they
    use none.
    """
    gpus = gpu_use()
    if not gpus or max(gpu.used_mib for gpu in gpus) < LEAST_HELD_MIB:
        return requested
    least = min(gpus, key=lambda gpu: gpu.total_mib - gpu.used_mib)
    free = float(int(max(1.0, least.total_mib - least.used_mib - Constants().context_mib)))
    if requested is not None and requested <= free:
        return requested
    warn(
        f"other processes use {least.used_mib:,.0f} of the {least.total_mib:,.0f} MiB of GPU {least.name}: "
        f"trials may take {free:,.0f} MiB of each GPU"
    )
    return free


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


def make_runner(
    request: Request,
    task: Task,
    *,
    work: Work | None,
    limit_mib: float | None,
    estimator: "Estimator | None",
    agent: HostAgent | None = None,
    shared: SharedDevices | None = None,
    starting: DryRunner | None = None,
) -> Runner:
    """Returns the requested runner, ready for the first trial.

    Args:
        request: the request.
        task: the target of the search.
        work: of `make_work`.
        limit_mib: memory of a rank, MiB; None for all of the device's memory.
        estimator: predicts what emulated trials do not measure.
        agent: an agent started beforehand, for the runner `local`.
        shared: devices shared with others, for the runner `local`.
        starting: the runner, if it was started beforehand.
    """
    if isinstance(request.runner, Runner):
        return request.runner
    if task.emulated and task.command is None:
        return emulator(request, task, limit_mib, estimator, agent=agent)
    if work is None:
        return FunctionRunner(task.callable, smaller=request.direction == "min")
    runner = starting or _start_runner(request, task, work, limit_mib, agent=agent, shared=shared)
    try:
        if task.own is not None:
            # Computed once here, while the workers start, rather than in every trial.
            flops_of(task.own)
        runner.wait_ready()
    except BaseException:
        runner.close()
        raise
    return EmulatedCommands(runner, task, estimator) if task.emulated else runner


def _start_runner(
    request: Request,
    task: Task,
    work: Work,
    limit_mib: float | None,
    *,
    agent: HostAgent | None = None,
    shared: SharedDevices | None = None,
    ray: Mapping[str, Any] | None = None,
) -> DryRunner:
    """Starts the runner of a task's trials, which may take some time until it is ready."""
    shares = task.command is not None and task.command.shares_metric_file
    at_once = 1 if shares else request.concurrency
    ranks = 1 if task.emulated else task.devices
    terms = TrialTerms(
        device=task.device,
        devices=ranks,
        memory_limit_mib=limit_mib,
        timeout_s=request.timeout_s,
        threads=max(1, usable_cores() // (ranks * (at_once or 1))) if task.device.type == "cpu" else None,
        plan=TimingPlan(seconds=request.measure_s),
        seed=request.seed,
    )
    return runner_on(
        "local" if request.runs_on == EMULATE else request.runs_on,
        work,
        terms,
        concurrency=at_once,
        address=request.ray_address,
        agent=agent,
        shared=shared,
        ray=ray,
    )
