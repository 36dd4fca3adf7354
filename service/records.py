"""Records that the service stores, as frozen dataclasses.

Times are seconds since 1970 (UTC). Fields named after another record (`user`, `search`, `worker`, `dry_run`) are its id.
Fields that `User`, `Search` or `DryRun` has as well mean the same.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, get_args

from ..base.errors import UsageError


class Role(StrEnum):
    """A user's permissions. Each role except `worker` includes the roles before it."""

    READER = "reader"
    """Views searches and results."""
    SUBMITTER = "submitter"
    """Submits searches and cancels their own."""
    ADMIN = "admin"
    """Adds users and tokens, cancels any search, and joins workers."""
    WORKER = "worker"
    """Joins workers to the pool and does nothing else. Its workers run and measure the searches of all users."""


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
    """Submitted; no searcher has taken it yet."""
    RUNNING = "running"
    """A searcher has taken it, or will take it again after a restart."""
    DONE = "done"
    FAILED = "failed"
    """Ended by an error, which `reason` describes."""
    CANCELLED = "cancelled"
    """Ended by a user."""

    @property
    def ended(self) -> bool:
        """True if the state is final."""
        return self in ENDED


Visibility = Literal["own", "team", "all"]
"""Users who can view a search besides its owner and admins: nobody, the owner's team, or all."""
VISIBILITIES: tuple[str, ...] = get_args(Visibility)

ENDED = (SearchState.DONE, SearchState.FAILED, SearchState.CANCELLED)
"""The final states of a search."""


class DryRunState(StrEnum):
    WAITING = "waiting"
    """Waits for devices."""
    LEASED = "leased"
    """A worker runs it."""
    DONE = "done"
    """Its outcome is stored."""
    WITHDRAWN = "withdrawn"
    """No search needs it any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """A user of the service."""

    id: int
    name: str
    """Unique name."""
    role: Role
    device_hours: float | None
    """Limit of device-hours in 30 days; None for no limit."""
    running: int | None
    """Limit of dry runs that run at once; None for no limit."""
    weight: float
    """Relative share of the devices: a user with weight 2 gets twice as much as one with weight 1."""
    allow_code: bool
    """True if they may submit workloads that are code."""
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
    """The fields of `Request`, as a mapping."""
    state: SearchState
    reason: str
    """The reason for the state; empty if there is none."""
    priority: int
    """Dry runs of the higher priority start first."""
    devices: int
    """Devices of one dry run."""
    device: str
    """The requested kind of device, by type or part of its name (`cuda`, `H100`); empty for any."""
    kind: str
    """Name of the kind of device that the search was placed on and stays on; empty until then."""
    created: float
    """When it was submitted."""
    started: float | None
    """When a searcher first took it."""
    ended: float | None
    attempt: int
    """Number of the latest attempt, which alone may write. It grows when a searcher takes the search, and when the search
    returns to the queue.
    """
    best: dict[str, Any] | None
    """The winner as reported by its searcher."""
    reuse: bool
    """True if stored measurements of other searches may answer its dry runs."""
    trials: int
    """Trials that have ended."""
    simulated: bool
    """True if its trials are predictions, which need no devices."""
    held: bool
    """True if nothing of it starts until it is released."""
    visibility: str
    """Users who can view it besides its owner and admins: `own` (nobody), `team` (the owner's team), `all`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A running or queued search, as input to the assignment of searcher slots."""

    search: str
    user: int
    priority: int
    device: str
    kind: str
    devices: int
    simulated: bool
    held: bool
    submitted: float
    runs: bool
    """True if it has a slot."""
    leased: int
    """Number of its dry runs that workers run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """A dry run, or an interleaved timing of several candidates, that a search requested."""

    id: int
    search: str
    key: str
    """Idempotency key, unique within the search."""
    kind: str
    """`run` or `turns`."""
    payload: dict[str, Any]
    """The arguments of the run."""
    devices: int
    """Devices it takes, all at once, of one worker."""
    state: DryRunState
    lease: int
    """Number of the latest lease. Each lease has a higher number than the one before."""
    worker: str | None
    """The worker that had the latest lease."""
    until: float | None
    """When the latest lease expires."""
    outcome: dict[str, Any] | None
    """The measurements. Written once."""
    created: float
    started: float | None
    """When the latest lease began."""
    ended: float | None
    """When it got its outcome or was withdrawn."""
    attempts: int
    """Number of leases that were not given back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """A process that runs dry runs on its devices."""

    id: str
    """12 hexadecimal digits."""
    user: int
    """Id of the user who joined it to the pool."""
    name: str
    host: str
    device: dict[str, Any]
    """Its kind of device, in the form of `Device.to_dict`."""
    devices: int
    memory_mib: int
    """Memory of one device, MiB."""
    software: dict[str, Any]
    """Versions of the software that affects measurements."""
    seen: float
    """When it last reported."""
    left: float | None
    """When it left the pool; None while it is in the pool."""

    @property
    def kind(self) -> str:
        """Name of its kind of device."""
        return str(self.device.get("name", ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A change in the store or a report of a search."""

    id: int
    """Increasing number. A reader that has read up to one misses nothing after it."""
    search: str | None
    """Id of the search; None for an event of the pool."""
    time: float
    kind: str
    """`search`, `dry_run` or `worker` for the store's own events; searches report others."""
    data: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A dry run leased to a worker, with everything the worker needs to run it."""

    dry_run: int
    lease: int
    """Number of the lease, which every answer must contain."""
    worker: str
    until: float
    """When the lease expires unless it is renewed."""
    search: str
    attempt: int
    user: int
    request: dict[str, Any]
    kind: str
    payload: dict[str, Any]
    devices: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A waiting dry run, as input to scheduling."""

    dry_run: int
    search: str
    user: int
    priority: int
    kind: str
    """Name of the kind of device that the search was placed on."""
    devices: int
    submitted: float
    seconds: float | None
    """Mean duration of the search's dry runs, s; None before the first has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A leased dry run, as input to scheduling."""

    dry_run: int
    search: str
    user: int
    worker: str
    devices: int
    started: float
    seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A user's use of the devices and their limits."""

    user: int
    weight: float = 1.0
    recent: float = 0.0
    """Recent device-seconds, discounted by age."""
    week: float = 0.0
    """Device-seconds discounted over a week, used to assign slots: a search lasts longer than the memory of `recent`."""
    used_hours: float = 0.0
    """Device-hours in the period of the quota."""
    device_hours: float | None = None
    running: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredMeasurement:
    """A stored measurement of a configuration."""

    id: int
    """Increasing number."""
    fingerprint: str
    """Digest of everything else that affects the measurement: workload, devices, hardware, software, seed."""
    config_id: str
    config: dict[str, Any]
    measurement: dict[str, Any]
    search: str | None
    """Id of the search that measured it."""
    time: float


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
