"""`rl.Client`: searches on a server, from Python."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..base.errors import NothingFound, StorageUnavailable, UsageError
from ..results import Measurement, Trial, table_frame
from ..results.table import parse, trials_of
from ..space import Config, Space
from ..tuner.result import Candidate
from .records import priority_of
from .request import travelling
from .transport import Away, Transport

if TYPE_CHECKING:
    from pandas import DataFrame

    from .api.models import (
        AskAnswer,
        EventAnswer,
        MeAnswer,
        QueueAnswer,
        SearchAnswer,
        StudyAnswer,
        WorkerAnswer,
    )

PATIENCE_S = 15.0
"""How long a server that is away is tried again."""
FOLLOWING_S = 900.0
"""The same, by who was already hearing of a search: as long as it takes to start a machine anew, or to move the server."""
ENDED = ("done", "failed", "cancelled")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_LOOK_S = 0.5
T = TypeVar("T")


class Client:
    """A server's searches. A server that is away for a moment, as it is started anew, is tried again.

    Args:
        server: its address, such as `http://127.0.0.1:8700`.
        token: of `redline token new`.
        trust: file with the certificates to trust, in PEM; None for the system's.
        patience_s: how long a server that is away is tried again, s. Who follows a search, and did hear of it, tries for
            a quarter of an hour.

    Raises:
        UsageError: that is no address, or no token.
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
            target: as for `redline.tune`; a file travels as what it holds, objects do not travel.
            space: as for `redline.tune`.
            name: what people call it; by default the model's name.
            priority: higher goes first, -100 to 100, or `low` (-10), `normal` (0), `high` (10), `urgent` (50).
            device: kind of device, by type or a part of its name; any where empty.
            reuse: whether what was measured before may be answered from the server's store.
            visibility: who sees it beside its owner and admins: `own` (nobody), `team` (the owner's), `all`.
            key: the same key is the same search; by default a new one, so that a call that is tried again submits once.
            asked: the other arguments of `redline.tune`, as far as they travel.

        Raises:
            UsageError: something of it is unknown or impossible, or does not travel.
            Refused: the token's user may not do that.
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
        """The search of that id.

        Raises:
            NotFound: there is none.
        """
        found = SearchRun(self, search)
        found.look()
        return found

    def searches(
        self, *, state: str | None = None, mine: bool = False, after: str | None = None, limit: int = 100
    ) -> "list[SearchAnswer]":
        """Searches, the latest first."""
        from .api.models import SearchesAnswer

        given: dict[str, Any] = {"state": state, "mine": mine, "after": after, "limit": limit}
        params = {name: value for name, value in given.items() if value is not None}
        return SearchesAnswer.model_validate(self._json("GET", "/v1/searches", params=params)).searches

    def queue(self) -> "QueueAnswer":
        """What runs and what waits, and why."""
        from .api.models import QueueAnswer

        return QueueAnswer.model_validate(self._json("GET", "/v1/queue"))

    def workers(self) -> "list[WorkerAnswer]":
        """The pool."""
        from .api.models import WorkersAnswer

        return WorkersAnswer.model_validate(self._json("GET", "/v1/workers")).workers

    def me(self) -> "MeAnswer":
        """Whose the token is."""
        from .api.models import MeAnswer

        return MeAnswer.model_validate(self._json("GET", "/v1/me"))

    def estimate(self, target: Any, space: Any = None, **asked: Any) -> dict[str, Any]:
        """What `redline estimate --json` says, predicted by the server without a device.

        Args:
            target: as for `submit`.
            space: as for `submit`.
            asked: `hardware`, which must be named, `devices`, `seq_len`, `global_batch`, `config`, `top`, ...
        """
        own: dict[str, Any] = {name: asked.pop(name) for name in ("config", "top") if name in asked}
        body: dict[str, Any] = travelling({"target": target, "space": space, **asked}) | own
        found: dict[str, Any] = self._json("POST", "/v1/estimate", json=body, timeout=150.0)
        return found

    def study(self, space: Space | Mapping[str, Any], *, sampler: str = "bayes", seed: int = 0, name: str = "") -> str:
        """A new study over a space, for trials that run elsewhere; its id."""
        document = space.to_dict() if isinstance(space, Space) else dict(space)
        body = {"space": document, "sampler": sampler, "seed": seed, "name": name}
        return str(self._json("POST", "/v1/studies", json=body, timeout=150.0)["id"])

    def look(self, study: str) -> "StudyAnswer":
        """A study with its trials."""
        from .api.models import StudyAnswer

        return StudyAnswer.model_validate(self._json("GET", f"/v1/studies/{study}", timeout=150.0))

    def ask(self, study: str) -> "AskAnswer":
        """A study's next trial; without a configuration where none is left."""
        from .api.models import AskAnswer

        return AskAnswer.model_validate(self._json("POST", f"/v1/studies/{study}/ask", timeout=150.0))

    def tell(
        self,
        study: str,
        trial: int,
        *,
        throughput: float | None = None,
        memory: float | None = None,
        status: str | None = None,
        reason: str = "",
    ) -> None:
        """How a trial of a study ended.

        Args:
            study: which.
            trial: its number.
            throughput: what it reached; None where it did not run to its end.
            memory: peak memory of a device, MiB.
            status: `ok`, `oom`, `timeout`, `crash` or `wrong`; by default `ok` with a throughput, else `crash`.
            reason: why, where it is not `ok`.
        """
        body = {"trial": trial, "throughput": throughput, "memory": memory, "status": status, "reason": reason}
        self._json("POST", f"/v1/studies/{study}/tell", json=body, timeout=150.0)

    def events(self, search: str | None = None, after: int | None = None) -> "Iterator[EventAnswer]":
        """What happens, as it does; a stream that breaks goes on where it broke.

        Args:
            search: of one search from its beginning on, until it ends; of all and the pool from now on without.
            after: behind this event.
        """
        from .api.models import EventAnswer

        path = "/v1/events" if search is None else f"/v1/searches/{search}/events"
        pause, patience = _FIRST_PAUSE_S, self._patience_s
        heard = time.monotonic()
        while True:
            try:
                params = {} if after is None else {"after": after}
                with self._transport.stream(path, params=params) as lines:
                    for line in lines:
                        pause, patience = _FIRST_PAUSE_S, max(self._patience_s, FOLLOWING_S)
                        heard = time.monotonic()
                        if line.startswith("data: "):
                            event = EventAnswer.model_validate(json.loads(line[6:]))
                            after = event.id
                            yield event
                            if search is not None and event.kind == "search" and event.data.get("state") in ENDED:
                                return
            except (Away, StorageUnavailable):
                if time.monotonic() - heard > patience:
                    raise
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    def close(self) -> None:
        """Closes its connections."""
        self._transport.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _json(self, method: str, path: str, **more: Any) -> Any:
        return self._send(method, path, **more).json()

    def _send(self, method: str, path: str, **more: Any) -> Any:
        """An answer, asked for until it comes or patience ends: all that is asked twice comes to the same."""
        until, pause = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            try:
                return self._transport.send(method, path, **more)
            except (Away, StorageUnavailable):
                if time.monotonic() + pause > until:
                    raise
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, 2 * pause)


