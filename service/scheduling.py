"""Which searches get devices, and which give theirs up: a pure function of the searches, the devices and the users' use.

Queued searches are ordered by priority, then by their user's use of devices in the last week relative to the user's weight,
then by the time since which they wait. A search gets the devices of its trials, all of one kind, for as long as its process
runs. Ray would let any small group pass a large one that waits, so it is given only groups that fit: this module counts the
devices itself. Smaller searches may use devices that a larger one cannot use yet, but only for `OVERTAKEN_S`.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .records import Contender, SearchState, Share

NOMINAL_S = 600.0
"""Time charged to a user for each device that a search of theirs has, besides the time it has had it, s: the next device is
another user's.
"""
OVERTAKEN_S = 600.0
"""How long smaller searches may start before one that waits for more devices than are free, s."""
MOST_AT_ONCE = 4
"""Trials at once of a search that states no number: with more, each is proposed with less knowledge."""
NO_DEVICES = "the devices are not known yet"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of device of the cluster."""

    name: str
    type: str
    """`cuda` or `cpu`."""
    total: int
    """Number of devices."""
    memory_mib: float
    """Memory of one device, MiB."""


@dataclass(frozen=True, slots=True)
class Start:
    """A search that gets devices."""

    search: str
    kind: str
    uses: int
    """Devices it gets: those of a trial, times the trials at once."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What changes now, and why the others wait."""

    start: list[Start] = field(default_factory=list)
    """In the order of choice."""
    pause: dict[str, str] = field(default_factory=dict)
    """Running searches that give up their devices after the trials in progress, with the reasons."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why each queued search waits."""
    overtaken: frozenset[str] = frozenset()
    """Searches that others may pass, since they need more devices than are free."""


def decide(
    contenders: Sequence[Contender],
    shares: Iterable[Share],
    kinds: Sequence[Kind],
    now: float,
    *,
    most: int,
    slice_s: float | None = None,
    overtaken_since: Mapping[str, float] | None = None,
    pausing: Iterable[str] = (),
) -> Decision:
    """Returns which searches get devices now, which give theirs up, and why the others wait.

    Args:
        contenders: searches that are queued or have devices.
        shares: of the users. A user without one has used nothing and has no limits.
        kinds: the cluster's devices.
        now: s since 1970.
        most: searches at once.
        slice_s: time after which a search gives way to others that wait, s; None for never.
        overtaken_since: time since which each search of an earlier decision's `overtaken` has been among them, s since 1970.
        pausing: running searches that were told to give up their devices.
    """
    return _Round(contenders, shares, kinds, now, most, overtaken_since or {}).decide(slice_s, set(pausing))


def matches(requested: str, kind: Kind) -> bool:
    """True if a device is of the requested kind: empty for any, its type, or a part of its name."""
    name = requested.casefold()
    return not name or name == kind.type or name in kind.name.casefold()


