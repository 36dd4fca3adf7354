"""The pool as a worker uses it: a server over HTTP."""

from dataclasses import fields
from typing import Any

from ..base.errors import LeaseOver
from .records import Assignment
from .transport import Transport

LARGEST_OUTCOME = 960 * 1024
"""Largest outcome, bytes, so that its request stays within the server's limit. Logs are sent separately."""
SLACK_S = 10.0
"""Time beyond the requested wait after which the connection counts as lost, s."""


class ServerPool:
    """Gives a worker dry runs of a server and takes their outcomes, over HTTP.

    Failures to reach it raise `OSError` or `StorageUnavailable`, which the worker retries.

    Args:
        server: its address.
        token: of the user who joins the worker.
        verify: file with the certificates to trust; None for the system's.
        pinned: as for `Transport`.
    """

    def __init__(self, server: str, token: str, verify: str | None = None, *, pinned: str | None = None) -> None:
        self._transport = Transport(server, token, verify, pinned=pinned)

    def join(
        self, name: str, host: str, device: dict[str, Any], devices: int, memory_mib: int, software: dict[str, Any]
    ) -> str:
        """Adds devices to the pool and returns the worker's id."""
        form = {"name": name, "host": host, "device": device, "devices": devices, "memory_mib": memory_mib}
        return str(self._transport.json("POST", "/v1/workers", json={**form, "software": software})["id"])

    def lease(self, worker: str, wait_s: float) -> Assignment | None:
        """Leases a dry run to this worker, waiting at most `wait_s`; None if there is none. Also counts as a sign of
        life.

        Raises:
            NotFound: the pool does not know the worker any more. It must join again.
        """
        path = f"/v1/workers/{worker}/lease"
        found = self._transport.json("POST", path, params={"wait": wait_s}, timeout=wait_s + SLACK_S)
        if found is None:
            return None
        known = {each.name for each in fields(Assignment)}
        return Assignment(**{name: value for name, value in found.items() if name in known})

    def renew(self, dry_run: int, lease: int) -> None:
        """Renews the lease of a dry run that still runs.

        Raises:
            LeaseOver: its outcome is not needed any more, or another worker has it.
        """
        self._transport.json("POST", f"/v1/leases/{dry_run}/renew", json={"lease": lease})

    def answer(self, dry_run: int, lease: int, outcome: dict[str, Any]) -> None:
        """Submits the outcome of a dry run.

        Raises:
            LeaseOver: as for `renew`; the outcome is discarded.
        """
        self._transport.json("POST", f"/v1/leases/{dry_run}/answer", json={"lease": lease, "outcome": outcome})

    def give_back(self, dry_run: int, lease: int) -> None:
        """Returns a dry run so that another worker runs it, without counting as lost. An expired lease is ignored."""
        try:
            self._transport.json("POST", f"/v1/leases/{dry_run}/return", json={"lease": lease})
        except LeaseOver:  # the dry run is unassigned already
            return

    def log(self, assignment: Assignment, name: str, offset: int, text: bytes) -> None:
        """Appends a part of a dry run's output.

        Raises:
            LeaseOver: as for `renew`.
        """
        params = {"lease": assignment.lease, "name": name, "offset": offset}
        headers = {"content-type": "application/octet-stream"}
        self._transport.json(
            "PUT", f"/v1/leases/{assignment.dry_run}/log", params=params, content=text, headers=headers
        )

    def leave(self, worker: str) -> None:
        """Removes the worker's devices from the pool."""
        self._transport.json("POST", f"/v1/workers/{worker}/leave")

    def close(self) -> None:
        """Closes the connections."""
        self._transport.close()
