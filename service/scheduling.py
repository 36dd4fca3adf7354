"""Scheduling as pure functions of the waiting and running dry runs, the workers and the users' shares.

Waiting dry runs are ordered by priority, then by the user with the least use of devices relative to their weight,
then, within a user, by the search's time of submission. A dry run gets all its devices at once on one worker, the one
with the fewest devices left over. If no worker has enough free devices for a multi-device dry run, it reserves the
worker that will have them first, and later dry runs are placed there only if they do not delay it (EASY backfilling:
Lifka 1995, "The ANL/IBM SP scheduling system"). A running dry run is never interrupted.

Slots of searches (`share_slots`) follow the same order over a longer time: priority, then the user with the least use
of devices in a week relative to their weight, then the one with the fewest slots. A search that cannot run gives up
its slot.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .records import Contender, Running, Share, Waiting, Worker

NOMINAL_S = 60.0
"""Assumed duration of a dry run if unknown, s. Also charged to its user's share as soon as it starts."""
NOMINAL_SEARCH_S = 600.0
"""Time charged to a user's share for each device as soon as a search of theirs gets a slot, s."""
RESERVED = 8
"""One worker in this many, and at least one, may be reserved for multi-device dry runs."""

Placement = tuple[int, str]
"""A dry run and the worker that gets it."""


def decide(
    waiting: Sequence[Waiting],
    running: Sequence[Running],
    workers: Sequence[Worker],
    shares: Iterable[Share],
    now: float,
) -> list[Placement]:
    """Returns the dry runs to start now with their workers, in the order of choice.

    Args:
        waiting: waiting dry runs.
        running: running dry runs.
        workers: workers in the pool.
        shares: of the users. A user without one has used nothing and has no quota.
        now: s since 1970.
    """
    pool = _Pool(workers, running, now)
    return list(_placements(waiting, pool, _Users(shares, running)))


def why_waiting(
    waiting: Sequence[Waiting],
    running: Sequence[Running],
    workers: Sequence[Worker],
    shares: Iterable[Share],
    now: float,
) -> dict[str, str]:
    """Returns the reason why each waiting search waits, by its id. Arguments as for `decide`."""
    pool, users = _Pool(workers, running, now), _Users(shares, running)
    out: dict[str, str] = {}
    for each in waiting:
        if each.search not in out:
            out[each.search] = pool.why(each, users)
    return out


def share_slots(
    contenders: Sequence[Contender],
    running: Sequence[Running],
    workers: Sequence[Worker],
    shares: Iterable[Share],
    most: int,
) -> tuple[list[str], dict[str, str]]:
    """Returns the searches that get a slot now, in order, and those that must give up theirs with the reason."""
    slots = _Slots(contenders, running, workers, shares)
    room = most - sum(each.runs for each in contenders)
    # A slot given up now is free at the next decision.
    return list(itertools.islice(slots.order(), max(0, room))), slots.given_up()


def why_no_slot(
    contenders: Sequence[Contender],
    running: Sequence[Running],
    workers: Sequence[Worker],
    shares: Iterable[Share],
    most: int,
) -> dict[str, str]:
    """Returns the reason why each search without a slot has none, by its id. Arguments as for `share_slots`."""
    slots = _Slots(contenders, running, workers, shares)
    out = {each.search: reason for each in contenders if not each.runs and (reason := slots.obstacle(each))}
    for before, search in enumerate(slots.order()):
        others = f"{before} {'search' if before == 1 else 'searches'} before it" if before else "it is the next"
        out[search] = f"{most} searches run at once, and it waits for a slot: {others}"
    # A user's limit of searches can leave searches of theirs out of the order.
    for each in contenders:
        if not each.runs and each.search not in out:
            out[each.search] = slots.limit(each.user)
    return out


