"""Ask and tell over HTTP: redline's samplers for loops that run elsewhere."""

import secrets
from collections.abc import Callable
from functools import cache
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
AT_ONCE = 64
"""Questions that are asked of the process with the studies at once, one after the other."""
StudyId = Annotated[str, Path(pattern="^[0-9a-f]{12}$", description="Of a study.")]


async def _called(parts: Parts, function: Callable[..., Any], *args: Any) -> Any:
    """What a function of `studies` returns, in threads of their own: who waits for their turn keeps nobody else waiting."""
    return await run_sync(parts.studies.call, function, *args, limiter=_threads())


@cache
def _threads() -> CapacityLimiter:
    return CapacityLimiter(AT_ONCE)


async def _mine(parts: Parts, user: User, study: str) -> None:
    owner = await _called(parts, studies.owner, parts.url, study)
    if owner != user.id and user.role != Role.ADMIN:
        raise Problem(403, "not_yours", f"the study {study} is somebody else's")


@router.post("", status_code=201)
async def begin(form: StudyForm, user: Submitter, parts: PartsOf) -> StudyAnswer:
    """Makes a study over a space."""
    study = secrets.token_hex(6)
    asked = {**form.model_dump(), "user": user.id}
    found = await _called(parts, studies.begin, parts.url, study, asked)
    await run_sync(parts.store.audit, user.name, "study", study)
    return StudyAnswer(**found)


@router.get("/{study}")
async def look(study: StudyId, user: Reader, parts: PartsOf) -> StudyAnswer:
    """A study, its trials, and the best of them."""
    return StudyAnswer(**await _called(parts, studies.look, parts.url, study))


@router.post("/{study}/ask")
async def ask(study: StudyId, user: Submitter, parts: PartsOf) -> AskAnswer:
    """The next trial; it is pending until it is told of."""
    await _mine(parts, user, study)
    return AskAnswer(**await _called(parts, studies.ask, parts.url, study))


@router.post("/{study}/tell")
async def tell(study: StudyId, form: TellForm, user: Submitter, parts: PartsOf) -> dict[str, Any]:
    """How a trial ended; told again it stays what it was."""
    await _mine(parts, user, study)
    if (form.status == "ok") != (form.throughput is not None) and form.status is not None:
        raise Problem(
            422, "invalid", f"status: '{form.status}' {'needs a' if form.status == 'ok' else 'has no'} throughput",
            field="status", given=form.status, rule="a throughput belongs to what ran",
        )  # fmt: skip
    outcome = form.model_dump(exclude={"trial"})
    told: dict[str, Any] = await _called(parts, studies.tell, parts.url, study, form.trial, outcome)
    return told
