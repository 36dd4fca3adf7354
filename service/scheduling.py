"""Which dry run goes where: pure functions of what waits, what runs, the workers and the users' shares.

Of what waits, a higher priority goes first; between equal ones the user who has had least of the devices for their
weight; of one user's the search that was submitted first. A dry run gets all its devices at once, on one worker: the one
on which the fewest are left over. A gang that finds no worker with so many free ones reserves the worker that will have
them first, and dry runs behind it are placed there only where they do not delay it (backfilling as EASY does: Lifka 1995,
"The ANL/IBM SP scheduling system"). What runs is never interrupted.

Which searches run (`share_slots`) follows the same order, over a longer time: priority, then the user who has had least of
the devices in a week for their weight, then the one with the fewest slots. A search that cannot run gives up its slot.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .records import Contender, Running, Share, Waiting, Worker

NOMINAL_S = 60.0
"""What a dry run counts for in its user's share as soon as it starts, and is taken to last where nothing is known, s."""
NOMINAL_SEARCH_S = 600.0
"""What a search counts for in its user's share as soon as it gets a slot, for each of its devices, s."""
RESERVED = 8
"""One worker of so many may be reserved for gangs, and one at least."""

Placement = tuple[int, str]
"""A dry run, and the worker that gets it."""


def decide(
    waiting: Sequence[Waiting],
    running: Sequence[Running],
    workers: Sequence[Worker],
    shares: Iterable[Share],
    now: float,
) -> list[Placement]:
    """What is to start now, and where, in the order in which it was chosen.

    Args:
        waiting: what waits.
        running: what runs.
        workers: who is there.
        shares: of the users; who is not among them has had nothing and has no quota.
        now: the time, s since 1970.
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
    """Why each search that waits does, by its id; arguments as for `decide`."""
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
    """Which searches begin now, in order, and which are to give up their slot and why.

    Args:
        contenders: the searches that run or want to.
        running: the dry runs that run.
        workers: who is there.
        shares: of the users, as for `decide`.
        most: how many searches run at once.
    """
    slots = _Slots(contenders, running, workers, shares)
    room = most - sum(each.runs for each in contenders)
    # What is given up now is free for the next decision.
    return list(itertools.islice(slots.order(), max(0, room))), slots.given_up()


def why_no_slot(
    contenders: Sequence[Contender],
    running: Sequence[Running],
    workers: Sequence[Worker],
    shares: Iterable[Share],
    most: int,
) -> dict[str, str]:
    """Why each search without a slot has none, by its id; arguments as for `share_slots`."""
    slots = _Slots(contenders, running, workers, shares)
    out = {each.search: why for each in contenders if not each.runs and (why := slots.obstacle(each))}
    for before, search in enumerate(slots.order()):
        others = f"{before} {'search' if before == 1 else 'searches'} before it" if before else "it is the next"
        out[search] = f"{most} searches run at once, and it waits for a slot: {others}"
    # A user's limit of searches can end the order before all of theirs.
    for each in contenders:
        if not each.runs and each.search not in out:
            out[each.search] = slots.limit(each.user)
    return out


class _Slots:
    """Slots of the searches that run at once."""

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
        """Why a search cannot run, whoever else does; empty where it can."""
        if each.held:
            return "it is held until somebody releases it"
        if each.simulated:
            return ""
        wanted = each.device, each.kind, each.devices
        if wanted not in self._never:
            self._never[wanted] = obstacle(each.device, each.devices, self._workers, kind=each.kind)
        return self._never[wanted] or self._users.used_up(each.user)

    def limit(self, user: int) -> str:
        """What keeps a user from having one more slot; empty where nothing does."""
        share, have = self._users.shares.get(user), self._have[user]
        if share is None or share.running is None or have < share.running:
            return ""
        return f"its user may have {share.running} dry runs at once, and has {have} of their searches running"

    def given_up(self) -> dict[str, str]:
        """The searches that have a slot, cannot run, and have no dry run that would be interrupted."""
        ready = (each for each in self._contenders if each.runs and not each.leased)
        return {each.search: why for each in ready if (why := self.obstacle(each))}

    def order(self) -> Iterator[str]:
        """The searches that can run and have no slot, in the order in which they get one."""
        queues: dict[int, list[Contender]] = defaultdict(list)
        have, charges = self._have.copy(), self._charges.copy()
        for each in sorted(self._contenders, key=lambda one: (one.priority, -one.submitted, one.search)):
            if not each.runs and not self.obstacle(each):
                queues[each.user].append(each)

        def place_of(user: int) -> tuple[float, float, float, float, int]:
            head = queues[user][-1]
            share = self._users.shares.get(user)
            weight = share.weight if share else 1.0
            return -head.priority, charges[user] / weight, have[user] / weight, head.submitted, user

        heap = [place_of(user) for user in queues]
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
                heapq.heappush(heap, place_of(user))


def matches(wanted: str, device: Mapping[str, Any]) -> bool:
    """Whether a device is of the kind that a search wants: any, its type, or a part of its name."""
    named = wanted.casefold()
    return (
        not named or named == str(device.get("type", "")).casefold() or named in str(device.get("name", "")).casefold()
    )


def obstacle(device: str, devices: int, workers: Sequence[Worker], *, kind: str = "") -> str:
    """Why none of these workers can ever run a dry run; empty where one can.

    Args:
        device: kind of device that was asked for; empty for any.
        devices: how many of them it takes.
        workers: who is there.
        kind: the kind of device that its search was placed on; empty where it was not.
    """
    if not workers:
        return "no worker is in the pool"
    alike = [each for each in workers if (each.kind == kind if kind else matches(device, each.device))]
    if not alike:
        named = f"'{kind or device}'{', on which its search began' if kind else ''}"
        return f"no worker has {named}; there are {', '.join(sorted({each.kind for each in workers}))}"
    most = max(each.devices for each in alike)
    if most < devices:
        return f"a dry run takes {devices} devices of one worker, and none has more than {most}"
    return ""


def _placements(waiting: Sequence[Waiting], pool: "_Pool", users: "_Users") -> Iterable[Placement]:
    # The users' heads are in a heap; what a user has taken changes only that user's place in it.
    queues: dict[int, list[Waiting]] = defaultdict(list)
    for each in sorted(waiting, key=lambda one: (one.priority, -one.submitted, -one.dry_run)):
        queues[each.user].append(each)

    def place_of(user: int) -> tuple[float, float, float, int]:
        head = queues[user][-1]
        return -head.priority, users.charge(user), head.submitted, user

    heap = [place_of(user) for user in queues]
    heapq.heapify(heap)
    while heap and pool.any_free:
        user = heapq.heappop(heap)[-1]
        if users.obstacle(user):
            continue
        each = queues[user].pop()
        worker = pool.place(each)
        if worker is not None:
            users.count(user, each)
            yield each.dry_run, worker
        if queues[user]:
            heapq.heappush(heap, place_of(user))


class _Users:
    """What users have, and may have."""

    def __init__(self, shares: Iterable[Share], running: Iterable[Running]) -> None:
        self.shares = {each.user: each for each in shares}
        self.charges = {user: each.recent for user, each in self.shares.items()}
        self.running: dict[int, int] = defaultdict(int)
        for each in running:
            self.count(each.user, each)

    def count(self, user: int, each: Waiting | Running) -> None:
        """Counts a dry run that runs, or will now."""
        self.running[user] += 1
        self.charges[user] = self.charges.get(user, 0.0) + each.devices * (each.seconds or NOMINAL_S)

    def charge(self, user: int) -> float:
        """Device-seconds for a weight of 1."""
        share = self.shares.get(user)
        return self.charges.get(user, 0.0) / (share.weight if share else 1.0)

    def obstacle(self, user: int) -> str:
        """Which quota keeps a user from starting more; empty where none does."""
        share = self.shares.get(user)
        if share is None:
            return ""
        if share.running is not None and self.running[user] >= share.running:
            return f"its user has {self.running[user]} dry runs running, and may have {share.running}"
        return self.used_up(user)

    def used_up(self, user: int) -> str:
        """That a user has no device-hours left; empty where they have some."""
        share = self.shares.get(user)
        if share is not None and share.device_hours is not None and share.used_hours >= share.device_hours:
            return f"its user has used {share.used_hours:.2f} of {share.device_hours:g} device-hours in 30 days"
        return ""


@dataclass
class _Reservation:
    """What a gang waits for on a worker."""

    ready: float
    """When the worker has its devices."""
    spare: int
    """Devices that are free then beside them."""


@dataclass
class _Kind:
    """The workers of one kind of device."""

    device: Mapping[str, Any]
    name: str
    workers: list[Worker] = field(default_factory=list)
    free: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Workers that are not reserved, by how many devices they have free."""
    reserved: dict[str, _Reservation] = field(default_factory=dict)


