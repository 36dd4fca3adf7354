"""Checks of a search's request against its task, before slow preparations."""

from collections.abc import Mapping
from typing import Any

from ..base.errors import UsageError, unknown
from ..base.option import option
from ..estimator.hardware import find_hardware
from ..results import RunFolder
from ..runners.command.objective import DIRECTIONS
from ..runners.place.ray_runner import cluster_address
from .emulating import EMULATE
from .refinement import check_refinable
from .request.options import IN_PROCESS, Request
from .request.target import Task
from .samplers import make_sampler


def check(request: Request, task: Task, request_document: Mapping[str, Any]) -> None:
    """Checks the request before slow preparations.

    Raises:
        UsageError: parts of the request contradict each other, or one of them has no effect.
    """
    _check_honoured(request, task)
    deadline = request.timeout_s if request.given("trial_timeout") else None
    request.budget.check_against(deadline)
    if request.layerwise:
        check_refinable(task.own, task.space)
    make_sampler(request.sampler, task.space, seed=request.seed)
    if request.out is not None:
        RunFolder.resumable(request.out, request_document, storage=request.storage, resume=request.resume)


def _check_honoured(request: Request, task: Task) -> None:
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
            raise UsageError(
                f"{option(name)} has no effect on the runner '{request.runs_on}'; request the runner 'ray', or leave it out"
            )
    if "device_kind" in requested_options and cluster_address(request.ray_address) is None:
        raise UsageError(f"{option('device_kind')} chooses among the devices of a cluster: {option('ray_address')}")
    runs_here = request.runs_on != EMULATE and task.device.type == "cpu"
    if (
        task.workload is not None
        and runs_here
        and request.hardware is not None
        and find_hardware(request.hardware).kind == "cuda"
    ):
        raise UsageError(
            f"{option('hardware')} names GPUs, but this machine has none to run trials on: `redline estimate` predicts them"
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
    if "measure_time" in requested_options and task.command is None:
        raise UsageError(
            f"{option('measure_time')} is for a workload or a command, whose steps are timed; a callable measures itself"
        )
    if request.hardware is not None and task.workload is None:
        raise UsageError(f"{option('hardware')} is for a workload, whose time and memory are estimated")
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
