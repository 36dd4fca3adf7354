"""Routes of the service as a whole: the caller, the queue, events, estimates, health and metrics."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from ... import __version__
from ...base.errors import ServiceError
from ..records import SearchState
from .access import TOO_MANY_STRANGERS, Guarded, Reader, address_of
from .models import EstimateForm, EventAnswer, HealthAnswer, MeAnswer, QueueAnswer
from .problems import Problem
from .searches import STREAM, EventId, PartsOf, resumed, search_answer, seen, stream, why_waiting

router = APIRouter(tags=["service"], route_class=Guarded)
MOST_SHOWN = 1000


@router.get("/v1/me")
def me(user: Reader) -> MeAnswer:
    """Returns the caller and their permissions."""
    return MeAnswer.of(user)


@router.get("/v1/queue")
def queue(user: Reader, parts: PartsOf) -> QueueAnswer:
    """Returns running and queued searches, with the reasons why they wait."""
    store = parts.store
    found = [
        each
        for state in (SearchState.RUNNING, SearchState.QUEUED)
        for each in store.searches(state=state, limit=MOST_SHOWN, seen_by=user)
    ]
    found.sort(key=lambda search: (-search.priority, search.created))
    workers, reasons = store.workers(), why_waiting(parts, found)
    running, names = store.running(), {each.id: each.name for each in store.users()}
    used = {names[each]: seconds / 3600 for each, seconds in store.usage().items() if each in names}
    return QueueAnswer(
        searches=[search_answer(parts, each, reasons, whole=False) for each in found],
        waiting=len(store.waiting()),
        running=len(running),
        devices=sum(each.devices for each in workers),
        busy=sum(each.devices for each in running),
        usage=used,
    )


@router.get("/v1/events", response_class=StreamingResponse, responses=STREAM)
async def events(
    user: Reader,
    request: Request,
    parts: PartsOf,
    after: EventId | None = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Streams the events of all searches and the pool, from now on or after an event."""
    return stream(request, parts, resumed(after, last_event_id), None)


@router.get("/v1/history")
def history(
    user: Reader,
    parts: PartsOf,
    after: EventId = 0,
    search: Annotated[str | None, Query(pattern="^[0-9a-f]{12}$")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[EventAnswer]:
    """Returns past events after an event, as a list."""
    if search is not None:
        seen(parts, user, search)
    found = parts.store.events(after, search=search, limit=limit)
    hidden = parts.store.hidden_from(user, {each.search for each in found if each.search is not None})
    found = [each for each in found if each.search not in hidden]
    return [EventAnswer.of(each) for each in found]


@router.post("/v1/estimate")
def estimate(form: EstimateForm, user: Reader, parts: PartsOf) -> dict[str, Any]:
    """Returns the best configurations, predicted without a device, in the form of `redline estimate --json`."""
    asked = {"devices": form.devices, **form.model_dump(exclude_unset=True, exclude_none=True)}
    return parts.estimates.of(asked)


@router.get("/healthz", tags=["operations"])
def healthz() -> HealthAnswer:
    """Returns ok if the process answers."""
    return HealthAnswer(status="ok", version=__version__)


@router.get("/readyz", tags=["operations"])
def readyz(request: Request, parts: PartsOf) -> HealthAnswer:
    """Returns ready if the database answers, dry runs are dispatched and searchers are managed."""
    parts.strangers.take(address_of(request), TOO_MANY_STRANGERS)
    try:
        parts.store.latest()
    except ServiceError as error:
        raise Problem(503, "not_ready", str(error), headers={"retry-after": "2"}) from None
    if parts.dispatcher.failure or not parts.dispatcher.is_alive():
        reason = parts.dispatcher.failure or "the dispatcher has not started, or is stopping"
        raise Problem(503, "not_ready", f"no dry runs are dispatched: {reason}", headers={"retry-after": "2"})
    if parts.searchers is not None and (parts.searchers.failure or not parts.searchers.is_alive()):
        reason = parts.searchers.failure or "their thread has ended"
        raise Problem(503, "not_ready", f"no searches are started: {reason}", headers={"retry-after": "2"})
    return HealthAnswer(status="ready", version=__version__)


@router.get("/metrics", tags=["operations"], response_class=PlainTextResponse)
def metrics(request: Request, parts: PartsOf) -> Response:
    """Returns Prometheus metrics. They contain counts but no names, so no token is needed."""
    parts.strangers.take(address_of(request), TOO_MANY_STRANGERS)
    return Response(
        parts.metrics.render(parts.store, parts.feed.listeners), media_type="text/plain; version=0.0.4; charset=utf-8"
    )
