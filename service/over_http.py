"""The pool of a server, as a worker reaches it over HTTP."""

from dataclasses import fields
from typing import Any

from ..base.errors import LeaseOver
from .pool import Pool
from .records import Assignment
from .transport import Transport

SLACK_S = 10.0
"""Beyond what a question may wait, before the connection counts as lost."""


class ServerPool(Pool):
    """The pool of a server.

    Args:
        server: its address.
        token: of who joins the worker.
        verify: file with the certificates to trust; None for the system's.
        pinned: as for `Transport`.
    """

    def __init__(self, server: str, token: str, verify: str | None = None, *, pinned: str | None = None) -> None:
        self._transport = Transport(server, token, verify, pinned=pinned)

    def join(
        self, name: str, host: str, device: dict[str, Any], devices: int, memory_mib: int, software: dict[str, Any]
    ) -> str:
        form = {"name": name, "host": host, "device": device, "devices": devices, "memory_mib": memory_mib}
        return str(self._transport.json("POST", "/v1/workers", json={**form, "software": software})["id"])

    def lease(self, worker: str, wait_s: float) -> Assignment | None:
        path = f"/v1/workers/{worker}/lease"
        found = self._transport.json("POST", path, params={"wait": wait_s}, timeout=wait_s + SLACK_S)
        if found is None:
            return None
        known = {each.name for each in fields(Assignment)}
        return Assignment(**{name: value for name, value in found.items() if name in known})

    def renew(self, dry_run: int, lease: int) -> None:
        self._transport.json("POST", f"/v1/leases/{dry_run}/renew", json={"lease": lease})

    def answer(self, dry_run: int, lease: int, outcome: dict[str, Any]) -> None:
        self._transport.json("POST", f"/v1/leases/{dry_run}/answer", json={"lease": lease, "outcome": outcome})

    def give_back(self, dry_run: int, lease: int) -> None:
        try:
            self._transport.json("POST", f"/v1/leases/{dry_run}/return", json={"lease": lease})
        except LeaseOver:  # it is nobody's
            return

    def log(self, assignment: Assignment, name: str, offset: int, text: bytes) -> None:
        params = {"lease": assignment.lease, "name": name, "offset": offset}
        headers = {"content-type": "application/octet-stream"}
        self._transport.json(
            "PUT", f"/v1/leases/{assignment.dry_run}/log", params=params, content=text, headers=headers
        )

    def leave(self, worker: str) -> None:
        self._transport.json("POST", f"/v1/workers/{worker}/leave")

    def close(self) -> None:
        """Closes its connections."""
        self._transport.close()
