"""Routes of the service as a whole: the caller, the queue, events, health and metrics."""

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from ... import __version__
from ...base.errors import ServiceError
from ..records import SearchState
from .access import TOO_MANY_STRANGERS, Guarded, Reader, address_of
from .models import DeviceAnswer, EventAnswer, HealthAnswer, MeAnswer, QueueAnswer
from .problems import Problem
from .searches import STREAM, EventId, PartsOf, resumed, search_answer, seen, stream

router = APIRouter(tags=["service"], route_class=Guarded)
MOST_LISTED = 1000


@router.get("/v1/me")
def me(user: Reader) -> MeAnswer:
    """Returns the caller and their permissions."""
    return MeAnswer.of(user)


@router.get("/v1/queue")
def queue(user: Reader, parts: PartsOf) -> QueueAnswer:
    """Returns running and queued searches, with the reasons why they wait, the devices, and who has used them."""
    store = parts.store
    open_searches = [
        search
        for state in (SearchState.RUNNING, SearchState.QUEUED)
        for search in store.searches(state=state, limit=MOST_LISTED, seen_by=user)
    ]
    open_searches.sort(key=lambda search: (-search.priority, search.created))
    names = {account.id: account.name for account in store.users()}
    return QueueAnswer(
        searches=[search_answer(parts, search, whole=False) for search in open_searches],
        devices=[DeviceAnswer.of(kind, busy=busy) for kind, busy in parts.searchers.devices()],
        usage={names[share.user]: share.week_s / 3600 for share in store.shares() if share.week_s},
    )


@router.get("/v1/events", response_class=StreamingResponse, responses=STREAM)
async def events(
    user: Reader,
    request: Request,
    parts: PartsOf,
    after: EventId | None = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Streams the events of all searches, from now on or after an event."""
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
    past = parts.store.events(after, search=search, limit=limit)
    hidden = parts.store.hidden_from(user, {event.search for event in past if event.search is not None})
    return [EventAnswer.of(event) for event in past if event.search not in hidden]


@router.get("/healthz", tags=["operations"])
def healthz() -> HealthAnswer:
    """Returns ok if the process answers."""
    return HealthAnswer(status="ok", version=__version__)


@router.get("/readyz", tags=["operations"])
def readyz(request: Request, parts: PartsOf) -> HealthAnswer:
    """Returns ready if the database answers and searches are managed."""
    parts.strangers.take(address_of(request), TOO_MANY_STRANGERS)
    try:
        parts.store.latest()
    except ServiceError as error:
        raise Problem(503, "not_ready", str(error), headers={"retry-after": "2"}) from None
    if parts.searchers.failure is not None or not parts.searchers.is_alive():
        reason = parts.searchers.failure or "their thread has ended"
        raise Problem(503, "not_ready", f"no searches are started: {reason}", headers={"retry-after": "2"})
    return HealthAnswer(status="ready", version=__version__)


@router.get("/metrics", tags=["operations"], response_class=PlainTextResponse)
def metrics(request: Request, parts: PartsOf) -> Response:
    """Returns Prometheus metrics. They contain counts but no names, so no token is needed."""
    parts.strangers.take(address_of(request), TOO_MANY_STRANGERS)
    return Response(parts.metrics.render(parts), media_type="text/plain; version=0.0.4; charset=utf-8")
