"""Ask and tell over HTTP: redline's samplers for loops that run elsewhere."""

import secrets
from typing import Annotated, Any

from fastapi import APIRouter, Path

from .. import studies
from ..records import Role, User
from .access import Guarded, Reader, Submitter
from .models import AskAnswer, StudyAnswer, StudyForm, TellForm
from .parts import Parts
from .problems import Problem
from .searches import PartsOf

router = APIRouter(prefix="/v1/studies", tags=["studies"], route_class=Guarded)
StudyId = Annotated[str, Path(pattern="^[0-9a-f]{12}$", description="Of a study.")]


def _mine(parts: Parts, user: User, study: str) -> None:
    owner = parts.studies.call(studies.owner, parts.url, study)
    if owner != user.id and user.role != Role.ADMIN:
        raise Problem(403, "not_yours", f"the study {study} is somebody else's")


@router.post("", status_code=201)
def begin(form: StudyForm, user: Submitter, parts: PartsOf) -> StudyAnswer:
    """Makes a study over a space."""
    study = secrets.token_hex(6)
    asked = {**form.model_dump(), "user": user.id}
    found = parts.studies.call(studies.begin, parts.url, study, asked)
    parts.store.audit(user.name, "study", study)
    return StudyAnswer(**found)


@router.get("/{study}")
def look(study: StudyId, user: Reader, parts: PartsOf) -> StudyAnswer:
    """A study, its trials, and the best of them."""
    return StudyAnswer(**parts.studies.call(studies.look, parts.url, study))


@router.post("/{study}/ask")
def ask(study: StudyId, user: Submitter, parts: PartsOf) -> AskAnswer:
    """The next trial; it is pending until it is told of."""
    _mine(parts, user, study)
    return AskAnswer(**parts.studies.call(studies.ask, parts.url, study))


@router.post("/{study}/tell")
def tell(study: StudyId, form: TellForm, user: Submitter, parts: PartsOf) -> dict[str, Any]:
    """How a trial ended; told again it stays what it was."""
    _mine(parts, user, study)
    if (form.status == "ok") != (form.throughput is not None) and form.status is not None:
        raise Problem(
            422, "invalid", f"status: '{form.status}' {'needs a' if form.status == 'ok' else 'has no'} throughput",
            field="status", given=form.status, rule="a throughput belongs to what ran",
        )  # fmt: skip
    outcome = form.model_dump(exclude={"trial"})
    told: dict[str, Any] = parts.studies.call(studies.tell, parts.url, study, form.trial, outcome)
    return told
