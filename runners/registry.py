"""The registry of runners, by name."""

from collections.abc import Mapping
from typing import Any

from ..base.errors import UsageError, unknown
from .dispatch import DryRunner
from .host.client import HostAgent
from .place.local import LocalRunner
from .place.ray_runner import RayRunner
from .runner import TrialTerms, Work

RUNNERS: Mapping[str, type[DryRunner]] = {runner.name: runner for runner in (RayRunner, LocalRunner)}


def runner_on(
    name: str,
    work: Work,
    terms: TrialTerms,
    *,
    concurrency: int | None = None,
    address: str | None = None,
    agent: HostAgent | None = None,
    ray: Mapping[str, Any] | None = None,
) -> DryRunner:
    """Creates a runner by name.

    Args:
        name: one of `RUNNERS`.
        work: the work of its processes.
        terms: settings of all trials.
        concurrency: trials at once; None for as many as the devices allow.
        address: for `ray`, of a cluster.
        agent: for `local`, an agent that was started beforehand.
        ray: further arguments of `RayRunner`.

    Raises:
        UsageError: the runner does not exist, or it has fewer devices than a trial needs (`ray` in `wait_ready`).
        MissingDependency: an optional package is not installed.
    """
    if name not in RUNNERS:
        raise UsageError(unknown("runner", name, RUNNERS))
    arguments: Mapping[str, Mapping[str, Any]] = {
        "ray": {"address": address, **(ray or {})},
        "local": {"agent": agent},
    }
    runner_class: Any = RUNNERS[name]
    return runner_class(work, terms, concurrency=concurrency, **arguments.get(name, {}))