class SearchRun:
    """A search on a server. What it says is what the server knows at that moment."""

    def __init__(self, client: Client, search: str) -> None:
        self._client, self.id = client, search

    def look(self) -> "SearchAnswer":
        """How it stands."""
        from .api.models import SearchAnswer

        return SearchAnswer.model_validate(self._client._json("GET", f"/v1/searches/{self.id}"))

    @property
    def state(self) -> str:
        """`queued`, `running`, `done`, `failed` or `cancelled`."""
        return self.look().state

    def wait(self, timeout: float | None = None) -> "SearchRun":
        """Waits until it ends.

        Args:
            timeout: s; None for as long as it takes.

        Raises:
            TimeoutError: it has not ended within that, or the server was away by then, which is its cause.
        """
        if timeout is None:
            while self.state not in ENDED:
                for _ in self.events():
                    pass
            return self
        # Where nothing happens no event tells that the time is over.
        until = time.monotonic() + timeout
        while True:
            away = None
            try:
                if self.state in ENDED:
                    return self
            except (Away, StorageUnavailable) as error:
                away = error
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError(f"the search {self.id} has not ended within {timeout:g} s") from away
            time.sleep(min(_LOOK_S, left))

    def events(self, after: int | None = None) -> "Iterator[EventAnswer]":
        """What happens in it, from its beginning or behind an event, until it ends."""
        return self._client.events(self.id, after)

    @property
    def best(self) -> Candidate | None:
        """The winner, or the best so far; None where nothing succeeded."""
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
        """`best`, where there must be one.

        Raises:
            NothingFound: no trial succeeded; the message says why.
        """
        if (found := self.best) is None:
            raise NothingFound(f"there is no winner: {self.why}")
        return found

    @property
    def why(self) -> str:
        """Why there is no winner; empty where there is one."""
        return str(self.summary()["why"] or "")

    def summary(self) -> dict[str, Any]:
        """What came of it so far, as `redline tune --json` says it."""
        found: dict[str, Any] = self._client._json("GET", f"/v1/searches/{self.id}/best")
        return found

    def history(self) -> "Iterator[EventAnswer]":
        """What happened in it so far."""
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
        """trials.csv."""
        found: bytes = self._client._send("GET", f"/v1/searches/{self.id}/trials.csv").content
        return found

    def log(self, trial: int, begin: int = 0) -> bytes:
        """What a trial printed, from a byte on; empty where it has printed no more."""
        out, path = b"", f"/v1/searches/{self.id}/logs/{trial}"
        while True:
            answer = self._client._send("GET", path, params={"begin": begin + len(out)})
            out += answer.content
            if begin + len(out) >= int(answer.headers["x-redline-size"]) or not answer.content:
                return out

    def export(self, target: str, *, trial: int | None = None, form: str | None = None) -> str:
        """The winner's configuration, or a trial's, for the framework one trains with; as `redline export`."""
        given: dict[str, Any] = {"trial": trial, "form": form}
        params = {name: value for name, value in given.items() if value is not None}
        return str(self._client._send("GET", f"/v1/searches/{self.id}/export/{target}", params=params).text)

    def cancel(self) -> None:
        """Ends it; what was found so far is kept."""
        self._client._json("POST", f"/v1/searches/{self.id}/cancel")

    def hold(self) -> None:
        """Has nothing of it start until `release`; what workers run ends first."""
        self._client._json("POST", f"/v1/searches/{self.id}/hold")

    def release(self) -> None:
        """Has it continue after `hold`."""
        self._client._json("POST", f"/v1/searches/{self.id}/release")

    def retry(self) -> None:
        """Has it continue after it failed or was cancelled; what it measured is not measured again."""
        self._client._json("POST", f"/v1/searches/{self.id}/retry")

    def change(self, *, priority: int | str | None = None, visibility: str | None = None) -> None:
        """Changes its priority, or who sees it (`own`, `team`, `all`)."""
        given = {"priority": None if priority is None else priority_of(priority), "visibility": visibility}
        body = {name: value for name, value in given.items() if value is not None}
        self._client._json("PATCH", f"/v1/searches/{self.id}", json=body)

    def delete(self) -> None:
        """Deletes it, with its folder; it must have ended."""
        self._client._send("DELETE", f"/v1/searches/{self.id}")

    def __repr__(self) -> str:
        return f"SearchRun({self.id!r})"