class _Pool:
    """The workers, what they have free, and what is reserved of it."""

    def __init__(self, workers: Sequence[Worker], running: Sequence[Running], now: float) -> None:
        self.now, self.workers = now, workers
        self.free = {each.id: each.devices for each in workers}
        self.ends: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for each in running:
            if each.worker in self.free:
                self.free[each.worker] -= each.devices
                self.ends[each.worker].append((max(now, each.started + (each.seconds or NOMINAL_S)), each.devices))
        self.kinds: dict[tuple[str, str], _Kind] = {}
        for worker in sorted(workers, key=lambda one: one.id):
            device = worker.device
            key = str(device.get("type", "")), str(device.get("name", ""))
            kind = self.kinds.setdefault(key, _Kind(device=device, name=key[1] or key[0]))
            kind.workers.append(worker)
            if self.free[worker.id] > 0:
                kind.free[self.free[worker.id]].append(worker.id)
        self.unused = sum(max(0, each) for each in self.free.values())
        self._bound: dict[str, _Kind] = {}
        self._wanted: dict[tuple[str, str], list[_Kind]] = {}
        self._words: dict[tuple[str, str, int], tuple[str, str]] = {}

    @property
    def any_free(self) -> bool:
        """Whether any device is free."""
        return self.unused > 0

    def place(self, each: Waiting) -> str | None:
        """The worker that a dry run gets, whose devices are taken from now on; None where it has to wait."""
        kinds = self.suitable(each)
        best: tuple[int, _Kind] | None = None
        for kind in kinds:
            level = min((free for free, ids in kind.free.items() if free >= each.devices and ids), default=None)
            if level is not None and (best is None or level < best[0]):
                best = level, kind
        if best is not None:
            level, kind = best
            worker = kind.free[level].pop()
            if level > each.devices:
                kind.free[level - each.devices].append(worker)
        else:
            found = self._beside_a_gang(each, kinds)
            if found is None:
                if each.devices > 1:
                    self._reserve(each, kinds)
                return None
            worker, kind = found
        self.free[worker] -= each.devices
        self.unused -= each.devices
        self.ends[worker].append((self.now + (each.seconds or NOMINAL_S), each.devices))
        if not each.kind:
            self._bound[each.search] = kind
        return worker

    def suitable(self, each: Waiting) -> list[_Kind]:
        """The kinds of device that a dry run may have: the one that its search was placed on, or that the first of it got."""
        if each.search in self._bound:
            return [self._bound[each.search]]
        wanted = each.device, each.kind
        if wanted not in self._wanted:
            self._wanted[wanted] = [
                kind
                for kind in self.kinds.values()
                if (kind.device.get("name", "") == each.kind if each.kind else matches(each.device, kind.device))
            ]
        return self._wanted[wanted]

    def _beside_a_gang(self, each: Waiting, kinds: list[_Kind]) -> tuple[str, _Kind] | None:
        """A reserved worker on which a dry run delays nobody: it ends before, or the gang leaves so much."""
        for kind in kinds:
            for worker, held in kind.reserved.items():
                if self.free[worker] < each.devices:
                    continue
                if each.seconds is not None and self.now + each.seconds <= held.ready:
                    return worker, kind
                if each.devices <= held.spare:
                    held.spare -= each.devices
                    return worker, kind
        return None

    def _reserve(self, each: Waiting, kinds: list[_Kind]) -> None:
        """Reserves the worker that will first have what a gang needs, where that many are not reserved already."""
        found: tuple[float, int, str, int, _Kind] | None = None
        for kind in kinds:
            if len(kind.reserved) >= max(1, len(kind.workers) // RESERVED):
                continue
            for worker in kind.workers:
                if worker.devices < each.devices or worker.id in kind.reserved:
                    continue
                ready, free = self._ready(worker.id, each.devices)
                candidate = ready, -self.free[worker.id], worker.id, free - each.devices, kind
                if found is None or candidate[:3] < found[:3]:
                    found = candidate
        if found is None:
            return
        ready, _, name, spare, kind = found
        if self.free[name] > 0:
            kind.free[self.free[name]].remove(name)
        kind.reserved[name] = _Reservation(ready=ready, spare=spare)

    def _ready(self, worker: str, devices: int) -> tuple[float, int]:
        """When a worker has so many devices free, by what is known of what it runs, and how many are free then."""
        free, ready = self.free[worker], self.now
        for end, freed in sorted(self.ends[worker]):
            if free >= devices:
                break
            free, ready = free + freed, end
        return ready, free

    def why(self, each: Waiting, users: "_Users") -> str:
        """What a dry run waits for."""
        key = each.device, each.kind, each.devices
        if key not in self._words:
            never = obstacle(each.device, each.devices, self.workers, kind=each.kind)
            self._words[key] = never, self._state(each)
        never, not_now = self._words[key]
        return never or users.obstacle(each.user) or not_now

    def _state(self, each: Waiting) -> str:
        """What a dry run that could run waits for."""
        workers = [worker for kind in self.suitable(each) for worker in kind.workers]
        free = sum(max(0, self.free[worker.id]) for worker in workers)
        devices = sum(worker.devices for worker in workers)
        wants = "a device" if each.devices == 1 else f"{each.devices} devices of one worker"
        return f"waits for {wants}: {free} of {devices} are free, and others go before"
