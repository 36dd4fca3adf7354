"""Routes of the service as a whole: the caller, the queue, events, health and metrics."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from ... import __version__
from ...base.errors import ServiceError
from ..records import Event, SearchState, User
from .access import Guarded, Reader
from .models import SEARCH_ID, DeviceAnswer, QueueAnswer
from .problems import Problem
from .searches import STREAM, EventId, LastEventId, PartsOf, search_answer, stream

router = APIRouter(tags=["service"], route_class=Guarded)
MOST_LISTED = 1000  # as many as a page of searches may have


@router.get("/v1/me")
def me(user: Reader) -> User:
    """Returns the caller and their permissions."""
    return user


@router.get("/v1/queue")
def queue(user: Reader, parts: PartsOf) -> QueueAnswer:
    """Returns running and queued searches, with the reasons why they wait, the devices, and who has used them."""
    store = parts.store
    open_searches = [
        search
        for state in (SearchState.RUNNING, SearchState.QUEUED)
        for search in store.searches(state=state, limit=MOST_LISTED)
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
    last_event_id: LastEventId = None,
) -> Response:
    """Streams the events of all searches, from now on or after an event."""
    return stream(request, parts, after if last_event_id is None else last_event_id, None)


@router.get("/v1/history")
def history(
    user: Reader,
    parts: PartsOf,
    after: EventId = 0,
    search: Annotated[str | None, Query(pattern=SEARCH_ID)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[Event]:
    """Returns past events after an event, as a list."""
    if search is not None:
        parts.store.search(search)
    return parts.store.events(after, search=search, limit=limit)


@router.get("/healthz", tags=["operations"])
def healthz() -> dict[str, str]:
    """Returns ok if the process answers."""
    return {"status": "ok", "version": __version__}


@router.get("/readyz", tags=["operations"])
def readyz(parts: PartsOf) -> dict[str, str]:
    """Returns ready if the database answers and searches are managed."""
    try:
        parts.store.latest()
    except ServiceError as error:
        raise Problem(503, "not_ready", str(error), headers={"retry-after": "2"}) from None
    if parts.searchers.failure is not None or not parts.searchers.is_alive():
        reason = parts.searchers.failure or "their thread has ended"
        raise Problem(503, "not_ready", f"no searches are started: {reason}", headers={"retry-after": "2"})
    return {"status": "ready", "version": __version__}


@router.get("/metrics", tags=["operations"], response_class=PlainTextResponse)
def metrics(parts: PartsOf) -> Response:
    """Returns Prometheus metrics. They contain counts but no names, so no token is needed."""
    return Response(parts.metrics.render(parts), media_type="text/plain; version=0.0.4; charset=utf-8")
