"""Error answers: a code for programs, a sentence for people, the field, the given value, and the rule."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from ...base.errors import MissingDependency, RedlineError, ServiceError, StudyError, UsageError
from .models import ErrorAnswer, ErrorDetail, short

_log = logging.getLogger(__name__)
_STATUS: tuple[tuple[type[RedlineError], int, str], ...] = (
    (StudyError, 500, "unreadable"),
    (MissingDependency, 501, "not_installed"),
    (UsageError, 422, "invalid"),
)
"""Statuses and codes of errors other than `ServiceError`, the first that fits."""
_CODES = {
    400: "malformed",
    401: "no_token",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
}
TOO_LARGE = "the body is larger than this route accepts"
_RETRY_S = 2


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
    errors = error.errors()
    first = errors[0]
    kind, place = str(first.get("type", "")), [str(name) for name in first.get("loc", ())]
    if kind == "json_invalid":
        return Problem(
            400, "malformed", f"the body is not valid JSON: {first.get('ctx', {}).get('error', first.get('msg'))}"
        )
    rule = str(first.get("msg", "")).removeprefix("Value error, ")
    field = ".".join(place[1:]) or None
    many = len(errors) - 1
    further = f" ({many} more field{'s are' if many > 1 else ' is'} wrong)" if many else ""
    subject = field or {"body": "the body", "query": "the query", "path": "the path"}.get(
        place[0] if place else "", "it"
    )
    return Problem(422, "invalid", f"{subject}: {rule}{further}", field=field, given=first.get("input"), rule=rule)


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
        code = _CODES.get(error.status_code, "refused")
        path = request.url.path[:200]
        messages = {
            413: TOO_LARGE,
            404: f"there is no {path}",
            405: f"{path} does not take {request.method}",
        }
        return Problem(
            error.status_code,
            code,
            messages.get(error.status_code, str(error.detail)),
            headers=dict(error.headers or {}),
        ).answer()

    @app.exception_handler(Exception)
    def unforeseen(request: Request, error: Exception) -> Response:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return Problem(500, "internal", "an internal error occurred; the server's log has the traceback").answer()


class TooLarge:
    """ASGI middleware that answers a body that is too large in the form of all errors.

    Starlette, which counts a body's bytes, answers on its own, in plain text.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        reworded = False

        async def send_reworded(message: dict[str, Any]) -> None:
            nonlocal reworded
            if message["type"] == "http.response.start" and message["status"] == 413:
                if b"application/json" not in [value for _, value in message["headers"]]:
                    reworded = True
                    headers = {"connection": "close"}
                    problem = Problem(413, "too_large", TOO_LARGE, headers=headers)
                    await problem.answer()(scope, receive, send)
                    return
            if not reworded:
                await send(message)

        await self.app(scope, receive, send_reworded)
