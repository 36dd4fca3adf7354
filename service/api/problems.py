"""Error answers: a code for programs, a sentence for people, the field, the given value, and the rule."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from ...base.errors import MissingDependency, RedlineError, ServiceError, StudyError, UsageError
from .models import PATTERNS, ErrorAnswer, ErrorDetail, short

_log = logging.getLogger(__name__)
_STATUS: tuple[tuple[type[RedlineError], int, str], ...] = (
    (StudyError, 500, "unreadable"),
    (MissingDependency, 501, "not_installed"),
    (UsageError, 422, "invalid"),
)
"""Statuses and codes of errors other than `ServiceError`, the first that fits."""
_NOWHERE = {404: ("not_found", "there is no {}"), 405: ("method_not_allowed", "{} does not take this method")}
"""Codes and messages of requests that no route takes."""
_RETRY_S = 2  # s; a database that starts again takes about as long
_OWN_RULE = "Value error, "
_WHOLE = {"body": "the body", "query": "the query", "path": "the path"}
_RULES = {
    "missing": "is missing",
    "extra_forbidden": "is not a field of this request",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must not be empty",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "string": "must be a text",
    "int": "must be a whole number",
    "float": "must be a number",
    "finite": "must be a finite number",
    "bool": "must be true or false",
    "list": "must be a list",
    "dict": "must be a mapping",
    "model": "must be a mapping",
}
"""Sentences by pydantic's type of an error, or by its first word."""


def _sendable(text: str) -> str:
    """Escapes lone surrogates, which no encoding can represent."""
    return text.encode("utf-8", "backslashreplace").decode()


class Problem(Exception):
    """An answer with a status of 400 or above. The arguments are the fields of `ErrorDetail`, and additional headers."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        field: str | None = None,
        given: Any = None,
        rule: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(_sendable(message))
        self.status = status
        self.headers = headers
        self.detail = ErrorDetail(
            code=code,
            message=_sendable(message),
            field=None if field is None else _sendable(field),
            given=short(given),
            rule=None if rule is None else _sendable(rule),
        )

    def answer(self) -> Response:
        """Returns the response."""
        content = ErrorAnswer(error=self.detail).model_dump(mode="json")
        return JSONResponse(content, status_code=self.status, headers=self.headers)


def problem_of(error: RedlineError) -> Problem:
    """Returns the answer for an error of redline's."""
    service_error = error if isinstance(error, ServiceError) else ServiceError
    unknown = service_error.status, service_error.code
    status, code = next(((status, code) for kind, status, code in _STATUS if isinstance(error, kind)), unknown)
    headers = {"retry-after": str(_RETRY_S)} if status == 503 else None
    return Problem(status, code, str(error), headers=headers)


def _invalid(error: RequestValidationError) -> Problem:
    """Returns the answer for a field that breaks a rule, in our words instead of pydantic's."""
    errors = [(_field(problem, error.body), problem) for problem in error.errors()]
    field, problem = errors[0]
    # The alternatives of a field each have an error.
    sentences = dict.fromkeys(_sentence(problem) for name, problem in errors if name == field)
    sentence = " or ".join(sentences).replace(" or must be ", " or ")
    sentence = f": {sentence.removeprefix(_OWN_RULE)}" if sentence.startswith(_OWN_RULE) else f" {sentence}"
    subject = field or _WHOLE.get(str(problem["loc"][0]), "it")
    but_got = (
        ""
        if problem["type"] in ("missing", "value_error", "extra_forbidden")
        else f", but got {short(problem['input'])!r:.200}"
    )
    further = len({name for name, _ in errors} - {field})
    others = f" ({further} more field{'s are' if further > 1 else ' is'} wrong)" if further else ""
    rule = str(problem["msg"]).removeprefix(_OWN_RULE)
    return Problem(
        422, "invalid", f"{subject}{sentence}{but_got}{others}", field=field, given=problem["input"], rule=rule
    )


def _sentence(problem: dict[str, Any]) -> str:
    kind = problem["type"]
    if kind == "value_error":
        return str(problem["msg"])
    if kind == "string_pattern_mismatch":
        return PATTERNS.get(problem["ctx"]["pattern"], "is not valid")
    template = _RULES.get(kind) or _RULES.get(kind.partition("_")[0], "is not valid")
    return str(template.format(**problem.get("ctx", {})))


def _field(problem: dict[str, Any], body: Any) -> str | None:
    """Returns the path of a wrong field, without the names that pydantic gives to alternatives."""
    source, *names = problem["loc"]
    if source != "body":
        return ".".join(map(str, names)) or None
    path, value = [], body
    for name in names:
        if name in value if isinstance(value, dict) else isinstance(value, list) and name in range(len(value)):
            value = value[name]
        elif problem["type"] != "missing" or name != names[-1]:
            continue
        path.append(str(name))
    return ".".join(path) or None


def answer_problems(app: FastAPI) -> None:
    """Makes an application answer every error in the same form."""

    @app.exception_handler(Problem)
    def problem(request: Request, error: Problem) -> Response:
        return error.answer()

    @app.exception_handler(RedlineError)
    def redline_error(request: Request, error: RedlineError) -> Response:
        problem = problem_of(error)
        if problem.status == 500:
            _log.error("%s %s failed: %s", request.method, request.url.path, error)
        return problem.answer()

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> Response:
        return _invalid(error).answer()

    @app.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> Response:
        code, message = _NOWHERE.get(error.status_code, ("refused", str(error.detail)))
        message = message.format(request.url.path[:200])
        return Problem(error.status_code, code, message, headers=dict(error.headers or {})).answer()

    @app.exception_handler(Exception)
    def unforeseen(request: Request, error: Exception) -> Response:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return Problem(500, "internal", "an internal error occurred; the server's log has the traceback").answer()
