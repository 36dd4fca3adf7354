"""A host of a trial as Ray has placed it: an actor with a host agent, and its handle."""

from typing import Any

from .worker_group import Host, HostWorker


class RayHost(Host):
    """Inside a Ray worker that holds the devices of one bundle of a placement group."""

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
