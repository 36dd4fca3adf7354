"""Who runs the trials, and whether that can honour what was asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..device import available_memory_mib, usable_cores
from ..errors import UsageError, unknown
from ..models import Workload
from ..models.architecture import Architecture
from ..models.families.standard import StandardSchedule
from ..models.flops import flops_of
from ..results import Trial
from ..runners import FunctionRunner, LocalRunner, RayRunner, Runner, TimingPlan, TrialTerms
from ..runners.dispatch import DryRuns
from ..runners.host import HostAgent
from ..runners.work import Work
from ..space import Space
from .predicting import simulator

if TYPE_CHECKING:
    from ..estimator import Estimator
    from .task import Task

RUNNERS = ("ray", "local", "simulate")
IN_PROCESS = FunctionRunner.name
"""The runner of a callable that is not isolated."""
DEFAULT_TIMEOUT = "5m"
DEFAULT_MEASURE_TIME = "3s"
_DEFAULTS = {"trial_timeout": DEFAULT_TIMEOUT, "measure_time": DEFAULT_MEASURE_TIME}
_HOST_MEMORY_SHARE = 0.9


def runner_of(target: Any, asked: str | None, isolate: bool) -> str:
    """The runner's name: where none is asked for `ray`, for a callable `local`, without isolation `function`.

    Raises:
        UsageError: there is no such runner, or it contradicts `isolate`.
    """
    called = callable(target) and not isinstance(target, Workload)
    if not isolate:
        if not called:
            raise UsageError(
                "isolate=False belongs to a callable: trials of a workload are processes of their own"
            )
        if asked is not None:
            raise UsageError(
                f"isolate=False calls the function in this process, where the runner '{asked}' has no part; "
                "leave one of the two out"
            )
        return IN_PROCESS
    if asked is None:
        return "local" if called else "ray"
    if asked not in RUNNERS:
        raise UsageError(unknown("runner", asked, RUNNERS))
    return asked


def imports_early(target: Any) -> bool:
    """Whether a host agent may import while it is resolved what is tuned: not beside a file of Python, which may
    set the environment that imports look at, and not for a callable, which may need none of them."""
    if isinstance(target, Workload):
        return True
    return isinstance(target, (str, Path)) and ".py" not in str(target)


def may_compile(workload: Workload, space: Space) -> bool:
    """Whether configurations may compile: some have `fusion`, or the model or its schedule is somebody's own."""
    if not isinstance(workload.model, Architecture) or not isinstance(workload.schedule, StandardSchedule):
        return True
    fusion = space.by_name.get("fusion")
    return fusion is not None and (fusion.derived or True in fusion.values)


def check_honoured(task: "Task", runner: str, **asked: Any) -> None:
    """Refuses options that would silently do nothing.

    Args:
        task: what is tuned.
        runner: who runs it.
        asked: `trial_timeout`, `memory_limit`, `measure_time`, `concurrency` and `ray_address` as given.

    Raises:
        UsageError: one of them is given, and cannot be honoured.
    """
    given = {
        name: value for name, value in asked.items() if value is not None and value != _DEFAULTS.get(name)
    }
    at_once = given.get("concurrency", 1)
    if at_once < 1:
        raise UsageError(f"concurrency must be at least 1, but got {at_once}")
    if "ray_address" in given and runner != "ray":
        raise UsageError(
            f"ray_address={given['ray_address']} has no effect on the runner '{runner}'; ask for the runner "
            "'ray', or leave it out"
        )
    if task.workload is not None:
        return
    if "measure_time" in given:
        raise UsageError(
            "measure_time belongs to a workload, whose steps are timed; a callable measures itself"
        )
    if runner != IN_PROCESS:
        return
    for name in ("trial_timeout", "memory_limit"):
        if name in given:
            raise UsageError(
                f"{name}={given[name]} needs a process that can be ended, but isolate=False calls the function "
                "in this one; leave one of the two out"
            )
    if at_once > 1:
        raise UsageError(
            "isolate=False calls the function in this process, one call at a time, but got "
            f"concurrency={at_once}"
        )


def memory_of_rank(task: "Task", asked_mib: float | None, concurrency: int | None) -> float | None:
    """Memory of a rank, MiB; None where it is the device's own, or a callable's affair."""
    if asked_mib is not None or task.workload is None or task.simulated or task.device.type != "cpu":
        return asked_mib
    return float(int(available_memory_mib() * _HOST_MEMORY_SHARE / (task.devices * (concurrency or 1))))


def make_runner(
    task: "Task",
    runner: str,
    work: Work | None,
    *,
    limit_mib: float | None,
    timeout_s: float | None,
    plan: TimingPlan,
    seed: int,
    concurrency: int | None,
    ray_address: str | None,
    estimator: "Estimator | None",
    earlier: Sequence[Trial],
    agent: HostAgent | None = None,
) -> Runner:
    """The runner of this name, ready for the first trial.

    Args:
        task: what is tuned.
        runner: a name out of `RUNNERS`, or `IN_PROCESS`.
        work: calls in processes of their own; None for dry runs of the task's workload.
        limit_mib, timeout_s, plan, seed, concurrency, ray_address: of the trials.
        estimator: answers where nothing is run.
        earlier: trials of a run that is taken up again.
        agent: for the runner `local`, one that was started beforehand.
    """
    if runner == IN_PROCESS:
        return FunctionRunner(task.function)
    if task.simulated:
        answers = {"devices": task.devices, "seed": seed, "timeout_s": timeout_s, "measure_s": plan.seconds}
        return simulator(estimator, earlier, concurrency, **answers)
    on_cpu = task.device.type == "cpu"
    ranks = task.devices * (concurrency or 1)
    terms = TrialTerms(
        device=task.device,
        devices=task.devices,
        memory_limit_mib=limit_mib,
        timeout_s=timeout_s,
        threads=max(1, usable_cores() // ranks) if on_cpu else None,
        plan=plan,
        seed=seed,
    )
    what = work or DryRuns(task.workload, compiles=may_compile(task.workload, task.space))
    if runner == "local":
        made: Runner = LocalRunner(what, terms, concurrency=concurrency, agent=agent)
    else:
        made = RayRunner(what, terms, concurrency=concurrency, address=ray_address)
    try:
        if task.workload is not None:
            # Once here, while the workers start, rather than in every trial.
            flops_of(task.workload)
        made.wait_ready()
    except BaseException:
        made.close()
        raise
    return made
