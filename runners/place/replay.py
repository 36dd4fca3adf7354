"""Adds the time of communication to the recorded steps of emulated ranks.

A rank's step is a sequence of computing intervals, starts of communications, and waits for them. The replay takes the intervals
as they were measured and every communication with its predicted time (its price): it starts when its rank reaches it and the
earlier ones of its group are done, and the rank waits where it waited. Communication that a rank overlaps with computing costs
no time.

Recorded ranks synchronise: a transfer between two stages of a pipeline starts when both have reached it, so the bubble follows
from the actual order of the stages. Ranks that were not recorded behave like a recorded one and arrive with it. If ranks share
the cores of a CPU, those that compute share them evenly.

Source: trace-driven simulation, as in ASTRA-sim (Rashidi et al., ISPASS 2020).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...training.emulation import Message, StepTrace

_Action = tuple[str, float, "Message | None"]
"""`compute` for a number of seconds; `begin` a communication; `wait` for one, `record` an event, or wait for an `event`."""
PriceOf = Callable[["Message"], float]
"""Returns the time of a communication once all its ranks have reached it, s."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A replayed step of all ranks."""

    seconds: float
    """Time until the last rank is done."""
    own_seconds: float
    """Computing time of that rank, alone on its device."""

    @property
    def modelled(self) -> float:
        """The part of `seconds` that is not measured: waits for communication and for other stages."""
        return max(0.0, self.seconds - self.own_seconds)


@dataclass(slots=True)
class _Thread:
    """A stream of a rank. A CPU has one stream."""

    rank: int
    todo: list["_Action"]
    """Remaining actions, the next one last."""
    remaining: float = 0.0
    """Of the current computing interval, s."""


@dataclass(slots=True)
class _Transfer:
    """A communication in progress."""

    remaining: float
    """Time until it ends, s."""
    keys: tuple[object, ...]
    """Items that are done when it ends."""
    channel: object


@dataclass
class _Player:
    price: PriceOf
    cores: float | None
    """Cores that all ranks share; None if each has its own device."""
    copies: float
    """Number of ranks that each recorded one represents."""
    now: float = 0.0
    running: list[_Thread] = field(default_factory=list)
    transfers: list[_Transfer] = field(default_factory=list)
    """Communications in progress, one for each channel."""
    queues: dict[object, deque[_Transfer]] = field(default_factory=dict)
    """By group or pair of ranks: its communications, which run one after another; the first is in progress."""
    over: set[object] = field(default_factory=set)
    """Communications and events that are done."""
    waiting: dict[object, list[_Thread]] = field(default_factory=dict)
    meeting: dict[object, list[tuple[int, int]]] = field(default_factory=dict)
    """Ranks that have reached a communication of several recorded ranks: rank and number."""
    count: dict[object, int] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    """Time at which each rank is done."""

    def play(self, threads: Iterable[_Thread], ranks: frozenset[int]) -> None:
        self.ranks = ranks
        for thread in threads:
            self._advance(thread)
        while self.running or self.transfers:
            busy = len(self.running) * self.copies
            rate = min(1.0, self.cores / busy) if self.cores is not None and busy else 1.0
            active: list[_Thread | _Transfer] = [*self.running, *self.transfers]
            next_done = min(active, key=lambda activity: activity.remaining)
            passed = next_done.remaining
            for activity in active:
                activity.remaining -= passed
            self.now += passed / rate
            if isinstance(next_done, _Thread):
                self.running.remove(next_done)
                self._advance(next_done)
            else:
                self._end(next_done)
        if self.waiting:
            stuck = ", ".join(str(key) for key in list(self.waiting)[:3])
            raise AssertionError(f"recorded ranks wait for what none of them begins: {stuck}")

    def _advance(self, thread: _Thread) -> None:
        """Advances a thread to its next computing interval, its next wait, or its end."""
        while thread.todo:
            kind, value, message = thread.todo.pop()
            if kind == "compute":
                thread.remaining = value
                self.running.append(thread)
                return
            if kind == "begin":
                assert message is not None, "only communications begin"
                self._begin(thread.rank, int(value), message)
            elif kind == "record":
                self._finish((("event", thread.rank, value),))
            else:  # wait for a communication, or for an event of another stream
                key = (kind, thread.rank, value)
                if key not in self.over:
                    self.waiting.setdefault(key, []).append(thread)
                    return
        self.done[thread.rank] = max(self.done.get(thread.rank, 0.0), self.now)

    def _end(self, transfer: _Transfer) -> None:
        """Ends a communication; the next one of its channel begins."""
        self.transfers.remove(transfer)
        queue = self.queues[transfer.channel]
        queue.popleft()
        if queue:
            self.transfers.append(queue[0])
        self._finish(transfer.keys)

    def _finish(self, keys: tuple[object, ...]) -> None:
        self.over.update(keys)
        for key in keys:
            for thread in self.waiting.pop(key, ()):
                self._advance(thread)

    def _begin(self, rank: int, number: int, message: "Message") -> None:
        members = self.ranks.intersection(message.ranks)
        if message.peer is not None:
            pair = (rank, message.peer) if message.kind == "send" else (message.peer, rank)
            channel: object = (message.group, *pair)
            members = self.ranks.intersection(pair)
            # Messages between two ranks are matched in order, separately for each tag.
            meeting: object = (channel, message.tag)
        else:
            channel = meeting = message.group
        occurrence = self.count[rank, meeting] = self.count.get((rank, meeting), 0) + 1
        arrivals = self.meeting.setdefault((meeting, occurrence), [])
        arrivals.append((rank, number))
        if len(arrivals) < len(members):
            return
        del self.meeting[meeting, occurrence]
        # If only one rank of a group is recorded, the group has a separate channel for each recorded rank.
        channel = channel if len(members) > 1 else (channel, rank)
        queue = self.queues.setdefault(channel, deque())
        queue.append(_Transfer(self.price(message), tuple(("wait", *arrival) for arrival in arrivals), channel))
        if len(queue) == 1:
            self.transfers.append(queue[0])


