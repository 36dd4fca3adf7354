"""What a worker keeps warm: the runners of the searches whose dry runs it has had last, on devices that they share."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..device import detect, visible_gpus
from ..runners import LocalRunner, Runner
from ..runners.host import PLAIN_IMPORTS, HostAgent
from ..runners.shared_devices import SharedDevices
from ..tuner.request import Request
from ..tuner.running import make_runner, make_work
from ..tuner.task import resolve_task
from .records import Assignment
from .request import arguments

MOST_KEPT = 3
"""Runners that are kept while nobody uses them."""


@dataclass
class _Kept:
    runner: Runner | None = None
    """None while it is being made."""
    users: int = 0
    making: threading.Lock = field(default_factory=threading.Lock)


class WarmRunners:
    """Runners by search, made when they are first needed. Thread-safe.

    Args:
        name: `local` or `ray`.
        devices: of this worker.
        folder: for the files that a search's request holds.
        address: of a Ray cluster.
    """

    def __init__(self, name: str, devices: int, folder: Path, *, address: str | None = None) -> None:
        self.name, self.devices, self._folder, self._address = name, devices, folder, address
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._agent: HostAgent | None = None
        self.shared: SharedDevices | None = None
        """The devices that dry runs of this host take; None where Ray gives them."""
        if name == "local":
            device = detect()
            ids = visible_gpus(device.count)[:devices] if device.type == "cuda" else []
            self.shared = SharedDevices(ids, count=devices)
            self._agent = HostAgent(PLAIN_IMPORTS)

    @contextlib.contextmanager
    def runner(self, assignment: Assignment) -> Iterator[Runner]:
        """The runner of a dry run's search, which is kept until the `with` ends, and for a while after.

        Raises:
            UsageError: what the search asks for cannot be done here.
            RunnerError: its processes do not start.
        """
        kept = self._taken(assignment.search)
        try:
            with kept.making:
                if kept.runner is None or kept.runner.closed:
                    kept.runner = self._made(assignment)
            yield kept.runner
        finally:
            with self._lock:
                kept.users -= 1
            self._let_go(MOST_KEPT if self.name == "local" else 0)

    def _taken(self, search: str) -> _Kept:
        with self._lock:
            kept = self._kept.pop(search, None) or _Kept()
            self._kept[search] = kept  # the last one used is the last one that goes
            kept.users += 1
        if self.name != "local":
            self._let_go(0)  # a runner of Ray's holds devices as long as it lives
        return kept

    def _let_go(self, most: int) -> None:
        """Closes runners that nobody uses, but for the last so many."""
        with self._lock:
            idle = [search for search, kept in self._kept.items() if not kept.users]
            gone = [self._kept.pop(search) for search in idle[: max(0, len(idle) - most)]]
        for kept in gone:
            _close(kept.runner)

    def _made(self, assignment: Assignment) -> Runner:
        asked: dict[str, Any] = arguments(assignment.request, self._folder / assignment.search)
        asked |= {"devices": assignment.devices, "runner": self.name, "concurrency": self.devices // assignment.devices}
        if self.name == "ray":
            asked |= {"ray_address": self._address, "concurrency": None}
        asked.pop("hardware", None)  # of the estimate, which is the searcher's affair
        request = Request(**asked)
        task = resolve_task(request, cluster=self.name == "ray")
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

    def stop(self, assignment: Assignment, log: Path) -> None:
        """Ends a dry run that writes this log; where a runner cannot end one, it ends all of that search's."""
        with self._lock:
            kept = self._kept.get(assignment.search)
        runner = kept.runner if kept is not None else None
        if isinstance(runner, LocalRunner):
            runner.stop(str(log))
        elif runner is not None:
            runner.close()

    def close(self) -> None:
        """Ends every dry run, and what was kept."""
        with self._lock:
            kept, self._kept = list(self._kept.values()), {}
        if self._agent is not None:
            self._agent.close()
        for each in kept:
            _close(each.runner)


def _close(runner: Runner | None) -> None:
    # Those on this host share an agent, which goes with the worker.
    if runner is not None and not isinstance(runner, LocalRunner):
        runner.close()
