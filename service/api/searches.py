"""Routes of searches: submit, list, change, cancel, and their results."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from ...base.errors import NotFound, Refused
from ...frameworks import export_targets
from ..records import UNDECIDED, Role, Search, SearchState, User
from ..request import NO_CODE, is_code, without_secrets
from .access import Guarded, Reader, Submitter
from .models import KEY, SEARCH_ID, ChangeForm, SearchAnswer, SearchesAnswer, Submission
from .parts import AUDIT, Parts, parts_of
from .problems import Problem

router = APIRouter(prefix="/v1/searches", tags=["searches"], route_class=Guarded)
PartsOf = Annotated[Parts, Depends(parts_of)]
SearchId = Annotated[str, Path(pattern=SEARCH_ID, description="Id of a search.")]
TrialNumber = Annotated[int, Path(ge=0, lt=1 << 40, description="Number of a trial.")]
EventId = Annotated[int, Query(ge=0, lt=1 << 31, description="Id of the last event seen.")]
LastEventId = Annotated[
    int | None, Header(ge=0, lt=1 << 31, description="The same, as a browser that reconnects sends it.")
]
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Server-sent events."}
}


def search_answer(parts: Parts, search: Search, *, whole: bool = True) -> SearchAnswer:
    """Returns the answer for a search. A queued search has the reason why it waits.

    Args:
        parts: of the application.
        search: the search.
        whole: whether to include the request, which may be up to a MiB.
    """
    reason = search.reason
    if search.state is SearchState.QUEUED:
        reason = parts.searchers.reasons.get(search.id, UNDECIDED)
    return SearchAnswer.of(
        search,
        device=search.kind or search.device,
        request=without_secrets(search.request) if whole else None,
        user=search.owner,
        reason=reason,
    )


def may_change(user: User, search: Search) -> None:
    """Checks that a user may change a search.

    Raises:
        Problem: it belongs to another user, and they are not an admin.
    """
    if search.user != user.id and user.role != Role.ADMIN:
        message = f"the search {search.id} belongs to {search.owner}; only they and admins may change it"
        raise Problem(403, "not_yours", message)


@router.post("", status_code=201)
def submit(
    form: Submission,
    user: Submitter,
    parts: PartsOf,
    response: Response,
    idempotency_key: Annotated[str | None, Header(pattern=KEY)] = None,
) -> SearchAnswer:
    """Submits a search. A repeated `Idempotency-Key` returns the same search, with status 200."""
    request = form.request.request()
    _check_code(parts, user, request)
    _check_priority(user, form.priority)
    name = form.name or named(request)
    search, new = parts.store.submit(
        user,
        request,
        devices=form.request.devices,
        device=form.device,
        priority=form.priority,
        name=name,
        key=idempotency_key,
        most_queued=_most_queued(user, parts),
    )
    if new:
        AUDIT.info("%s submits %s, '%s', %d devices a trial", user.name, search.id, name, search.devices)
        parts.metrics.submitted.inc()
        parts.searchers.wake()
    response.status_code = 201 if new else 200
    return search_answer(parts, search)


def _check_code(parts: Parts, owner: User, request: Mapping[str, Any]) -> None:
    """Checks that this server runs a request of that owner.

    Raises:
        Refused: it is code that may not run here.
    """
    if not is_code(request):
        return
    if not parts.allow_code:
        raise Refused(NO_CODE)
    if not owner.role.includes(Role.CODE):
        raise Refused(
            f"{owner.name} may not submit code on this server, such as a workload or a command: that needs the role code; submit "
            "a model's name or config.json, or ask an admin for the role"
        )


def _most_queued(user: User, parts: Parts) -> int | None:
    """Limit of queued searches of a user; None for admins, who have none."""
    return None if user.role == Role.ADMIN else parts.most_queued


def _check_priority(user: User, priority: int) -> None:
    """Checks that a user may give a search that priority.

    Raises:
        Refused: they may not.
    """
    if user.role != Role.ADMIN and priority > user.priority:
        raise Refused(
            f"{user.name} may give searches priorities up to {user.priority}, but got {priority}; an admin can raise the limit "
            f"(redline token change {user.name} --priority N)"
        )


def named(request: dict[str, Any]) -> str:
    """Returns the default name of a search."""
    if "target" in request:
        return str(request["target"]).rpartition("/")[2][:100]
    if "workload" in request:
        return str(request["workload"]["name"])
    if "command" in request:
        from ...runners.command.command import Command

        return Command(command=request["command"]["command"]).name[:100] or "command"
    return str(request["model"].get("model_type", "model"))[:100]


@router.get("")
def listed(
    user: Reader,
    parts: PartsOf,
    state: SearchState | None = None,
    mine: bool = False,
    after: Annotated[str | None, Query(pattern=SEARCH_ID, description="List searches after this one.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> SearchesAnswer:
    """Returns the searches of all users, the newest first."""
    owner = user.id if mine else None
    page = parts.store.searches(user=owner, state=state, after=after, limit=limit)
    last = page[-1].id if len(page) == limit else None
    return SearchesAnswer(searches=[search_answer(parts, search, whole=False) for search in page], next=last)


@router.get("/{search}")
def one(search: SearchId, user: Reader, parts: PartsOf) -> SearchAnswer:
    """Returns a search. While it runs, `best` is the best so far."""
    answer = search_answer(parts, parts.store.search(search))
    if answer.best is None and answer.trials:
        answer = answer.model_copy(update={"best": parts.runs.summary(search)["best"]})
    return answer


@router.post("/{search}/cancel")
def cancel(search: SearchId, user: Submitter, parts: PartsOf) -> SearchAnswer:
    """Ends a search and keeps its results. A search that has ended is not changed."""
    return _changed(parts, user, search, "cancels", parts.store.cancel)


def _changed(parts: Parts, user: User, search: str, action: str, change: Callable[[str], Search]) -> SearchAnswer:
    """Changes a search for its owner or an admin, logs that, and returns the search."""
    may_change(user, parts.store.search(search))
    record = change(search)
    AUDIT.info("%s %s %s", user.name, action, search)
    parts.searchers.wake()
    return search_answer(parts, record)


@router.post("/{search}/retry")
def retry(search: SearchId, user: Submitter, parts: PartsOf) -> SearchAnswer:
    """Resumes a search that failed or was cancelled, if this server still runs its request. Finished trials are not
    repeated.
    """

    def retried(search: str) -> Search:
        record = parts.store.search(search)
        _check_code(parts, parts.store.user(record.owner), record.request)
        return parts.store.retry(search, _most_queued(user, parts))

    return _changed(parts, user, search, "retries", retried)


@router.patch("/{search}")
def change(search: SearchId, form: ChangeForm, user: Submitter, parts: PartsOf) -> SearchAnswer:
    """Changes a search's priority, up to the caller's highest priority."""

    def changed(search: str) -> Search:
        _check_priority(user, form.priority)
        return parts.store.set_priority(search, form.priority)

    return _changed(parts, user, search, f"gives the priority {form.priority} to", changed)


@router.delete("/{search}", status_code=204)
def delete(search: SearchId, user: Submitter, parts: PartsOf) -> None:
    """Deletes a search that has ended, with its folder."""
    may_change(user, parts.store.search(search))
    parts.store.delete_search(search, parts.runs.folder(search))
    AUDIT.info("%s deletes %s", user.name, search)


@router.get("/{search}/trials.csv", response_class=PlainTextResponse)
def table(search: SearchId, user: Reader, parts: PartsOf) -> Response:
    """Returns trials.csv."""
    parts.store.search(search)
    headers = {"content-disposition": f'attachment; filename="{search}.csv"'}
    return Response(parts.runs.table(search), media_type="text/csv; charset=utf-8", headers=headers)


@router.get("/{search}/best")
def best(search: SearchId, user: Reader, parts: PartsOf) -> dict[str, Any]:
    """Returns the winner, or the best trial so far, with the default configuration; `why` states why there is none."""
    record = parts.store.search(search)
    return {"state": record.state.value, **parts.runs.summary(search)}


@router.get("/{search}/events", response_class=StreamingResponse, responses=STREAM)
async def events(
    search: SearchId,
    user: Reader,
    request: Request,
    parts: PartsOf,
    after: EventId = 0,
    last_event_id: LastEventId = None,
) -> Response:
    """Streams the events of a search, from its beginning or after an event, until it ends."""
    from anyio.to_thread import run_sync

    await run_sync(parts.store.search, search)
    return stream(request, parts, after if last_event_id is None else last_event_id, search)


def stream(request: Request, parts: Parts, after: int | None, search: str | None) -> Response:
    """Returns server-sent events, which end when the token that requested them is no longer valid."""
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    chunks = parts.feed.follow(lambda: request.state.still() is not None, after, search)
    return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)


@router.get("/{search}/logs/{trial}", response_class=PlainTextResponse)
def log(
    search: SearchId,
    trial: TrialNumber,
    user: Reader,
    parts: PartsOf,
    begin: Annotated[int, Query(ge=0, lt=1 << 40, description="From this byte on.")] = 0,
) -> Response:
    """Returns up to a MiB of a trial's output, from a byte on; `x-redline-size` is its whole size."""
    record = parts.store.search(search)
    data, size = parts.runs.log(search, trial, begin)
    if not size and record.state.ended:
        raise NotFound(f"the search {search} has no output of a trial {trial}")
    return Response(data, media_type="text/plain; charset=utf-8", headers={"x-redline-size": str(size)})


@router.get("/{search}/export/{target}", response_class=PlainTextResponse)
def export(
    search: SearchId,
    target: Annotated[str, Path(max_length=40)],
    user: Reader,
    parts: PartsOf,
    trial: Annotated[int | None, Query(ge=0, lt=1 << 40)] = None,
    form: Annotated[str | None, Query(max_length=20)] = None,
) -> Response:
    """Returns the winner's or a trial's configuration for a framework."""
    parts.store.search(search)
    exported = parts.runs.export(search, target, trial, form)
    name = f"{search}-{export_targets()[target].file(exported.form)}"
    headers = {"content-disposition": f'attachment; filename="{name}"', "x-redline-form": exported.form}
    return Response(exported.text, media_type="text/plain; charset=utf-8", headers=headers)