def play(
    steps: Sequence["StepTrace"],
    price: PriceOf,
    *,
    cores: float | None = None,
    world_size: int | None = None,
) -> ReplayedStep:
    """Replays the step of all ranks from one recorded step of each of some of them.

    Args:
        steps: of different ranks: all stages of a pipeline, or one rank without a pipeline.
        price: of each communication.
        cores: cores that all ranks share, as on a CPU; None if each has its own device.
        world_size: of the training; by default the number of recorded ranks.
    """
    ranks = frozenset(step.rank for step in steps)
    player = _Player(price, cores, (world_size or len(steps)) / len(steps))
    threads = [thread for step in steps for thread in _threads(step)]
    player.play(threads, ranks)
    last = max(steps, key=lambda step: player.done[step.rank])
    return ReplayedStep(player.done[last.rank], last.own_seconds)


def _threads(step: "StepTrace") -> list[_Thread]:
    """Actions of each stream of a step, in order."""
    from ...training.emulation import Act

    todo: dict[int, list[_Action]] = {step.stream: []}
    computed_until: dict[int, float] = {}
    kinds = {Act.WAIT: "wait", Act.RECORD: "record", Act.AWAIT: "event"}
    started: set[tuple[str, int]] = set()
    for entry in step.entries:
        stream = todo.setdefault(entry.stream, [])
        computed = entry.at - computed_until.get(entry.stream, 0.0)
        if computed > 0:
            stream.append(("compute", computed, None))
        computed_until[entry.stream] = entry.left
        if entry.act is Act.BEGIN:
            started.add(("wait", entry.number))
            stream.append(("begin", entry.number, entry.message))
            continue
        kind = kinds[entry.act]
        if kind == "record":
            started.add(("event", entry.number))
        # Communications of earlier steps are done.
        if kind == "record" or (kind, entry.number) in started:
            stream.append((kind, entry.number, None))
    remaining = step.seconds - computed_until.get(step.stream, 0.0)
    if remaining > 0:
        todo[step.stream].append(("compute", remaining, None))
    return [_Thread(step.rank, actions[::-1]) for actions in todo.values()]
