"""Worker routes of the API: join, lease dry runs by long polling, heartbeat, answer, leave."""

import asyncio
from concurrent.futures import Future
from dataclasses import asdict
from typing import Annotated, Any, Literal

from anyio.to_thread import run_sync
from fastapi import APIRouter, Body as RequestBody, Path, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, JsonValue

from ...base.errors import LeaseOver, NotFound, UsageError
from ...results import Measurement
from ..logs import MOST_AT_ONCE, write_log
from ..records import Assignment, DryRun, Role, User, Worker
from .access import Guarded, Joiner, Reader
from .models import (
    LARGEST_ID,
    Body,
    Count,
    JoinAnswer,
    LeaseForm,
    LogAnswer,
    OutcomeForm,
    RenewAnswer,
    Word,
    WorkerAnswer,
    WorkersAnswer,
    checked,
)
from .parts import Parts
from .problems import Problem
from .searches import PartsOf

LEAST_MEMORY_MIB, MOST_MEMORY_MIB = 64, 1 << 27
"""Smallest and largest accepted memory of a device."""


def _hardware_of_a_worker(value: dict[str, Any]) -> None:
    from ..placing import hardware_of

    hardware_of(value, "")


class DeviceForm(Body):
    """A kind of device in the form of `Device.to_dict`, with its hardware."""

    type: Literal["cuda", "cpu"]
    name: Word
    count: Count
    memory_mib: Annotated[int, Field(ge=LEAST_MEMORY_MIB, le=MOST_MEMORY_MIB)]
    capability: Annotated[str, Field(pattern=r"^[0-9]{1,3}\.[0-9]{1,3}$")] | None = None
    features: Annotated[list[Word], Field(max_length=50, default_factory=list)]
    hardware: Annotated[dict[str, JsonValue], checked(_hardware_of_a_worker)] | None = None
    """The fields of `redline.Hardware`, of one device."""

    def described(self) -> dict[str, Any]:
        """Returns the device as stored in a worker's record."""
        return self.model_dump(exclude_unset=True)


class JoinForm(Body):
    """A worker that joins the pool."""

    name: Annotated[str, Field(max_length=200)] = ""
    host: Word
    device: DeviceForm
    devices: Count
    memory_mib: Annotated[float, Field(ge=LEAST_MEMORY_MIB, le=MOST_MEMORY_MIB)]
    software: Annotated[dict[str, JsonValue], Field(max_length=100, default_factory=dict)]


LONGEST_WAIT_S = 25.0
"""Longest wait for a dry run, s. Proxies close connections that are silent for longer."""
LARGEST_LOG = 256 << 20
"""Largest log, bytes."""
_LOOK_S = 0.5
LONGEST_REASON = 20_000
"""Longest reason of a refusal, characters."""
router = APIRouter(tags=["workers"], route_class=Guarded)
WorkerId = Annotated[str, Path(pattern="^[0-9a-f]{12}$", description="Id of a worker.")]
DryRunId = Annotated[int, Path(ge=0, le=LARGEST_ID, description="Number of a dry run.")]
_ASSIGNMENT: dict[int | str, dict[str, Any]] = {204: {"description": "No dry run is available for this worker."}}


def worker_answer(worker: Worker, busy: int, names: dict[int, str]) -> WorkerAnswer:
    """Returns the answer for a worker."""
    return WorkerAnswer.of(worker, user=names.get(worker.user, ""), busy=busy, memory=worker.memory_mib)


def _check_owner(user: User, worker: Worker) -> Worker:
    if worker.user != user.id and user.role != Role.ADMIN:
        raise Problem(403, "not_yours", f"the worker {worker.id} was joined by another user")
    return worker


def _leased(parts: Parts, user: User, dry_run: int, lease: int) -> DryRun:
    """Returns a dry run that a worker of this user has, or of which this lease is over.

    Raises:
        LeaseOver: the lease does not exist.
    """
    found = parts.store.dry_run(dry_run)
    if found.worker is None or found.lease < lease:
        raise LeaseOver(f"the dry run {dry_run} has no lease {lease}")
    if found.lease == lease:  # an earlier one changes nothing, whoever had it
        _check_owner(user, parts.store.worker(found.worker))
    return found


@router.get("/v1/workers")
def listed(user: Reader, parts: PartsOf) -> WorkersAnswer:
    """Returns the workers of the pool with their busy devices."""
    busy: dict[str, int] = {}
    for each in parts.store.running():
        busy[each.worker] = busy.get(each.worker, 0) + each.devices
    names = {each.id: each.name for each in parts.store.users()}
    return WorkersAnswer(workers=[worker_answer(each, busy.get(each.id, 0), names) for each in parts.store.workers()])


@router.post("/v1/workers", status_code=201)
def join(form: JoinForm, user: Joiner, parts: PartsOf) -> JoinAnswer:
    """Adds a worker's devices to the pool."""
    joined = parts.store.join(
        user, form.name, form.host, form.device.described(), form.devices, int(form.memory_mib), form.software
    )
    parts.store.audit(user.name, "join", joined.id, {"host": form.host, "devices": form.devices})
    return JoinAnswer(id=joined.id, lease_seconds=parts.dispatcher.lease_s)


@router.post("/v1/workers/{worker}/leave", status_code=204)
def leave(worker: WorkerId, user: Joiner, parts: PartsOf) -> None:
    """Removes a worker from the pool. Its dry runs return to the queue."""
    _check_owner(user, parts.store.worker(worker))
    parts.store.leave(worker)
    parts.store.audit(user.name, "leave", worker)