class _Round:
    """The state of one decision."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        shares: Iterable[Share],
        kinds: Sequence[Kind],
        now: float,
        most: int,
        overtaken_since: Mapping[str, float],
    ) -> None:
        self._now, self._most, self._overtaken_since = now, most, overtaken_since
        self._kinds = {kind.name: kind for kind in kinds}
        self._shares = {share.user: share for share in shares}
        self._used_s = defaultdict(float, {user: share.week_s for user, share in self._shares.items()})
        self._running = [contender for contender in contenders if contender.uses]
        self._queued = [contender for contender in contenders if contender.state is SearchState.QUEUED]
        self._free = {kind.name: kind.total for kind in kinds}
        self._searches_of: dict[int, int] = defaultdict(int)
        self._devices_of: dict[int, int] = defaultdict(int)
        for contender in self._running:
            self._count(contender.user, contender.kind, contender.uses)

    def _count(self, user: int, kind: str, uses: int) -> None:
        self._used_s[user] += uses * NOMINAL_S
        self._searches_of[user] += 1
        self._devices_of[user] += uses
        if kind in self._free:
            self._free[kind] -= uses

    def decide(self, slice_s: float | None, pausing: set[str]) -> Decision:
        decision = Decision(pause=self._over_limits(pausing))
        slots = self._most - len(self._running)
        closed: set[str] = set()
        blocked: list[Contender] = []
        overtaken: set[str] = set()
        ahead = 0
        for contender in self._in_order():
            reason = self._obstacle(contender)
            if reason is not None:
                decision.reasons[contender.search] = reason
                continue
            kind = self._choose_kind(contender)
            free = max(0, self._free[kind.name])
            if slots > 0 and kind.name not in closed and free >= contender.devices:
                start = Start(contender.search, kind.name, self._uses(contender, kind, free))
                decision.start.append(start)
                self._count(contender.user, kind.name, start.uses)
                slots -= 1
                continue
            blocked.append(contender)
            decision.reasons[contender.search] = self._waits_for(contender, kind, slots, ahead)
            ahead += 1
            if slots > 0 and kind.name not in closed:
                overtaken.add(contender.search)
                if self._now - self._overtaken_since.get(contender.search, self._now) >= OVERTAKEN_S:
                    closed.add(kind.name)  # what becomes free is kept for it
        if slice_s is not None:
            decision.pause.update(self._give_way(blocked, slice_s, pausing | set(decision.pause)))
        return Decision(decision.start, decision.pause, decision.reasons, frozenset(overtaken))

    def _in_order(self) -> Iterator[Contender]:
        """Yields the queued searches in the order in which they get devices. What a user gets meanwhile counts."""
        queues: dict[int, list[Contender]] = defaultdict(list)
        for contender in sorted(self._queued, key=lambda queued: (queued.priority, -queued.queued, queued.search)):
            queues[contender.user].append(contender)
        heap = [self._rank(queue[-1]) for queue in queues.values()]
        heapq.heapify(heap)
        while heap:
            rank = heapq.heappop(heap)
            user = rank[-1]
            if rank != (current := self._rank(queues[user][-1])):
                heapq.heappush(heap, current)  # the user has got devices since
                continue
            yield queues[user].pop()
            if queues[user]:
                heapq.heappush(heap, self._rank(queues[user][-1]))

    def _rank(self, contender: Contender) -> tuple[float, float, float, int]:
        share = self._shares.get(contender.user)
        used_s = self._used_s[contender.user] / (share.weight if share else 1.0)
        return -contender.priority, used_s, contender.queued, contender.user

    def _obstacle(self, contender: Contender) -> str | None:
        """Returns the reason why a search could not start on an empty cluster; None if it could."""
        if not self._kinds:
            return NO_DEVICES
        matching = self._matching(contender)
        if not matching:
            requested = contender.kind or contender.device
            began = ", on which it began" if contender.kind else ""
            return f"the cluster has no '{requested}'{began}; it has {', '.join(sorted(self._kinds))}"
        most = max(kind.total for kind in matching)
        if most < contender.devices:
            return f"a trial needs {contender.devices} devices of one kind, and the cluster has at most {most}"
        return self._over_limit(contender)

    def _over_limit(self, contender: Contender) -> str | None:
        """Returns the limit of its user that keeps a search from starting; None if none does."""
        share = self._shares.get(contender.user)
        if share is None:
            return None
        if share.searches is not None and self._searches_of[contender.user] >= share.searches:
            return f"its user may run {share.searches} {'search' if share.searches == 1 else 'searches'} at once"
        if share.devices is not None and self._devices_of[contender.user] + contender.devices > share.devices:
            return f"its user may use {share.devices} devices at once, and has {self._devices_of[contender.user]}"
        return self._hours_used_up(share)

    def _hours_used_up(self, share: Share) -> str | None:
        if share.device_hours is None or share.week_s < 3600 * share.device_hours:
            return None
        return f"its user has used {share.week_s / 3600:.3g} of {share.device_hours:g} device-hours in seven days"

    def _over_limits(self, pausing: set[str]) -> dict[str, str]:
        """Returns the running searches that must pause: those of users without device-hours."""
        reasons = {}
        for contender in self._running:
            share = self._shares.get(contender.user)
            reason = None if share is None else self._hours_used_up(share)
            if reason is not None and contender.state is SearchState.RUNNING and contender.search not in pausing:
                reasons[contender.search] = reason
        return reasons

    def _matching(self, contender: Contender) -> list[Kind]:
        if contender.kind:
            return [self._kinds[contender.kind]] if contender.kind in self._kinds else []
        return [kind for kind in self._kinds.values() if matches(contender.device, kind)]

    def _choose_kind(self, contender: Contender) -> Kind:
        """Returns the matching kind with most free devices among those that have enough for a trial."""
        large_enough = [kind for kind in self._matching(contender) if kind.total >= contender.devices]
        return max(large_enough, key=lambda kind: (self._free[kind.name], kind.total, kind.name))

    def _uses(self, contender: Contender, kind: Kind, free: int) -> int:
        """Returns the devices of a search that starts: for several trials at once if it asks for them, or nobody waits."""
        at_once = contender.concurrency
        if at_once is None:
            # On a CPU trials at once slow each other down.
            at_once = 1 if kind.type == "cpu" or len(self._queued) > 1 else MOST_AT_ONCE
        share = self._shares.get(contender.user)
        if share is not None and share.devices is not None:
            free = min(free, share.devices - self._devices_of[contender.user])
        return contender.devices * max(1, min(at_once, free // contender.devices))

    def _waits_for(self, contender: Contender, kind: Kind, slots: int, ahead: int) -> str:
        before = f"{ahead} {'search' if ahead == 1 else 'searches'} before it" if ahead else "it is the next"
        if slots <= 0:
            return f"{self._most} {'search runs' if self._most == 1 else 'searches run'} at once: {before}"
        wants = "a device" if contender.devices == 1 else f"{contender.devices} devices"
        free = max(0, self._free[kind.name])
        return f"waits for {wants} of {kind.name}: {free} of {kind.total} are free, {before}"

    def _give_way(self, blocked: Sequence[Contender], slice_s: float, pausing: set[str]) -> dict[str, str]:
        """Returns the running searches whose slice is over and that give way to the first search that waits.

        A search gives way only to one that would go before it if it were queued now, so that it does not get its devices
        back at once.
        """
        if not blocked or pausing:  # devices will be free without this
            return {}
        first = blocked[0]
        kind = self._choose_kind(first)
        over = [
            contender
            for contender in self._running
            if contender.began is not None
            and self._now - contender.began >= slice_s
            and contender.state is SearchState.RUNNING
            and self._rank(first) < (*self._rank(contender)[:2], self._now, contender.user)
        ]
        over.sort(key=lambda contender: (contender.priority, contender.began))
        needs_slot = len(self._running) >= self._most
        free, chosen = max(0, self._free[kind.name]), list[Contender]()
        for contender in over:
            enough = free >= first.devices
            if enough and not (needs_slot and not chosen):
                break
            if not enough and contender.kind != kind.name:
                continue
            chosen.append(contender)
            free += contender.uses if contender.kind == kind.name else 0
        if free < first.devices:
            return {}
        reason = f"its slice of {slice_s / 60:g} minutes is over, and others wait"
        return {contender.search: reason for contender in chosen}
