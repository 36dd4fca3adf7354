"""A host of a trial that Ray placed: an actor with a host agent, and its handle."""

import os
import threading
import time
from typing import Any

from .worker_group import Host, HostWorker

LOOK_S = 1.0
"""Interval between checks that the raylet lives, s."""


class RayHost(Host):
    """Runs inside a Ray worker that has the devices of one bundle of a placement group.

    It ends with the raylet that started the worker. Otherwise a worker that runs a trial would outlive it, with nobody
    left to answer.
    """

    def __init__(self, imports: tuple[str, ...]) -> None:
        raylet = os.getppid()
        super().__init__(imports)
        threading.Thread(target=_end_with_parent, args=(raylet,), name="raylet", daemon=True).start()

    def node_id(self) -> str:
        """Ray's id of the node."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def address(self) -> str:
        import ray

        return ray.util.get_node_ip_address()

    def device_ids(self) -> tuple[str, ...]:
        import ray

        return tuple(str(each) for each in ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))


def _end_with_parent(parent: int) -> None:
    """Ends this process, and with it its host agent, when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


class RayWorker(HostWorker):
    """The handle of a `RayHost`, called through Ray."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @property
    def here(self) -> bool:  # type: ignore[override]
        """True if it is on the node of this process."""
        import ray

        return bool(ray.get_runtime_context().get_node_id() == self.ask("node_id"))

    def ask(self, method: str, *arguments: Any) -> Any:
        import ray

        return ray.get(getattr(self._actor, method).remote(*arguments))

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)
