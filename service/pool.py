"""The pool as a worker uses it, with one interface to the store itself and to a server over HTTP."""

import time
from abc import ABC, abstractmethod
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..base.errors import LeaseOver
from .logs import write_log
from .records import Assignment
from .scheduling import decide
from .store import Store
from .transport import Transport

LARGEST_OUTCOME = 960 * 1024
"""Largest outcome, bytes, so that its request stays within the server's limit. Logs are sent separately."""
LOOK_S = 0.2
"""How often a worker without a server looks for a dry run, s."""


class Pool(ABC):
    """Gives a worker dry runs and takes their outcomes.

    Failures to reach it, such as an unreachable server or a locked database, raise `OSError` or `StorageUnavailable`,
    which the worker retries.
    """

    @abstractmethod
    def join(
        self, name: str, host: str, device: dict[str, Any], devices: int, memory_mib: int, software: dict[str, Any]
    ) -> str:
        """Adds devices to the pool and returns the worker's id."""

    @abstractmethod
    def lease(self, worker: str, wait_s: float) -> Assignment | None:
        """Leases a dry run to this worker, waiting at most `wait_s`; None if there is none. Also counts as a sign of
        life.

        Raises:
            NotFound: the pool does not know the worker any more. It must join again.
        """

    @abstractmethod
    def renew(self, dry_run: int, lease: int) -> None:
        """Renews the lease of a dry run that still runs.

        Raises:
            LeaseOver: its outcome is not needed any more, or another worker has it.
        """

    @abstractmethod
    def answer(self, dry_run: int, lease: int, outcome: dict[str, Any]) -> None:
        """Submits the outcome of a dry run.

        Raises:
            LeaseOver: as for `renew`; the outcome is discarded.
        """

    @abstractmethod
    def give_back(self, dry_run: int, lease: int) -> None:
        """Returns a dry run so that another worker runs it, without counting as lost. An expired lease is ignored."""

    @abstractmethod
    def log(self, assignment: Assignment, name: str, offset: int, text: bytes) -> None:
        """Appends a part of a dry run's output.

        Raises:
            LeaseOver: as for `renew`.
        """

    @abstractmethod
    def leave(self, worker: str) -> None:
        """Removes the worker's devices from the pool."""


class StorePool(Pool):
    """A pool on a store opened by this process. Without a dispatcher, each worker decides for itself and takes its
    own dry runs.

    Args:
        store: of the pool.
        user: id of the user who joins workers.
        data: the server's data folder, for logs.
        lease_s: duration of a lease, s.
    """

    def __init__(self, store: Store, *, user: int, data: Path, lease_s: float) -> None:
        self._store, self._user, self._data, self._lease_s = store, user, data, lease_s

    def join(
        self, name: str, host: str, device: dict[str, Any], devices: int, memory_mib: int, software: dict[str, Any]
    ) -> str:
        return self._store.join(self._user, name, host, device, devices, memory_mib, software).id

    def lease(self, worker: str, wait_s: float) -> Assignment | None:
        until = time.monotonic() + wait_s
        self._store.seen(worker)
        while True:
            self._store.expire()
            for dry_run, chosen in self._decided(worker):
                if chosen != worker:
                    continue
                try:
                    return self._store.lease(dry_run, worker, self._lease_s)
                except LeaseOver:  # another worker was faster
                    continue
            if time.monotonic() >= until:
                return None
            time.sleep(LOOK_S)

    def _decided(self, worker: str) -> list[tuple[int, str]]:
        store = self._store
        return decide(store.waiting(), store.running(), [store.worker(worker)], store.shares(), time.time())

    def renew(self, dry_run: int, lease: int) -> None:
        self._store.renew(dry_run, lease, self._lease_s)

    def answer(self, dry_run: int, lease: int, outcome: dict[str, Any]) -> None:
        self._store.answer(dry_run, lease, outcome)

    def give_back(self, dry_run: int, lease: int) -> None:
        self._store.give_back(dry_run, lease)

    def log(self, assignment: Assignment, name: str, offset: int, text: bytes) -> None:
        self._store.renew(assignment.dry_run, assignment.lease, self._lease_s)
        write_log(self._data, assignment.search, name, offset, text)

    def leave(self, worker: str) -> None:
        self._store.leave(worker)


SLACK_S = 10.0
"""Time beyond the requested wait after which the connection counts as lost, s."""


class ServerPool(Pool):
    """The pool of a server, over HTTP.

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
        except LeaseOver:  # the dry run is unassigned already
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
        """Closes the connections."""
        self._transport.close()
