"""`rl.Client`: submits and follows searches on a server, from Python."""

import json
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from ..base.errors import NothingFound, StorageUnavailable, UsageError
from ..results import Measurement, Trial, table_frame
from ..results.table import parse, trials_of
from ..space import Config
from ..tuner.result import Candidate
from .records import ENDED, priority_of
from .request import travelling
from .transport import ServerUnreachable, Transport

if TYPE_CHECKING:
    from pandas import DataFrame

    from .api.models import (
        EventAnswer,
        MeAnswer,
        QueueAnswer,
        SearchAnswer,
        WorkerAnswer,
    )

PATIENCE_S = 15.0
"""How long requests to an unreachable server are retried, s."""
FOLLOWING_S = 900.0
"""The same for an event stream that has received events, s: long enough to restart a machine or move the server."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_LOOK_S = 0.5
T = TypeVar("T")


class Client:
    """A connection to a server. Requests are retried while the server is unreachable, for example during a restart.

    Args:
        server: its address, such as `http://127.0.0.1:8700`.
        token: made by `redline token new`.
        trust: file with the certificates to trust, in PEM; None for the system's.
        patience_s: how long requests to an unreachable server are retried, s. An event stream that has received events
            is retried for at least 15 minutes.

    Raises:
        UsageError: the address or token is invalid.
        MissingDependency: a package is not installed.
    """

    def __init__(self, server: str, *, token: str, trust: str | None = None, patience_s: float = PATIENCE_S) -> None:
        self._transport = Transport(server, token, trust)
        self._patience_s = patience_s

    def submit(
        self,
        target: Any,
        space: Any = None,
        *,
        name: str = "",
        priority: int | str = 0,
        device: str = "",
        reuse: bool = False,
        visibility: str = "all",
        key: str | None = None,
        **asked: Any,
    ) -> "SearchRun":
        """Submits a search.

        Args:
            target: as for `redline.tune`. Files are sent as their contents; objects cannot be sent.
            space: as for `redline.tune`.
            name: shown in lists; by default the model's name.
            priority: the higher goes first, -100 to 100, or `low` (-10), `normal` (0), `high` (10), `urgent` (50).
            device: kind of device, by type or a part of its name; empty for any.
            reuse: whether stored measurements of other searches may answer dry runs.
            visibility: who sees it besides its owner and admins: `own` (nobody), `team` (the owner's), `all`.
            key: idempotency key: a second call with the same key returns the same search. By default a new key per
                call, so that retries of one call submit once.
            asked: the other arguments of `redline.tune` that can be sent to a server.

        Raises:
            UsageError: an argument is unknown, invalid, or cannot be sent.
            Refused: the token's user is not allowed to submit this.
        """
        if device and len(device) > 100:
            raise UsageError(f"device has at most 100 characters, but got {len(device)}")
        body = {
            "request": travelling({"target": target, "space": space, **asked}),
            "name": name,
            "priority": priority_of(priority),
            "device": device,
            "reuse": reuse,
            **({"visibility": visibility} if visibility != "all" else {}),
        }
        headers = {"idempotency-key": key or uuid.uuid4().hex}
        return SearchRun(self, self._json("POST", "/v1/searches", json=body, headers=headers)["id"])

    def search(self, search: str) -> "SearchRun":
        """Returns the search of that id.

        Raises:
            NotFound: there is none.
        """
        found = SearchRun(self, search)
        found.look()
        return found

    def searches(
        self, *, state: str | None = None, mine: bool = False, after: str | None = None, limit: int = 100
    ) -> "list[SearchAnswer]":
        """Returns searches, the newest first."""
        from .api.models import SearchesAnswer

        given: dict[str, Any] = {"state": state, "mine": mine, "after": after, "limit": limit}
        params = {name: value for name, value in given.items() if value is not None}
        return SearchesAnswer.model_validate(self._json("GET", "/v1/searches", params=params)).searches

    def queue(self) -> "QueueAnswer":
        """Returns the running and queued searches, with the reasons why they wait."""
        from .api.models import QueueAnswer

        return QueueAnswer.model_validate(self._json("GET", "/v1/queue"))

    def workers(self) -> "list[WorkerAnswer]":
        """Returns the workers of the pool."""
        from .api.models import WorkersAnswer

        return WorkersAnswer.model_validate(self._json("GET", "/v1/workers")).workers

    def me(self) -> "MeAnswer":
        """Returns the user that the token belongs to."""
        from .api.models import MeAnswer

        return MeAnswer.model_validate(self._json("GET", "/v1/me"))

    def estimate(self, target: Any, space: Any = None, **asked: Any) -> dict[str, Any]:
        """Returns the document of `redline estimate --json`, predicted by the server without a device.

        Args:
            target: as for `submit`.
            space: as for `submit`.
            asked: `hardware` (required), `devices`, `seq_len`, `global_batch`, `config`, `top`, ...
        """
        own: dict[str, Any] = {name: asked.pop(name) for name in ("config", "top") if name in asked}
        body: dict[str, Any] = travelling({"target": target, "space": space, **asked}) | own
        found: dict[str, Any] = self._json("POST", "/v1/estimate", json=body, timeout=150.0)
        return found

    def events(self, search: str | None = None, after: int | None = None) -> "Iterator[EventAnswer]":
        """Yields events as they happen. A broken stream is resumed where it broke.

        Args:
            search: yields the events of this search from its beginning until it ends; None for new events of all
                searches and the pool.
            after: starts after the event of this id.
        """
        from .api.models import EventAnswer

        path = "/v1/events" if search is None else f"/v1/searches/{search}/events"
        pause, patience = _FIRST_PAUSE_S, self._patience_s
        contact = time.monotonic()
        while True:
            try:
                params = {} if after is None else {"after": after}
                with self._transport.stream(path, params=params) as lines:
                    for line in lines:
                        pause, patience = _FIRST_PAUSE_S, max(self._patience_s, FOLLOWING_S)
                        contact = time.monotonic()
                        if line.startswith("data: "):
                            event = EventAnswer.model_validate(json.loads(line[6:]))
                            after = event.id
                            yield event
                if search is not None and self._is_over(search, after):
                    return
            except (ServerUnreachable, StorageUnavailable):
                if time.monotonic() - contact > patience:
                    raise
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    def _is_over(self, search: str, after: int | None) -> bool:
        """True if a search has ended and has no events after that one."""
        if self._json("GET", f"/v1/searches/{search}")["state"] not in ENDED:
            return False
        return not self._json("GET", "/v1/history", params={"search": search, "after": after or 0, "limit": 1})

    def close(self) -> None:
        """Closes the connections."""
        self._transport.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _json(self, method: str, path: str, **more: Any) -> Any:
        return self._send(method, path, **more).json()

    def _send(self, method: str, path: str, **more: Any) -> Any:
        """Sends a request, retried until the server answers or `patience_s` is over."""
        until, pause = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            try:
                return self._transport.send(method, path, **more)
            except (ServerUnreachable, StorageUnavailable):
                if time.monotonic() + pause > until:
                    raise
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, 2 * pause)


class SearchRun:
    """A search on a server. Each property is read from the server anew."""

    def __init__(self, client: Client, search: str) -> None:
        self._client, self.id = client, search

    def look(self) -> "SearchAnswer":
        """Returns the search's current state."""
        from .api.models import SearchAnswer

        return SearchAnswer.model_validate(self._client._json("GET", f"/v1/searches/{self.id}"))

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

    def events(self, after: int | None = None) -> "Iterator[EventAnswer]":
        """Yields its events, from the beginning or after an event, until it ends."""
        return self._client.events(self.id, after)

    @property
    def best(self) -> Candidate | None:
        """The winner, or the best trial so far; None if none succeeded."""
        found = self.summary()["best"]
        if found is None:
            return None
        config, measured = Config(found["config"]), Measurement.from_dict(found["measurement"])
        trial = Trial(
            number=found["trial"], config=config, measurement=measured, remeasured=tuple(found.get("remeasured") or ())
        )
        return Candidate(config=config, throughput=found["throughput"], measurement=measured, trial=trial)

    @property
    def winner(self) -> Candidate:
        """Like `best`, but never None.

        Raises:
            NothingFound: no trial succeeded. The message states why.
        """
        if (found := self.best) is None:
            raise NothingFound(f"there is no winner: {self.why}")
        return found

    @property
    def why(self) -> str:
        """Returns the reason for a missing winner; empty if there is a winner."""
        return str(self.summary()["why"] or "")

    def summary(self) -> dict[str, Any]:
        """Returns the results so far, in the form of `redline tune --json`."""
        found: dict[str, Any] = self._client._json("GET", f"/v1/searches/{self.id}/best")
        return found

    def history(self) -> "Iterator[EventAnswer]":
        """Yields its past events."""
        from .api.models import EventAnswer

        after, path = 0, "/v1/history"
        while found := self._client._json("GET", path, params={"search": self.id, "after": after, "limit": 1000}):
            yield from (EventAnswer.model_validate(each) for each in found)
            after = found[-1]["id"]

    @property
    def trials(self) -> "DataFrame":
        """The trials that have ended, with the columns of trials.csv."""
        data = self.table()
        if not data:
            return table_frame([], [])
        columns, _ = parse(data, "trials.csv")
        knobs = [name.removeprefix("knob.") for name in columns if name.startswith("knob.")]
        return table_frame(trials_of(columns, Config), knobs)

    def table(self) -> bytes:
        """Returns trials.csv."""
        found: bytes = self._client._send("GET", f"/v1/searches/{self.id}/trials.csv").content
        return found

    def log(self, trial: int, begin: int = 0) -> bytes:
        """Returns a trial's output from a byte offset on; empty if there is no more."""
        out, path = b"", f"/v1/searches/{self.id}/logs/{trial}"
        while True:
            answer = self._client._send("GET", path, params={"begin": begin + len(out)})
            out += answer.content
            if begin + len(out) >= int(answer.headers["x-redline-size"]) or not answer.content:
                return out

    def export(self, target: str, *, trial: int | None = None, form: str | None = None) -> str:
        """Returns the winner's or a trial's configuration for a framework, as `redline export` does."""
        given: dict[str, Any] = {"trial": trial, "form": form}
        params = {name: value for name, value in given.items() if value is not None}
        return str(self._client._send("GET", f"/v1/searches/{self.id}/export/{target}", params=params).text)

    def cancel(self) -> None:
        """Ends the search. Its results are kept."""
        self._client._json("POST", f"/v1/searches/{self.id}/cancel")

    def hold(self) -> None:
        """Pauses the search until `release`: dry runs in progress end, no others start."""
        self._client._json("POST", f"/v1/searches/{self.id}/hold")

    def release(self) -> None:
        """Resumes the search after `hold`."""
        self._client._json("POST", f"/v1/searches/{self.id}/release")

    def retry(self) -> None:
        """Resumes the search after it failed or was cancelled. Finished dry runs are not repeated."""
        self._client._json("POST", f"/v1/searches/{self.id}/retry")

    def change(self, *, priority: int | str | None = None, visibility: str | None = None) -> None:
        """Changes its priority, or who sees it (`own`, `team`, `all`)."""
        given = {"priority": None if priority is None else priority_of(priority), "visibility": visibility}
        body = {name: value for name, value in given.items() if value is not None}
        self._client._json("PATCH", f"/v1/searches/{self.id}", json=body)

    def delete(self) -> None:
        """Deletes the search and its folder. It must have ended."""
        self._client._send("DELETE", f"/v1/searches/{self.id}")

    def __repr__(self) -> str:
        return f"SearchRun({self.id!r})"
