"""A host of a trial as Ray has placed it: an actor with a host agent, and its handle."""

import os
import threading
import time
from typing import Any

from .worker_group import Host, HostWorker

LOOK_S = 1.0
"""How often it is looked whether the raylet lives, s."""


class RayHost(Host):
    """Inside a Ray worker that holds the devices of one bundle of a placement group.

    It ends with the raylet that started the worker: a worker that runs a trial outlives it otherwise, as nobody it could
    answer is left.
    """

    def __init__(self, imports: tuple[str, ...]) -> None:
        raylet = os.getppid()
        super().__init__(imports)
        threading.Thread(target=_end_behind, args=(raylet,), name="raylet", daemon=True).start()

    def node_id(self) -> str:
        """Ray's name of the host."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def address(self) -> str:
        import ray

        return ray.util.get_node_ip_address()

    def device_ids(self) -> tuple[str, ...]:
        import ray

        return tuple(str(each) for each in ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))


def _end_behind(parent: int) -> None:
    """Ends this process, and with it its host agent, once its parent has ended."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


class RayMember(HostWorker):
    """One of them, asked through Ray.

    Args:
        actor: its handle.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @property
    def here(self) -> bool:  # type: ignore[override]
        """Whether it is on the node of this process."""
        import ray

        return bool(ray.get_runtime_context().get_node_id() == self.ask("node_id"))

    def ask(self, what: str, *arguments: Any) -> Any:
        import ray

        return ray.get(getattr(self._actor, what).remote(*arguments))

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)
