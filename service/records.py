"""What the service keeps, as it is read: frozen records, times in seconds since 1970 (UTC)."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..base.errors import UsageError


class Role(StrEnum):
    """What a user may do; each but the worker may do what those before it may."""

    READER = "reader"
    """Looks at searches and results."""
    SUBMITTER = "submitter"
    """Submits searches and cancels their own."""
    ADMIN = "admin"
    """Adds users and tokens, cancels anybody's searches, and joins workers."""
    WORKER = "worker"
    """Joins workers to the pool, and does nothing else: what it runs and what it measures is everybody's."""


PRIORITIES = {"low": -10, "normal": 0, "high": 10, "urgent": 50}
"""Names of priorities, which are whole numbers; `priority_of` reads both."""
MOST_PRIORITY = 100
"""Priorities are from -100 to 100."""


def priority_of(value: int | str) -> int:
    """A priority by its name or its number.

    Raises:
        UsageError: it is neither, or beyond the limits.
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
    """Where a search is."""

    QUEUED = "queued"
    """Submitted; no searcher has it yet."""
    RUNNING = "running"
    """A searcher has it, or will take it up again."""
    DONE = "done"
    """Ended by itself."""
    FAILED = "failed"
    """Ended by an error; `reason` says which."""
    CANCELLED = "cancelled"
    """Ended by somebody."""

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return self not in (SearchState.QUEUED, SearchState.RUNNING)


class DryRunState(StrEnum):
    """Where a dry run is."""

    WAITING = "waiting"
    """For devices."""
    LEASED = "leased"
    """A worker has it."""
    DONE = "done"
    """Its outcome is known."""
    WITHDRAWN = "withdrawn"
    """Nobody needs it any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """Somebody who uses the service."""

    id: int
    """Number."""
    name: str
    """Name; no two have the same."""
    role: Role
    """What they may do."""
    device_hours: float | None
    """Device-hours they may use in 30 days; None for any."""
    running: int | None
    """Dry runs they may have running at once; None for any."""
    weight: float
    """Their share of the devices beside others': who has 2 gets twice what who has 1 gets."""
    allow_code: bool
    """Whether they may submit workloads that are code."""
    priority: int
    """The highest priority that they may give a search; an admin may give any."""
    created: float
    """When they were added."""
    team: str
    """Who sees the searches that they show to their team; empty for none."""
    disabled: float | None
    """Since when none of their tokens is taken; None where they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """What is known of a token; its text is shown once and never kept."""

    id: str
    """What it begins with, after `redline_`."""
    user: int
    """Whose it is."""
    name: str
    """What it is for, in its owner's words."""
    created: float
    """When it was made."""
    expires: float | None
    """From when it is not taken any more."""
    revoked: float | None
    """Since when it is not taken any more."""
    used: float | None
    """When it was last taken, to a minute; None where it never was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """A search that somebody submitted."""

    id: str
    """12 hexadecimal digits."""
    user: int
    """Whose it is."""
    owner: str
    """Their name."""
    key: str
    """Idempotency key: the same key of the same user is the same search. The id where none was given."""
    name: str
    """What its owner calls it."""
    request: dict[str, Any]
    """What is searched: `Request` as a mapping."""
    state: SearchState
    """Where it is."""
    reason: str
    """Why it is that; empty where nothing is to be said."""
    priority: int
    """The higher goes first, between dry runs."""
    devices: int
    """Devices of one dry run."""
    device: str
    """Kind of device that was asked for, by type or part of its name (`cuda`, `H100`); empty for any."""
    kind: str
    """Name of the kind of device that it was placed on, which is the only one that runs it; empty until then."""
    created: float
    """When it was submitted."""
    started: float | None
    """When a searcher first took it."""
    ended: float | None
    """When it ended."""
    attempt: int
    """How often a searcher took it; the latest alone may write."""
    heartbeat: float | None
    """When that searcher was last heard of."""
    best: dict[str, Any] | None
    """The winner, as its searcher told it."""
    reuse: bool
    """Whether configurations that were measured before may be answered from the store."""
    trials: int
    """Trials that have ended."""
    simulated: bool
    """Whether its trials are predictions, which need no devices."""
    held: bool
    """Whether nothing of it starts until it is released."""
    visibility: str
    """Who sees it beside its owner and admins: `own` (nobody), `team` (the owner's), `all`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A search that runs or wants to, as the sharing of places among searches sees it."""

    search: str
    """Its id."""
    user: int
    """Whose it is."""
    priority: int
    """The higher goes first."""
    device: str
    """`Search.device`."""
    kind: str
    """`Search.kind`."""
    devices: int
    """Devices of one dry run."""
    simulated: bool
    """Whether it needs no devices."""
    held: bool
    """Whether it is to wait."""
    submitted: float
    """When it was submitted."""
    runs: bool
    """Whether it has a place."""
    leased: int
    """Dry runs of it that workers have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """A dry run, or several candidates in turns, that a search asked for."""

    id: int
    """Number."""
    search: str
    """The search."""
    key: str
    """What it is within the search: the same key is the same dry run."""
    kind: str
    """`run` or `turns`."""
    payload: dict[str, Any]
    """What is to be run."""
    devices: int
    """Devices it takes, all at once, of one worker."""
    state: DryRunState
    """Where it is."""
    lease: int
    """Number of the latest lease; every lease has a higher one."""
    worker: str | None
    """Who had that lease."""
    until: float | None
    """When that lease ends."""
    outcome: dict[str, Any] | None
    """What came of it; once there, it never changes."""
    created: float
    """When it was asked for."""
    started: float | None
    """When the latest lease began."""
    ended: float | None
    """When its outcome came, or it was withdrawn."""
    attempts: int
    """Leases that were not given back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """A process with devices that runs dry runs."""

    id: str
    """12 hexadecimal digits."""
    user: int
    """Who joined it to the pool."""
    name: str
    """What it calls itself."""
    host: str
    """Where it runs."""
    device: dict[str, Any]
    """Its kind of device, as `Device.to_dict` has it."""
    devices: int
    """How many it has."""
    memory_mib: int
    """Memory of one device, MiB."""
    software: dict[str, Any]
    """Versions that decide what is measured."""
    seen: float
    """When it was last heard of."""
    left: float | None
    """When it left; None where it is there."""

    @property
    def kind(self) -> str:
        """Its kind of device, by name."""
        return str(self.device.get("name", ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened."""

    id: int
    """Number; whoever has read up to one misses nothing after it."""
    search: str | None
    """The search it is of; None for the pool's."""
    time: float
    """When."""
    kind: str
    """`search`, `dry_run` and `worker` are the store's own; a search tells others."""
    data: dict[str, Any]
    """What."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A dry run that was leased to a worker, with all that the worker needs."""

    dry_run: int
    """The dry run."""
    lease: int
    """Number of the lease, which every answer names."""
    worker: str
    """Whose it is."""
    until: float
    """When it ends unless it is renewed."""
    search: str
    """The search."""
    attempt: int
    """The search's attempt."""
    user: int
    """Whose search it is."""
    request: dict[str, Any]
    """What the search searches."""
    kind: str
    """`run` or `turns`."""
    payload: dict[str, Any]
    """What is to be run."""
    devices: int
    """On how many devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A dry run that waits, as scheduling sees it."""

    dry_run: int
    """The dry run."""
    search: str
    """Its search."""
    user: int
    """Whose that is."""
    priority: int
    """The search's."""
    device: str
    """The kind of device that the search asked for; empty for any."""
    devices: int
    """Devices it takes at once."""
    submitted: float
    """When the search was submitted."""
    seconds: float | None
    """What the search's dry runs have taken on average, s; None before the first."""
    kind: str = ""
    """The kind of device that the search was placed on, by its whole name; empty until then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A dry run that runs, as scheduling sees it."""

    dry_run: int
    """The dry run."""
    search: str
    """Its search."""
    user: int
    """Whose that is."""
    worker: str
    """Where it runs."""
    devices: int
    """Devices it has."""
    started: float
    """Since when."""
    seconds: float | None
    """As for `Waiting`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What a user has had of the devices, and may have."""

    user: int
    """The user."""
    weight: float = 1.0
    """`User.weight`."""
    recent: float = 0.0
    """Device-seconds lately, the older the less they count."""
    week: float = 0.0
    """The same over a week, by which searches get places: one lasts longer than what `recent` remembers."""
    used_hours: float = 0.0
    """Device-hours in the time that the quota is for."""
    device_hours: float | None = None
    """`User.device_hours`."""
    running: int | None = None
    """`User.running`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A configuration that was measured."""

    id: int
    """Number; the higher is the later."""
    fingerprint: str
    """Digest of all else that decides what is measured: workload, devices, hardware, software, seed."""
    config_id: str
    """The configuration's id."""
    config: dict[str, Any]
    """The configuration."""
    measurement: dict[str, Any]
    """What came of it."""
    search: str | None
    """The search that measured it."""
    time: float
    """When."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audited:
    """Something that somebody did."""

    id: int
    """Number."""
    time: float
    """When."""
    user: str
    """Who, by name; empty for nobody known."""
    action: str
    """What."""
    subject: str
    """To what."""
    detail: dict[str, Any]
    """How."""
