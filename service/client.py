"""`rl.Client`: submits and follows searches on a server, from Python."""

import io
import json
import ssl
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from ..base.errors import (
    KeyTaken,
    MissingDependency,
    NotFound,
    NothingFound,
    Refused,
    ServiceError,
    StorageAhead,
    StorageUnavailable,
    UsageError,
)
from ..results import Measurement, Trial, read_table, table_frame
from ..space import Config
from ..tuner.result import Candidate
from .records import ENDED, Event, User
from .request import travelling

if TYPE_CHECKING:
    from pandas import DataFrame

    from .api.models import QueueAnswer, SearchAnswer

PATIENCE_S = 15.0
"""How long requests to an unreachable server are retried, s."""
FOLLOWING_S = 900.0
"""The same for an event stream that has received events, s: long enough to restart a machine or move the server."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_LOOK_S = 0.5  # s between looks at a search that `wait` waits for
_TIMEOUT_S = 30.0  # s; streams send something every 15 s
NO_REDLINE = (
    "this is not the answer of a redline server of this version: give --server its address, and install its version"
)
_SERVICE = (KeyTaken, NotFound, Refused, StorageAhead, StorageUnavailable)
_ERRORS: dict[str, type[Exception]] = {
    **{error.code: error for error in _SERVICE},
    **dict.fromkeys(("invalid", "malformed", "too_large"), UsageError),
    **dict.fromkeys(("not_ready", ServiceError.code), StorageUnavailable),
}


class ServerUnreachable(ServiceError, ConnectionError):
    """The server cannot be reached or does not answer."""


class Client:
    """A connection to a server. Requests are retried while the server is unreachable, for example during a restart.

    Args:
        server: its address, such as `http://127.0.0.1:8700`.
        token: made by `redline token new`.
        patience_s: how long requests to an unreachable server are retried, s. An event stream that has received events
            is retried for at least 15 minutes.
        say: called with a sentence when requests begin to wait for an unreachable server, and when it is back.

    Raises:
        UsageError: the address or token is invalid.
        MissingDependency: a package is not installed.
    """

    def __init__(
        self, server: str, *, token: str, patience_s: float = PATIENCE_S, say: Callable[[str], None] = lambda text: None
    ) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise MissingDependency(
                f"requests to a server need {error.name}, which is not installed: pip install 'redline[service]'"
            ) from error
        parts = urlsplit(server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"a server's address must be like http://127.0.0.1:8700, but got '{server}'")
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise UsageError("a server needs a token: --token, or REDLINE_TOKEN; `redline token new` makes one")
        self._server, self._patience_s, self._say = server.rstrip("/"), patience_s, say
        self._waits = False
        # Requests to this machine must not go through a proxy that the environment sets.
        local = parts.hostname in ("127.0.0.1", "localhost", "::1")
        self._http = httpx.Client(
            base_url=self._server, headers={"authorization": f"Bearer {token}"}, timeout=_TIMEOUT_S,
            verify=ssl.create_default_context(), trust_env=not local,
        )  # fmt: skip

    def submit(
        self,
        target: Any,
        space: Any = None,
        *,
        name: str = "",
        priority: int = 0,
        device: str = "",
        key: str | None = None,
        **tune_arguments: Any,
    ) -> "SearchRun":
        """Submits a search.

        Args:
            target: as for `redline.tune`. Files are sent as their contents; objects cannot be sent.
            space: as for `redline.tune`.
            name: shown in lists; by default the model's name.
            priority: the higher goes first, -100 to 100.
            device: kind of device, by type or a part of its name; empty for any.
            key: idempotency key: a second call with the same key returns the same search. By default a new key per
                call, so that retries of one call submit once.
            tune_arguments: the other arguments of `redline.tune` that can be sent to a server.

        Raises:
            UsageError: an argument is unknown, invalid, or cannot be sent.
            Refused: the token's user is not allowed to submit this.
        """
        request = travelling({"target": target, "space": space, **tune_arguments})
        body = {"request": request, "name": name, "priority": priority, "device": device}
        headers = {"idempotency-key": key or uuid.uuid4().hex}
        from .api.models import SearchAnswer

        answer = self._json("POST", "/v1/searches", json=body, headers=headers)
        return SearchRun(self, _parsed(SearchAnswer, answer).id)

    def search(self, search: str) -> "SearchRun":
        """Returns the search of that id.

        Raises:
            NotFound: there is none.
        """
        run = SearchRun(self, search)
        run.look()
        return run

    def searches(
        self, *, state: str | None = None, mine: bool = False, after: str | None = None, limit: int = 100
    ) -> "list[SearchAnswer]":
        """Returns searches, the newest first."""
        from .api.models import SearchesAnswer

        params = _without_none(state=state, mine=mine, after=after, limit=limit)
        answer: SearchesAnswer = _parsed(SearchesAnswer, self._json("GET", "/v1/searches", params=params))
        return answer.searches

    def queue(self) -> "QueueAnswer":
        """Returns the running and queued searches, with the reasons why they wait, and the devices."""
        from .api.models import QueueAnswer

        return _parsed(QueueAnswer, self._json("GET", "/v1/queue"))

    def me(self) -> User:
        """Returns the user that the token belongs to."""
        return _parsed(User, self._json("GET", "/v1/me"))

    def events(self, search: str | None = None, after: int | None = None) -> Iterator[Event]:
        """Yields events as they happen. A broken stream is resumed where it broke.

        Args:
            search: yields the events of this search from its beginning until it ends; None for new events of all
                searches.
            after: starts after the event of this id.
        """
        path = "/v1/events" if search is None else f"/v1/searches/{search}/events"
        pause, patience = _FIRST_PAUSE_S, self._patience_s
        contact = time.monotonic()
        while True:
            try:
                params = {} if after is None else {"after": after}
                with self._stream(path, params=params) as lines:
                    for line in lines:
                        self._answers()
                        pause, patience = _FIRST_PAUSE_S, max(self._patience_s, FOLLOWING_S)
                        contact = time.monotonic()
                        if line.startswith("data: "):
                            event = _parsed(Event, json.loads(line[6:]))
                            after = event.id
                            yield event
                if search is not None and self._is_over(search, after):
                    return
            except (ServerUnreachable, StorageUnavailable) as error:
                if time.monotonic() - contact > patience:
                    raise
                self._waits_for(error)
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    def _is_over(self, search: str, after: int | None) -> bool:
        """True if a search has ended and has no events after that one."""
        if self._json("GET", f"/v1/searches/{search}")["state"] not in ENDED:
            return False
        return not self._json("GET", "/v1/history", params={"search": search, "after": after or 0, "limit": 1})

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _json(self, method: str, path: str, **options: Any) -> Any:
        answer = self._send(method, path, **options)
        try:
            return answer.json()
        except ValueError:
            raise ServiceError(f"{NO_REDLINE}; {self._server} answered {answer.text!r:.200}") from None

    def _send(self, method: str, path: str, **options: Any) -> Any:
        """Sends a request, repeated until the server answers or `patience_s` is over, and returns the answer.

        Raises:
            ServerUnreachable: the server cannot be reached.
            UsageError: its certificate is not trusted.
            RedlineError: the error that the server answers.
        """
        until, pause = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            try:
                with self._http_errors():
                    answer = self._http.request(method, path, **options)
                if answer.status_code >= 400:
                    _raise_error(answer)
                self._answers()
                return answer
            except (ServerUnreachable, StorageUnavailable) as error:
                if time.monotonic() + pause > until:
                    raise
                self._waits_for(error)
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    @contextmanager
    def _stream(self, path: str, **options: Any) -> Iterator[Iterator[str]]:
        """Yields the lines of an answer as they arrive. Raises as `_send` does."""
        import httpx

        timeout = httpx.Timeout(_TIMEOUT_S, read=3 * _TIMEOUT_S)
        with self._http_errors(), self._http.stream("GET", path, timeout=timeout, **options) as answer:
            if answer.status_code >= 400:
                answer.read()
                _raise_error(answer)
            yield answer.iter_lines()

    @contextmanager
    def _http_errors(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.HTTPError as error:
            if (reason := _distrusted(error)) is not None:
                raise UsageError(
                    f"the certificate of {self._server} is not trusted: {reason}; set the environment variable SSL_CERT_FILE to "
                    "the file of that certificate, or of the authority that signed it"
                ) from None
            problem = str(error) or type(error).__name__
            raise ServerUnreachable(f"the server {self._server} does not answer: {problem}") from None

    def _waits_for(self, error: Exception) -> None:
        if not self._waits:
            self._waits = True
            self._say(f"{error}; waiting for it")

    def _answers(self) -> None:
        if self._waits:
            self._waits = False
            self._say(f"the server {self._server} answers again")


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _parsed(kind: Any, answer: Any) -> Any:
    """Returns an answer as this type. Fields that a later server has added are left out.

    Raises:
        ServiceError: it has another form.
    """
    try:
        return _adapter(kind).validate_python(answer)
    except ValueError:
        raise ServiceError(f"{NO_REDLINE}; got {answer!r:.200}") from None


def _without_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _distrusted(error: BaseException | None) -> str | None:
    """Returns why a certificate is not trusted; None if the error has another cause."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message
        error = error.__cause__ or error.__context__
    return None