class _Slots:
    """The slots of running searches."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        running: Sequence[Running],
        workers: Sequence[Worker],
        shares: Iterable[Share],
    ) -> None:
        self._contenders, self._workers = contenders, workers
        shares = list(shares)
        self._users = _Users(shares, running)
        self._charges = defaultdict(float, {each.user: each.week for each in shares})
        for each in running:
            self._charges[each.user] += each.devices * (each.seconds or NOMINAL_S)
        self._never: dict[tuple[str, str, int], str] = {}
        self._have: dict[int, int] = defaultdict(int)
        for one in contenders:
            self._have[one.user] += one.runs

    def obstacle(self, each: Contender) -> str:
        """Returns the reason why a search cannot run even with a free slot; empty if it can."""
        if each.held:
            return "it is held until a user releases it"
        if each.simulated:
            return ""
        wanted = each.device, each.kind, each.devices
        if wanted not in self._never:
            self._never[wanted] = obstacle(each.device, each.devices, self._workers, kind=each.kind)
        return self._never[wanted] or self._users.used_up(each.user)

    def limit(self, user: int) -> str:
        """Returns the quota that keeps a user from having one more slot; empty if none does."""
        share, have = self._users.shares.get(user), self._have[user]
        if share is None or share.running is None or have < share.running:
            return ""
        return f"its user may have {share.running} dry runs at once, and has {have} of their searches running"

    def given_up(self) -> dict[str, str]:
        """Returns the searches that must give up their slot, with the reason: they cannot run and have no leased dry
        run.
        """
        ready = (each for each in self._contenders if each.runs and not each.leased)
        return {each.search: reason for each in ready if (reason := self.obstacle(each))}

    def order(self) -> Iterator[str]:
        """Yields the searches that can run and have no slot, in the order in which they get one."""
        queues: dict[int, list[Contender]] = defaultdict(list)
        have, charges = self._have.copy(), self._charges.copy()
        for each in sorted(self._contenders, key=lambda one: (one.priority, -one.submitted, one.search)):
            if not each.runs and not self.obstacle(each):
                queues[each.user].append(each)

        def rank_of(user: int) -> tuple[float, float, float, float, int]:
            head = queues[user][-1]
            share = self._users.shares.get(user)
            weight = share.weight if share else 1.0
            return -head.priority, charges[user] / weight, have[user] / weight, head.submitted, user

        heap = [rank_of(user) for user in queues]
        heapq.heapify(heap)
        while heap:
            user = heapq.heappop(heap)[-1]
            share = self._users.shares.get(user)
            if share is not None and share.running is not None and have[user] >= share.running:
                continue
            each = queues[user].pop()
            yield each.search
            have[user] += 1
            charges[user] += each.devices * NOMINAL_SEARCH_S
            if queues[user]:
                heapq.heappush(heap, rank_of(user))


def matches(requested: str, device: Mapping[str, Any]) -> bool:
    """True if a device is of the requested kind: empty for any, its type, or a part of its name."""
    name = requested.casefold()
    return not name or name == str(device.get("type", "")).casefold() or name in str(device.get("name", "")).casefold()


def obstacle(device: str, devices: int, workers: Sequence[Worker], *, kind: str = "") -> str:
    """Returns the reason why none of these workers can ever run a dry run; empty if one can.

    Args:
        device: requested kind of device; empty for any.
        devices: number of devices it takes.
        workers: workers in the pool.
        kind: kind of device that the search was placed on; empty if not placed.
    """
    if not workers:
        return "no worker is in the pool"
    matching = [each for each in workers if (each.kind == kind if kind else matches(device, each.device))]
    if not matching:
        named = f"'{kind or device}'{', on which its search began' if kind else ''}"
        return f"no worker has {named}; there are {', '.join(sorted({each.kind for each in workers}))}"
    most = max(each.devices for each in matching)
    if most < devices:
        return f"a dry run takes {devices} devices of one worker, and none has more than {most}"
    return ""


def _placements(waiting: Sequence[Waiting], pool: "_Pool", users: "_Users") -> Iterable[Placement]:
    # The heap contains the first dry run of each user; a placement changes only the rank of its own user.
    queues: dict[int, list[Waiting]] = defaultdict(list)
    for each in sorted(waiting, key=lambda one: (one.priority, -one.submitted, -one.dry_run)):
        queues[each.user].append(each)

    def rank_of(user: int) -> tuple[float, float, float, int]:
        head = queues[user][-1]
        return -head.priority, users.charge(user), head.submitted, user

    heap = [rank_of(user) for user in queues]
    heapq.heapify(heap)
    while heap and pool.unused > 0:
        user = heapq.heappop(heap)[-1]
        if users.obstacle(user):
            continue
        each = queues[user].pop()
        worker = pool.place(each)
        if worker is not None:
            users.count(user, each)
            yield each.dry_run, worker
        if queues[user]:
            heapq.heappush(heap, rank_of(user))


class _Users:
    """The users' current use of devices, and their quotas."""

    def __init__(self, shares: Iterable[Share], running: Iterable[Running]) -> None:
        self.shares = {each.user: each for each in shares}
        self.charges = {user: each.recent for user, each in self.shares.items()}
        self.running: dict[int, int] = defaultdict(int)
        for each in running:
            self.count(each.user, each)

    def count(self, user: int, each: Waiting | Running) -> None:
        """Counts a dry run that runs or is about to."""
        self.running[user] += 1
        self.charges[user] = self.charges.get(user, 0.0) + each.devices * (each.seconds or NOMINAL_S)

    def charge(self, user: int) -> float:
        """Device-seconds divided by the user's weight."""
        share = self.shares.get(user)
        return self.charges.get(user, 0.0) / (share.weight if share else 1.0)

    def obstacle(self, user: int) -> str:
        """Returns the quota that keeps a user from starting more; empty if none does."""
        share = self.shares.get(user)
        if share is None:
            return ""
        if share.running is not None and self.running[user] >= share.running:
            return f"its user has {self.running[user]} dry runs running, and may have {share.running}"
        return self.used_up(user)

    def used_up(self, user: int) -> str:
        """Returns an error text if a user has no device-hours left; empty otherwise."""
        share = self.shares.get(user)
        if share is not None and share.device_hours is not None and share.used_hours >= share.device_hours:
            return f"its user has used {share.used_hours:.2f} of {share.device_hours:g} device-hours in 30 days"
        return ""


