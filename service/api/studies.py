"""Routes of studies: redline's samplers by ask and tell, for trials that clients run."""

import secrets
from collections.abc import Callable
from typing import Annotated, Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Path

from .. import studies
from ..records import Role, User
from .access import Guarded, Reader, Submitter
from .models import AskAnswer, StudyAnswer, StudyForm, TellForm
from .parts import Parts
from .problems import Problem
from .searches import PartsOf

router = APIRouter(prefix="/v1/studies", tags=["studies"], route_class=Guarded)
_CALLS = CapacityLimiter(64)
"""Number of requests that wait for the process of the studies, which handles one at a time."""
StudyId = Annotated[str, Path(pattern="^[0-9a-f]{12}$", description="Id of a study.")]


async def _called(parts: Parts, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function of `studies` in a thread of a separate limiter, so that waiting requests do not block other
    routes.
    """
    return await run_sync(parts.studies.call, function, *args, limiter=_CALLS)


async def _check_owner(parts: Parts, user: User, study: str) -> None:
    owner = await _called(parts, studies.owner, parts.url, study)
    if owner != user.id and user.role != Role.ADMIN:
        raise Problem(403, "not_yours", f"the study {study} belongs to another user")


@router.post("", status_code=201)
async def begin(form: StudyForm, user: Submitter, parts: PartsOf) -> StudyAnswer:
    """Creates a study over a space."""
    study = secrets.token_hex(6)
    study_form = {**form.model_dump(), "user": user.id}
    found = await _called(parts, studies.begin, parts.url, study, study_form)
    await run_sync(parts.store.audit, user.name, "study", study)
    return StudyAnswer(**found)


@router.get("/{study}")
async def look(study: StudyId, user: Reader, parts: PartsOf) -> StudyAnswer:
    """Returns a study, its trials, and the best of them."""
    return StudyAnswer(**await _called(parts, studies.look, parts.url, study))


@router.post("/{study}/ask")
async def ask(study: StudyId, user: Submitter, parts: PartsOf) -> AskAnswer:
    """Returns the next trial, which is pending until its result is reported."""
    await _check_owner(parts, user, study)
    return AskAnswer(**await _called(parts, studies.ask, parts.url, study))


@router.post("/{study}/tell")
async def tell(study: StudyId, form: TellForm, user: Submitter, parts: PartsOf) -> dict[str, Any]:
    """Stores the result of a trial. Repeating the same result changes nothing."""
    await _check_owner(parts, user, study)
    if (form.status == "ok") != (form.throughput is not None) and form.status is not None:
        raise Problem(
            422, "invalid", f"status: '{form.status}' must have {'a' if form.status == 'ok' else 'no'} throughput",
            field="status", given=form.status, rule="a throughput belongs to the status ok",
        )  # fmt: skip
    outcome = form.model_dump(exclude={"trial"})
    answer: dict[str, Any] = await _called(parts, studies.tell, parts.url, study, form.trial, outcome)
    return answer
