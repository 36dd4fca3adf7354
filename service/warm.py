"""What a worker keeps warm: the runners of the searches whose dry runs it has had last, on devices that they share."""

import contextlib
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
"""Runners on this host that are kept while nobody uses them."""


@dataclass(eq=False)
class _Kept:
    search: str
    devices: int
    """Of a dry run."""
    runner: Runner | None = None
    """None while it is being made."""
    users: set[int] = field(default_factory=set)
    """Dry runs that have it."""
    making: threading.Lock = field(default_factory=threading.Lock)


class WarmRunners:
    """Runners by search, made when they are first needed. Thread-safe.

    On this host a search has one, for all its dry runs at a time, on devices that searches share. A Ray cluster's devices
    are held by a runner as long as it lives: there each dry run at a time has its own, which is kept until its devices
    are needed.

    Args:
        name: `local` or `ray`.
        devices: of this worker.
        folder: for the files that a search's request holds.
        address: of a Ray cluster.
    """

    def __init__(self, name: str, devices: int, folder: Path, *, address: str | None = None) -> None:
        self.name, self.devices, self._folder, self._address = name, devices, folder, address
        self._kept: list[_Kept] = []
        self._lock = threading.Lock()
        self._agent: HostAgent | None = None
        self.shared: SharedDevices | None = None
        """The devices that dry runs of this host take; None where Ray gives them."""
        if name == "local":
            device = detect()
            ids = visible_gpus(device.count)[:devices] if device.type == "cuda" else []
            self.shared = SharedDevices(ids, count=devices)
            self._agent = HostAgent(PLAIN_IMPORTS)

    def check(self) -> None:
        """Whether there is anything to run on.

        Raises:
            RunnerError: no Ray listens at the address.
        """
        if self.name == "ray" and self._address is not None:
            check_listens(self._address)

    @contextlib.contextmanager
    def runner(self, assignment: Assignment) -> Iterator[Runner]:
        """A runner for a dry run that can begin at once, which has it until the `with` ends.

        Raises:
            UsageError: what the search asks for cannot be done here.
            RunnerError: its processes do not start.
        """
        kept = self._taken(assignment)
        try:
            with kept.making:
                kept.runner = self._ready(kept, assignment)
            yield kept.runner
        finally:
            with self._lock:
                kept.users.discard(assignment.dry_run)
            self._let_go()

    def _ready(self, kept: _Kept, assignment: Assignment) -> Runner:
        """Its runner, made where there is none, or where that one is lost for good."""
        runner, kept.runner = kept.runner, None
        if runner is None or runner.closed:
            runner = self._made(assignment)
        try:
            runner.wait_ready()
        except RunnerError:
            _close(runner)
            raise
        return runner

    def _taken(self, assignment: Assignment) -> _Kept:
        with self._lock:
            mine = [each for each in self._kept if each.search == assignment.search]
            free = [each for each in mine if self._agent is not None or not each.users]
            kept = free[0] if free else _Kept(assignment.search, assignment.devices)
            # The last one used is the last one that goes.
            self._kept = [each for each in self._kept if each is not kept] + [kept]
            kept.users.add(assignment.dry_run)
        self._let_go()
        return kept

    def _let_go(self) -> None:
        """Closes runners that nobody uses: the oldest beyond `MOST_KEPT`, and of Ray's those whose devices are needed."""
        with self._lock:
            idle = [each for each in self._kept if not each.users]
            if self._agent is not None:
                gone = idle[: max(0, len(idle) - MOST_KEPT)]
            else:
                gone = self._in_the_way(idle)
            self._kept = [each for each in self._kept if each not in gone]
        for kept in gone:
            _close(kept.runner)

    def _in_the_way(self, idle: list[_Kept]) -> list[_Kept]:
        """Idle runners that hold devices which those in use need; with them all of another size, between which a host's
        devices may be split so that no gang has room."""
        sizes = {each.devices for each in self._kept if each.users}
        gone = [each for each in idle if sizes and sizes != {each.devices}]
        held = sum(each.devices for each in self._kept if each not in gone)
        for each in idle:
            if held > self.devices and each not in gone:
                gone.append(each)
                held -= each.devices
        return gone

    def _made(self, assignment: Assignment) -> Runner:
        asked: dict[str, Any] = arguments(
            assignment.request, self._folder / f"{assignment.search}-{assignment.dry_run}"
        )
        at_once = self.devices // assignment.devices if self._agent is not None else 1
        asked |= {"devices": assignment.devices, "runner": self.name, "concurrency": at_once}
        if self.name == "ray":
            asked["ray_address"] = self._address
        asked.pop("hardware", None)  # of the estimate, which is the searcher's affair
        request = Request(**asked)
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
            raise RunnerError(str(error)) from error  # a cluster that has lost a host may have it again

    def stop(self, assignment: Assignment, log: Path) -> None:
        """Ends a dry run that writes this log; where a runner cannot end one, it ends."""
        with self._lock:
            has = [each.runner for each in self._kept if assignment.dry_run in each.users]
        for runner in has:
            if isinstance(runner, LocalRunner):
                runner.stop(str(log))
            elif runner is not None:
                runner.close()

    def close(self) -> None:
        """Ends every dry run, and what was kept."""
        with self._lock:
            kept, self._kept = self._kept, []
        if self._agent is not None:
            self._agent.close()
        for each in kept:
            _close(each.runner)


def _close(runner: Runner | None) -> None:
    # Those on this host share an agent, which goes with the worker.
    if runner is not None and not isinstance(runner, LocalRunner):
        runner.close()