def _raise_error(answer: Any) -> NoReturn:
    """Raises the error that an answer with status 400 or above contains."""
    try:
        detail = answer.json()["error"]
        code, message = str(detail["code"]), str(detail["message"])
    except (ValueError, KeyError, TypeError):
        code, message = "", f"the server answered {answer.status_code}: {answer.text[:200]}"
    if code in _ERRORS:
        raise _ERRORS[code](message)
    if answer.status_code in (401, 403):
        raise Refused(message)
    if answer.status_code in (429, 502, 503, 504):
        raise ServerUnreachable(message)
    raise ServiceError(message)


class SearchRun:
    """A search on a server. Each property is read from the server anew."""

    def __init__(self, client: Client, search: str) -> None:
        self._client, self.id = client, search

    def look(self) -> "SearchAnswer":
        """Returns the search's current state."""
        from .api.models import SearchAnswer

        return _parsed(SearchAnswer, self._client._json("GET", f"/v1/searches/{self.id}"))

    @property
    def state(self) -> str:
        """`queued`, `running`, `done`, `failed` or `cancelled`."""
        return self.look().state.value

    def wait(self, timeout: float | None = None) -> "SearchRun":
        """Waits until the search ends.

        Args:
            timeout: s; None for no limit.

        Raises:
            TimeoutError: it has not ended in time. If the server was unreachable by then, that error is the cause.
        """
        if timeout is None:
            while self.state not in ENDED:
                for _ in self.events():
                    pass
            return self
        # An event stream would block past the timeout while nothing happens.
        until = time.monotonic() + timeout
        while True:
            away = None
            try:
                if self.state in ENDED:
                    return self
            except (ServerUnreachable, StorageUnavailable) as error:
                away = error
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError(f"the search {self.id} has not ended within {timeout:g} s") from away
            time.sleep(min(_LOOK_S, left))

    def events(self, after: int | None = None) -> Iterator[Event]:
        """Yields its events, from the beginning or after an event, until it ends."""
        return self._client.events(self.id, after)

    @property
    def best(self) -> Candidate | None:
        """The winner, or the best trial so far; None if none succeeded."""
        best = self.summary()["best"]
        if best is None:
            return None
        config, measured = Config(best["config"]), Measurement.from_dict(best["measurement"])
        trial = Trial(
            number=best["trial"], config=config, measurement=measured, remeasured=tuple(best.get("remeasured") or ())
        )
        return Candidate(config=config, throughput=best["throughput"], measurement=measured, trial=trial)

    @property
    def winner(self) -> Candidate:
        """Like `best`, but never None.

        Raises:
            NothingFound: no trial succeeded. The message states why.
        """
        if (best := self.best) is None:
            raise NothingFound(f"there is no winner: {self.why}")
        return best

    @property
    def why(self) -> str:
        """Returns the reason for a missing winner; empty if there is a winner."""
        return str(self.summary()["why"] or "")

    def summary(self) -> dict[str, Any]:
        """Returns the results so far, in the form of `redline tune --json`."""
        summary: dict[str, Any] = self._client._json("GET", f"/v1/searches/{self.id}/best")
        return summary

    def history(self) -> Iterator[Event]:
        """Yields its past events."""
        after, path = 0, "/v1/history"
        while page := self._client._json("GET", path, params={"search": self.id, "after": after, "limit": 1000}):
            yield from (events := _parsed(list[Event], page))
            after = events[-1].id

    @property
    def trials(self) -> "DataFrame":
        """The trials that have ended, with the columns of trials.csv."""
        data = self.table()
        return read_table(io.BytesIO(data)) if data else table_frame([], [])

    def table(self) -> bytes:
        """Returns trials.csv."""
        data: bytes = self._client._send("GET", f"/v1/searches/{self.id}/trials.csv").content
        return data

    def log(self, trial: int, begin: int = 0) -> bytes:
        """Returns a trial's output from a byte offset on; empty if there is no more."""
        output, path = b"", f"/v1/searches/{self.id}/logs/{trial}"
        while True:
            answer = self._client._send("GET", path, params={"begin": begin + len(output)})
            output += answer.content
            if begin + len(output) >= int(answer.headers["x-redline-size"]) or not answer.content:
                return output

    def export(self, target: str, *, trial: int | None = None, form: str | None = None) -> str:
        """Returns the winner's or a trial's configuration for a framework, as `redline export` does."""
        params = _without_none(trial=trial, form=form)
        return str(self._client._send("GET", f"/v1/searches/{self.id}/export/{target}", params=params).text)

    def cancel(self) -> None:
        """Ends the search. Its results are kept."""
        self._client._json("POST", f"/v1/searches/{self.id}/cancel")

    def retry(self) -> None:
        """Resumes the search after it failed or was cancelled. Finished trials are not repeated."""
        self._client._json("POST", f"/v1/searches/{self.id}/retry")

    def change(self, *, priority: int) -> None:
        """Changes its priority."""
        self._client._json("PATCH", f"/v1/searches/{self.id}", json={"priority": priority})

    def delete(self) -> None:
        """Deletes the search and its folder. It must have ended."""
        self._client._send("DELETE", f"/v1/searches/{self.id}")
