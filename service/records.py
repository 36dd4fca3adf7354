"""Records that the service stores, as frozen dataclasses.

Times are seconds since 1970 (UTC). Fields named after another record (`user`, `search`) are its id.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Annotated, Any

from ..base.option import Option, check_options


class Role(StrEnum):
    """A user's permissions. Each role includes those before it."""

    READER = "reader"
    """Views searches and results."""
    SUBMITTER = "submitter"
    """Submits searches of models, and changes and deletes their own."""
    CODE = "code"
    """Submits commands and workload files as well, which run as the user of Ray's processes."""
    ADMIN = "admin"
    """Changes any search, and has no limits."""

    def includes(self, other: "Role") -> bool:
        """True if this role may do what `other` may."""
        roles = list(Role)
        return roles.index(self) >= roles.index(other)


MOST_PRIORITY = 100
"""Priorities are from -100 to 100."""


class SearchState(StrEnum):
    QUEUED = "queued"
    """Waits for devices; it may have run before."""
    RUNNING = "running"
    """Has devices. Its process may be starting, or starting again."""
    DONE = "done"
    FAILED = "failed"
    """Ended by an error, which `reason` describes."""
    CANCELLED = "cancelled"
    """Ended by a user."""

    @property
    def ended(self) -> bool:
        """True if the state is final."""
        return self in ENDED


ENDED = (SearchState.DONE, SearchState.FAILED, SearchState.CANCELLED)
"""The final states of a search."""
UNDECIDED = "it was queued just now"
"""Why a search waits before the server has decided."""


@dataclass(frozen=True, kw_only=True)
class Rights:
    """What a user may do. None stands for no limit.

    Raises:
        UsageError: a value is invalid.
    """

    role: Annotated[Role, Option("What they may do.", choices=tuple(map(str, Role)))] = Role.SUBMITTER
    searches: Annotated[int | None, Option("Limit of searches that run at once.", type=int, least=1)] = None
    devices: Annotated[int | None, Option("Limit of devices at once.", type=int, least=1)] = None
    device_hours: Annotated[
        float | None, Option("Limit of device-hours in seven days.", type=float, above=0, below=inf)
    ] = None
    weight: Annotated[float, Option("Relative share of the devices.", type=float, above=0, below=inf)] = 1.0
    priority: Annotated[
        int, Option("The highest priority of their searches.", type=int, least=0, most=MOST_PRIORITY)
    ] = 0
    """Admins may give any."""

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class User(Rights):
    """A user of the service."""

    id: int
    name: str
    """Unique name."""
    created: float
    disabled: float | None
    """Since when their tokens are rejected; None if the user is enabled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A token without its secret, which is shown once and stored only as a digest."""

    id: str
    """The token's first characters after `redline_`."""
    user: int
    name: str
    """The owner's description of its purpose."""
    created: float
    expires: float | None
    """When it stops being accepted."""
    revoked: float | None
    """When it was revoked."""
    used: float | None
    """When it was last used, to a minute; None if never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """A submitted search."""

    id: str
    """12 hexadecimal digits."""
    user: int
    owner: str
    """Name of the owner."""
    key: str
    """Idempotency key, unique per user; the id if none was given."""
    name: str
    request: dict[str, Any]
    """The fields of `tuner.request.Request` that were submitted."""
    state: SearchState
    reason: str
    """The reason for the state, or what its process waits for; empty if there is none."""
    priority: int
    """The higher goes first."""
    devices: int
    """Devices of one trial."""
    device: str
    """The requested kind of device, by type or part of its name (`cuda`, `H100`); empty for any."""
    kind: str
    """Name of the kind of device that it runs on, from its first start; empty until then."""
    uses: int
    """Devices that it has now; 0 if it does not run."""
    created: float
    """When it was submitted."""
    queued: float
    """When it last joined the queue."""
    started: float | None
    """When it first ran."""
    ended: float | None
    attempt: int
    """Number of the latest process that ran it."""
    used_s: float
    """Time that it has had devices, s."""
    best: dict[str, Any] | None
    """The winner as its process reported it."""
    trials: int
    """Trials that have ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessId:
    """A process of this host, which a later process with the same number is told from by its start."""

    pid: int
    started: float
    """As `psutil.Process.create_time` returns it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A search that is queued, or that has devices, as input to scheduling."""

    search: str
    user: int
    priority: int
    device: str
    kind: str
    devices: int
    """Devices of one trial."""
    concurrency: int | None
    """Requested trials at once; None if the service decides."""
    queued: float
    state: SearchState
    """A search that has ended has its devices until its process has."""
    uses: int
    """Devices that it has now."""
    began: float | None
    """When it got them; None if it has none."""
    used_s: float
    """Time that it has had devices, s."""
    process: ProcessId | None
    """The process that runs it; None if none was started."""
    read: int
    """Bytes of its file of events that were read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A user's use of the devices, and their limits."""

    user: int
    weight: float = 1.0
    week_s: float = 0.0
    """Device-seconds of the last seven days."""
    searches: int | None = None
    devices: int | None = None
    device_hours: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A change in the store or a report of a search."""

    id: int
    """Increasing number. A reader that has read up to one misses nothing after it."""
    search: str | None
    """Id of the search; None for an event of the service."""
    time: float
    kind: str
    """`search` for changes of a search's state; the process of a search reports others."""
    data: dict[str, Any]