@dataclass
class _Reservation:
    """A worker reserved for a multi-device dry run."""

    ready: float
    """When the worker will have enough free devices."""
    spare: int
    """Free devices at that time beyond those needed."""


@dataclass
class _Kind:
    """The workers of one kind of device."""

    workers: list[Worker] = field(default_factory=list)
    free: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Workers without a reservation, by number of free devices."""
    reserved: dict[str, _Reservation] = field(default_factory=dict)


class _Pool:
    """The workers, their free devices and their reservations."""

    def __init__(self, workers: Sequence[Worker], running: Sequence[Running], now: float) -> None:
        self.now, self.workers = now, workers
        self.free = {each.id: each.devices for each in workers}
        self.ends: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for each in running:
            if each.worker in self.free:
                self.free[each.worker] -= each.devices
                self.ends[each.worker].append((max(now, each.started + (each.seconds or NOMINAL_S)), each.devices))
        self.kinds: dict[str, _Kind] = defaultdict(_Kind)
        for worker in sorted(workers, key=lambda one: one.id):
            kind = self.kinds[worker.kind]
            kind.workers.append(worker)
            if self.free[worker.id] > 0:
                kind.free[self.free[worker.id]].append(worker.id)
        self.unused = sum(max(0, each) for each in self.free.values())
        self._words: dict[tuple[str, int], tuple[str, str]] = {}

    def place(self, each: Waiting) -> str | None:
        """Takes devices for a dry run and returns their worker; None if it has to wait."""
        kind = self.kinds[each.kind]
        level = min((free for free, ids in kind.free.items() if free >= each.devices and ids), default=None)
        if level is not None:
            worker = kind.free[level].pop()
            if level > each.devices:
                kind.free[level - each.devices].append(worker)
        elif (found := self._backfilled(each, kind)) is not None:
            worker = found
        else:
            if each.devices > 1:
                self._reserve(each, kind)
            return None
        self.free[worker] -= each.devices
        self.unused -= each.devices
        self.ends[worker].append((self.now + (each.seconds or NOMINAL_S), each.devices))
        return worker

    def _backfilled(self, each: Waiting, kind: _Kind) -> str | None:
        """Returns a reserved worker on which a dry run delays no reservation, since it ends before or uses only spare
        devices; None if there is none.
        """
        for worker, held in kind.reserved.items():
            if self.free[worker] < each.devices:
                continue
            if each.seconds is not None and self.now + each.seconds <= held.ready:
                return worker
            if each.devices <= held.spare:
                held.spare -= each.devices
                return worker
        return None

    def _reserve(self, each: Waiting, kind: _Kind) -> None:
        """Reserves the worker that will first have enough free devices, unless too many workers are reserved already."""
        if len(kind.reserved) >= max(1, len(kind.workers) // RESERVED):
            return
        candidates = []
        for worker in kind.workers:
            if worker.devices >= each.devices and worker.id not in kind.reserved:
                ready, free = self._ready(worker.id, each.devices)
                candidates.append((ready, -self.free[worker.id], worker.id, free - each.devices))
        if not candidates:
            return
        ready, _, name, spare = min(candidates)
        if self.free[name] > 0:
            kind.free[self.free[name]].remove(name)
        kind.reserved[name] = _Reservation(ready=ready, spare=spare)

    def _ready(self, worker: str, devices: int) -> tuple[float, int]:
        """Returns when a worker is expected to have so many devices free, and how many are free then."""
        free, ready = self.free[worker], self.now
        for end, freed in sorted(self.ends[worker]):
            if free >= devices:
                break
            free, ready = free + freed, end
        return ready, free

    def why(self, each: Waiting, users: "_Users") -> str:
        """Returns the reason why a dry run waits."""
        key = each.kind, each.devices
        if key not in self._words:
            never = obstacle("", each.devices, self.workers, kind=each.kind)
            self._words[key] = never, self._state(each)
        never, not_now = self._words[key]
        return never or users.obstacle(each.user) or not_now

    def _state(self, each: Waiting) -> str:
        """Returns the reason why a dry run that could run waits."""
        workers = self.kinds[each.kind].workers
        free = sum(max(0, self.free[worker.id]) for worker in workers)
        devices = sum(worker.devices for worker in workers)
        wants = "a device" if each.devices == 1 else f"{each.devices} devices of one worker"
        return f"waits for {wants}: {free} of {devices} are free, and others are ahead in the queue"
