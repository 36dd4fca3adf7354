"""Runners that a worker keeps ready: those of the searches whose dry runs it ran last, on shared devices."""

import contextlib
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.device import detect, visible_gpus
from ..base.errors import RunnerError, UsageError
from ..runners import LocalRunner, Runner
from ..runners.host import PLAIN_IMPORTS, HostAgent
from ..runners.local import SharedDevices
from ..runners.ray_driver import check_listens
from ..tuner.request import Request
from ..tuner.search_setup import make_runner, make_work
from ..tuner.task import resolve_task
from .records import Assignment
from .request import arguments

MOST_KEPT = 3
"""Number of idle runners on this host that are kept."""


@dataclass(eq=False)
class _Kept:
    search: str
    devices: int
    """Devices of a dry run."""
    runner: Runner | None = None
    """None while it is being made."""
    folder: Path | None = None
    """Files that its request contains."""
    users: set[int] = field(default_factory=set)
    """Ids of the dry runs that use it."""
    making: threading.Lock = field(default_factory=threading.Lock)


class WarmRunners:
    """Runners by search, made on first use. Thread-safe.

    On this host a search has one runner for all its concurrent dry runs, on devices that searches share. On a Ray
    cluster a runner keeps its devices as long as it lives, so each concurrent dry run has its own runner, which is
    kept until its devices are needed.

    Args:
        name: `local` or `ray`.
        devices: number of devices of this worker.
        folder: for files that requests contain.
        address: of a Ray cluster.
    """

    def __init__(self, name: str, devices: int, folder: Path, *, address: str | None = None) -> None:
        self.name, self.devices, self._folder, self._address = name, devices, folder, address
        self._kept: list[_Kept] = []
        self._lock = threading.Lock()
        self._agent: HostAgent | None = None
        self.shared: SharedDevices | None = None
        """The devices that dry runs on this host take; None if Ray assigns them."""
        if name == "local":
            device = detect()
            ids = visible_gpus(device.count)[:devices] if device.type == "cuda" else []
            self.shared = SharedDevices(ids, count=devices)
            self._agent = HostAgent(PLAIN_IMPORTS)

    def check(self) -> None:
        """Checks that the Ray cluster is reachable.

        Raises:
            RunnerError: no Ray listens at the address.
        """
        if self.name == "ray" and self._address is not None:
            check_listens(self._address)

    @contextlib.contextmanager
    def runner(self, assignment: Assignment) -> Iterator[Runner]:
        """Yields a runner on which a dry run can start at once. The dry run has it until the `with` ends.

        Raises:
            UsageError: the request cannot be run here.
            RunnerError: the runner's processes do not start.
        """
        kept = self._acquire(assignment)
        try:
            with kept.making:
                kept.runner = self._ready(kept, assignment)
            yield kept.runner
        finally:
            with self._lock:
                kept.users.discard(assignment.dry_run)
            self._close_idle()

    def _ready(self, kept: _Kept, assignment: Assignment) -> Runner:
        """Returns the runner, made if there is none or it was closed."""
        runner, kept.runner = kept.runner, None
        if runner is None or runner.closed:
            _remove(kept)
            kept.folder = self._folder / f"{assignment.search}-{assignment.dry_run}"
            runner = self._make(assignment, kept.folder)
        try:
            runner.wait_ready()
        except RunnerError:
            _close(runner)
            raise
        return runner

    def _acquire(self, assignment: Assignment) -> _Kept:
        with self._lock:
            own_runners = [each for each in self._kept if each.search == assignment.search]
            free = [each for each in own_runners if self._agent is not None or not each.users]
            kept = free[0] if free else _Kept(assignment.search, assignment.devices)
            # Moved to the end: the least recently used is closed first.
            self._kept = [each for each in self._kept if each is not kept] + [kept]
            kept.users.add(assignment.dry_run)
        self._close_idle()
        return kept

    def _close_idle(self) -> None:
        """Closes idle runners: the oldest beyond `MOST_KEPT`, or on Ray those whose devices are needed."""
        with self._lock:
            idle = [each for each in self._kept if not each.users]
            if self._agent is not None:
                surplus = idle[: max(0, len(idle) - MOST_KEPT)]
            else:
                surplus = self._blocking(idle)
            self._kept = [each for each in self._kept if each not in surplus]
        for kept in surplus:
            _close(kept.runner)
            _remove(kept)

    def _blocking(self, idle: list[_Kept]) -> list[_Kept]:
        """Returns idle runners that occupy devices which active ones need, and all idle ones of another size, which
        could fragment a host's devices so that a multi-device dry run does not fit.
        """
        sizes = {each.devices for each in self._kept if each.users}
        blocking = [each for each in idle if sizes and sizes != {each.devices}]
        held = sum(each.devices for each in self._kept if each not in blocking)
        for each in idle:
            if held > self.devices and each not in blocking:
                blocking.append(each)
                held -= each.devices
        return blocking

    def _make(self, assignment: Assignment, folder: Path) -> Runner:
        options: dict[str, Any] = arguments(assignment.request, folder)
        at_once = self.devices // assignment.devices if self._agent is not None else 1
        options |= {"devices": assignment.devices, "runner": self.name, "concurrency": at_once}
        if self.name == "ray":
            options["ray_address"] = self._address
        options.pop("hardware", None)  # only for the estimate, which the searcher makes
        request = Request(**options)
        task = resolve_task(request, cluster=self.name == "ray")
        try:
            return make_runner(
                request,
                task,
                work=make_work(request, task),
                limit_mib=assignment.payload["memory_limit_mib"],
                estimator=None,
                earlier=(),
                agent=self._agent,
                shared=self.shared,
            )
        except UsageError as error:
            if self._agent is not None:
                raise
            raise RunnerError(str(error)) from error  # a host that the cluster lost may come back

    def stop(self, assignment: Assignment, log: Path) -> None:
        """Stops the dry run that writes this log. A runner that cannot stop a single one is closed."""
        with self._lock:
            has = [each.runner for each in self._kept if assignment.dry_run in each.users]
        for runner in has:
            if isinstance(runner, LocalRunner):
                runner.stop(str(log))
            elif runner is not None:
                runner.close()

    def close(self) -> None:
        """Ends all dry runs and runners."""
        with self._lock:
            kept, self._kept = self._kept, []
        if self._agent is not None:
            self._agent.close()
        for each in kept:
            _close(each.runner)
            _remove(each)


def _remove(kept: _Kept) -> None:
    """Removes the files of a request whose runner is closed."""
    if kept.folder is not None:
        shutil.rmtree(kept.folder, ignore_errors=True)


def _close(runner: Runner | None) -> None:
    # Local runners share an agent, which is closed with the worker.
    if runner is not None and not isinstance(runner, LocalRunner):
        runner.close()
