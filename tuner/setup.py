"""Builds the setup of a search: task, runner, memory, estimate, first trial, sampler."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import RunnerError, SpaceError, UsageError
from ..base.host_memory import memory_groups
from ..base.option import option
from ..estimator.hardware import find_hardware
from ..estimator.measuring import hardware_of
from ..knobs.text import config_text, value_text
from ..models import Workload
from ..results import RunFolder
from ..runners import Runner
from ..space import Config, Space
from .checks import check
from .default_prior import assumed_hardware, default_prior
from .emulating import EMULATE
from .feasibility import HEADROOM
from .first_trial import FirstTrial, first_trial
from .rank_memory import memory_of_rank
from .request.options import Request
from .request.record import asked_of
from .request.target import Task, resolve_task
from .runner_start import RunnerStart, make_work
from .samplers import Sampler, make_sampler
from .samplers.bayes import BayesSampler, Judge
from .samplers.posterior import SurrogatePrior

if TYPE_CHECKING:
    from ..estimator import Estimator, Hardware

SAMPLE = 256
"""Number of configurations that are predicted to check that predicting works."""


@dataclass(frozen=True, kw_only=True)
class SearchSetup:
    """State of a search before its first trial."""

    request: Request
    task: Task
    request_document: Mapping[str, Any]
    """Description of the request for run.yaml."""
    start: RunnerStart
    """The runner, which is starting."""
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
        """Returns the runner, ready for the first trial."""
        return self.start.runner(self.estimator)


def set_up(request: Request, stack: contextlib.ExitStack, warn: Callable[[str], None]) -> SearchSetup:
    """Builds the setup of a search from a request. Nothing is written, and no trial runs.

    Args:
        request: the arguments of `redline.tune`, with valid values.
        stack: closes everything opened here.
        warn: receives messages for the user.

    Raises:
        UsageError: parts of the request contradict each other, or one of them has no effect.
    """
    start = RunnerStart(request, stack, warn)
    task = resolve_task(
        request,
        cluster=start.joins,
        emulated=request.runs_on == EMULATE,
        stands_for=find_hardware(request.hardware)
        if request.runs_on == EMULATE and request.hardware is not None
        else None,
        device=start.device,
    )
    document = asked_of(request, task)
    check(request, task, document)
    work = make_work(request, task)
    resumed = RunFolder.asked(request.out) if request.resume and request.out is not None else {}
    limit_mib = memory_of_rank(
        request, task, warn, earlier_mib=resumed.get("rank_memory_mib"), elsewhere=start.elsewhere
    )
    # On a CPU, ranks have a limit of their own.
    if work is not None and task.device.type == "cuda" and any(group.kills_all for group in memory_groups()):
        warn(
            "a trial that fills the host's memory ends this whole container (memory.oom.group is 1), unless singleProcessOOMKill "
            "of the kubelet is set"
        )
    start.begin(task, work, limit_mib)
    estimator = _estimator(request, task, start, limit_mib, warn)
    prior = _prior(request, task, estimator, warn)
    initial = first_trial(task.space, prior if task.workload is not None else None, HEADROOM)
    begin_with, notes = _begin_with(request, task)
    surrogate_prior = SurrogatePrior(
        task.space,
        seed=request.seed,
        prior=prior,
        warn=warn,
        headroom=HEADROOM,
        # A command may count samples or steps where the estimate counts tokens.
        relative=task.command is not None,
    )
    decided = {"rank_memory_mib": limit_mib, "first_trial": initial.note or None}
    return SearchSetup(
        request=request,
        task=task,
        request_document=document | {name: value for name, value in decided.items() if value is not None},
        start=start,
        limit_mib=limit_mib,
        estimator=estimator,
        initial=initial,
        begin_with=begin_with,
        notes=notes,
        sampler=_sampler(request, task, surrogate_prior, warn),
        judge=Judge(surrogate_prior),
    )


def _sampler(request: Request, task: Task, prior: SurrogatePrior, warn: Callable[[str], None]) -> Sampler:
    """Returns the requested sampler."""
    if request.sampler == BayesSampler.name:
        return BayesSampler(task.space, seed=request.seed, surrogate_prior=prior)
    if request.prior is not None:
        warn(f"the sampler '{request.sampler}' does not use a prior; '{BayesSampler.name}' does")
    return make_sampler(request.sampler, task.space, seed=request.seed)


def _begin_with(request: Request, task: Task) -> tuple[tuple[Config, ...], tuple[str, ...]]:
    """Returns the configurations of `begin_with` and `warm_start` that are valid here, and a note for each of the others."""
    from ..estimator.survey import checked_config

    valid, notes = dict[Config, None](), []
    for config in (*request.begin_with, *request.earlier_leaders):
        try:
            candidate = checked_config(task.space, config)
            for knob in task.space.free:
                if knob.name in candidate and candidate[knob.name] not in knob.values:
                    raise SpaceError(f"{knob.name}={value_text(candidate[knob.name])} is not in the space")
            valid[candidate] = None
        except SpaceError as error:
            invalid_text = config_text(config)
            notes.append(
                f"not tried, because it is not valid here: {invalid_text} ({' '.join(str(error).split())[:200]})"
            )
    return tuple(valid), tuple(notes)


def _estimator(
    request: Request, task: Task, start: RunnerStart, limit_mib: float | None, warn: Callable[[str], None]
) -> "Estimator | None":
    """Returns the estimator of the task's model; None without a model, or for unknown devices of other hosts, about which
    measuring this machine says nothing.
    """
    if task.workload is None:
        return None
    hardware = request.hardware
    if start.kind is not None and hardware is None:
        hardware = hardware_of(start.kind.device)
        if hardware is None and start.elsewhere:
            name = start.kind.device.name
            warn(
                f"the search begins without an estimate: {name} is not in the hardware table; {option('hardware')} names it"
            )
            return None
    return estimator_of(
        task.workload,
        task.space,
        warn,
        devices=task.devices,
        hardware=hardware,
        memory_limit_mib=limit_mib,
        free_batch=task.free_batch,
        without=task.without,
        # The start of the runner would disturb a measurement of this machine.
        settle=start.settle,
    )


def _prior(
    request: Request,
    task: Task,
    estimator: "Estimator | None",
    warn: Callable[[str], None],
) -> Any:
    """Returns the prior of throughput and memory: the given one, the estimator, or a default by the names of the knobs."""
    if request.prior is not None:
        return request.prior
    if estimator is not None:
        if request.listener is not None:
            request.listener.on_wait("predicting")
        return usable(estimator, task.space, warn)
    if task.workload is None and request.sampler == BayesSampler.name:
        return default_prior(task.space, task.devices, assumed_hardware(task.device, task.space, task.devices))
    return None


def estimator_of(
    workload: Workload,
    space: Space,
    warn: Callable[[str], None],
    *,
    devices: int,
    hardware: "str | Path | Hardware | None",
    memory_limit_mib: float | None,
    free_batch: bool = False,
    without: Mapping[str, Any] | None = None,
    settle: Callable[[], None] = lambda: None,
) -> "Estimator | None":
    """Returns an estimator of a task's trials, with nothing traced yet; None if this machine cannot be measured.

    Args:
        workload: the one to train.
        space: what may vary.
        warn: receives the reason, and remarks on a measurement.
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

    try:
        machine, _ = machine_of(hardware, devices, settle)
    except RunnerError as error:
        warn(f"the search begins without an estimate: {error}")
        return None
    if machine.note:
        warn(machine.note)
    training = TrainingSetup(
        devices=devices,
        seq_len=workload.seq_len,
        memory_limit_mib=memory_limit_mib,
        **{
            "global_batch": None if free_batch else workload.global_batch,
            **without_knobs(space),
            **(without or {}),
        },
    )
    return Estimator(workload, machine, training)


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


def peak_rate(estimator: "Estimator") -> Callable[[Config], float]:
    """Peak FLOP/s of a device at a configuration's precision."""
    default = estimator.training.precision
    return lambda config: estimator.hardware.rate(str(config.get("precision", default)))