@router.post("/v1/workers/{worker}/lease", responses=_ASSIGNMENT)
async def lease(
    worker: WorkerId,
    user: Joiner,
    parts: PartsOf,
    request: Request,
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT_S)] = LONGEST_WAIT_S,
) -> Response:
    """Leases a dry run to this worker as soon as one is available."""
    _check_owner(user, await run_sync(parts.store.worker, worker))
    await run_sync(parts.store.seen, worker)
    question = parts.dispatcher.ask(worker)
    try:
        found = await _answer(question, wait, request, parts)
    except asyncio.CancelledError:  # the server is stopping
        if not question.cancel():
            question.add_done_callback(lambda future: _return_unsent(parts, future))
        raise
    if found is None:
        return Response(status_code=204)
    if await request.is_disconnected():  # otherwise it would wait for the lease to expire
        await run_sync(parts.store.give_back, found.dry_run, found.lease)
    return JSONResponse(asdict(found))


async def _answer(
    question: "Future[Assignment | None]", wait: float, request: Request, parts: Parts
) -> Assignment | None:
    """Waits for a dry run, until the worker disconnects or the time is over. Returns one that is assigned at that
    moment.
    """
    loop = asyncio.get_running_loop()
    until, waiting = loop.time() + wait, asyncio.wrap_future(question)
    while not waiting.done():
        left = until - loop.time()
        disconnected = left <= 0 or parts.feed.stopped or await request.is_disconnected()
        if disconnected and question.cancel():
            return None
        await asyncio.wait({waiting}, timeout=max(0.01, min(left, _LOOK_S)))
    return waiting.result()


def _return_unsent(parts: Parts, future: "Future[Assignment | None]") -> None:
    """Returns a dry run to the queue that was assigned after its worker's request had ended."""
    if not future.cancelled() and (found := future.result()) is not None:
        parts.store.give_back(found.dry_run, found.lease)


@router.post("/v1/leases/{dry_run}/renew")
def renew(dry_run: DryRunId, form: LeaseForm, user: Joiner, parts: PartsOf) -> RenewAnswer:
    """Renews the lease of a dry run that still runs. Status 409 means that the worker must stop: the outcome is not
    needed any more, or another worker has the dry run.
    """
    _leased(parts, user, dry_run, form.lease)
    return RenewAnswer(until=parts.store.renew(dry_run, form.lease, parts.dispatcher.lease_s))


@router.post("/v1/leases/{dry_run}/answer", status_code=204)
def answer(dry_run: DryRunId, form: OutcomeForm, user: Joiner, parts: PartsOf) -> None:
    """Stores the outcome of a dry run. A repeated answer changes nothing. Status 409 means that another worker has
    the dry run, whose answer counts.
    """
    check_outcome(_leased(parts, user, dry_run, form.lease).kind, form.outcome)
    try:
        parts.store.answer(dry_run, form.lease, form.outcome)
    except LeaseOver:
        parts.metrics.fenced.inc()
        raise
    parts.metrics.outcomes.inc()
    parts.dispatcher.wake()


def check_outcome(kind: str, outcome: dict[str, Any]) -> None:
    """Checks that a searcher can read an outcome.

    Raises:
        UsageError: it is not an outcome of a dry run of that kind.
    """
    if "refused" in outcome:
        if not isinstance(outcome["refused"], str) or len(outcome["refused"]) > LONGEST_REASON:
            raise UsageError(f"outcome.refused must be a text of at most {LONGEST_REASON} characters")
        return
    turns = outcome.get("turns") if kind == "turns" else [[outcome]]
    try:
        for each in turns or ():
            for measured in each:
                Measurement.from_dict(measured)
    except (UsageError, KeyError, TypeError, ValueError, AttributeError) as error:
        words = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"the outcome of the dry run is invalid: {words[:500]}") from None


@router.post("/v1/leases/{dry_run}/return", status_code=204)
def give_back(dry_run: DryRunId, form: LeaseForm, user: Joiner, parts: PartsOf) -> None:
    """Returns a dry run to the queue. It does not count as lost."""
    _leased(parts, user, dry_run, form.lease)
    parts.store.give_back(dry_run, form.lease)
    parts.dispatcher.wake()


@router.put("/v1/leases/{dry_run}/log")
def log(
    dry_run: DryRunId,
    lease: Annotated[int, Query(ge=0, le=LARGEST_ID)],
    name: Annotated[str, Query(max_length=40)],
    offset: Annotated[int, Query(ge=0, lt=1 << 40)],
    text: Annotated[bytes, RequestBody(media_type="application/octet-stream", max_length=MOST_AT_ONCE)],
    user: Joiner,
    parts: PartsOf,
) -> LogAnswer:
    """Stores a part of a dry run's output, from a byte offset on."""
    found = _leased(parts, user, dry_run, lease)
    if found.lease != lease:
        raise LeaseOver(f"the dry run {dry_run} has a newer lease")
    requests = found.payload.get("requests", [])
    if name not in [each.get("log") for each in requests]:
        raise NotFound(f"the dry run {dry_run} has no log '{name}'")
    if offset + len(text) > LARGEST_LOG:
        raise UsageError(f"a log must have at most {LARGEST_LOG >> 20} MiB; the rest is not stored")
    return LogAnswer(size=write_log(parts.runs.data, found.search, name, offset, text))
