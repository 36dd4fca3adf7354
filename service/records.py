"""Records that the service stores, as frozen dataclasses.

Times are seconds since 1970 (UTC). Fields named after another record (`user`, `search`) are its id.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, get_args

from ..base.errors import UsageError


class Role(StrEnum):
    """A user's permissions. Each role includes those before it."""

    READER = "reader"
    """Views searches and results."""
    SUBMITTER = "submitter"
    """Submits searches of models, and changes and deletes their own."""
    CODE = "code"
    """Submits commands and workload files as well, which run as the user of Ray's processes."""
    ADMIN = "admin"
    """Changes any search, sees all, and has no limits."""

    def includes(self, other: "Role") -> bool:
        """True if this role may do what `other` may."""
        roles = list(Role)
        return roles.index(self) >= roles.index(other)


PRIORITIES = {"low": -10, "normal": 0, "high": 10, "urgent": 50}
"""Named priorities. `priority_of` accepts a name or a whole number."""
MOST_PRIORITY = 100
"""Priorities are from -100 to 100."""


def priority_of(value: int | str) -> int:
    """Returns a priority as a number, given its name or number.

    Raises:
        UsageError: it is neither, or is out of range.
    """
    if isinstance(value, str) and value in PRIORITIES:
        return PRIORITIES[value]
    try:
        number = int(value)
    except ValueError:
        number = MOST_PRIORITY + 1
    if abs(number) > MOST_PRIORITY:
        raise UsageError(
            f"a priority is {', '.join(PRIORITIES)}, or a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}, but got "
            f"{value!r}"
        )
    return number


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
Visibility = Literal["own", "team", "all"]
"""Users who can view a search besides its owner and admins: nobody, the owner's team, or all."""
VISIBILITIES: tuple[str, ...] = get_args(Visibility)


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """A user of the service."""

    id: int
    name: str
    """Unique name."""
    role: Role
    searches: int | None
    """Limit of searches that run at once; None for no limit."""
    devices: int | None
    """Limit of devices that their searches have at once; None for no limit."""
    device_hours: float | None
    """Limit of device-hours in a week; None for no limit."""
    weight: float
    """Relative share of the devices: a user with weight 2 gets twice as much as one with weight 1."""
    priority: int
    """The highest priority they may give a search. Admins may give any."""
    created: float
    team: str
    """The team that sees searches with visibility `team`; empty for none."""
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
    held: bool
    """True if nothing of it starts until it is released."""
    visibility: str
    """Users who can view it besides its owner and admins: `own` (nobody), `team` (the owner's team), `all`."""


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
    held: bool
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


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditEntry:
    """An action of a user, for the audit log."""

    id: int
    time: float
    user: str
    """Name of the user; empty if unknown."""
    action: str
    subject: str
    detail: dict[str, Any]
