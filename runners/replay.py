"""Puts the time of communication back into the recorded steps of emulated ranks.

A rank's step is a sequence of stretches in which it computes, of communications that it begins, and of waits for them. Playing
it anew takes the stretches as they were measured and gives every communication its price: it starts when its rank comes to it
and the group's earlier ones are over, and the rank waits where it waited. So what a rank hides behind its computing stays hidden.

Ranks that were recorded meet: a transfer between two stages of a pipeline starts when both are there, so that the bubble follows
from the order that the stages really play. Ranks that were not recorded are taken for equal to a recorded one, and arrive with
it. Where ranks share the cores of a CPU, as many as compute at a moment share them evenly.

Source: trace-driven simulation, as in ASTRA-sim (Rashidi et al., ISPASS 2020).
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..training.emulation import Message, StepTrace

_Action = tuple[str, float, "Message | None"]
"""`compute` for so many seconds; `begin` a communication; `wait` for one, `record` an event, or wait for an `event`."""
Price = Callable[["Message"], float]
"""Seconds that a communication takes once all its ranks are there."""


@dataclass(frozen=True, slots=True)
class Played:
    """A step of all ranks, played."""

    seconds: float
    """Until the last rank is done."""
    own_seconds: float
    """Time in which that rank computes, alone on its device."""

    @property
    def modelled(self) -> float:
        """The part of `seconds` that is no measurement: waits for communication and for other stages."""
        return max(0.0, self.seconds - self.own_seconds)


@dataclass(slots=True)
class _Thread:
    """A stream of a rank; a CPU has one."""

    rank: int
    todo: list["_Action"]
    """What is left, the next last."""
    left: float = 0.0
    """Seconds of computing left in the present stretch."""


@dataclass
class _Player:
    price: Price
    cores: float | None
    """That all ranks share; None where each has a device of its own."""
    copies: float
    """How many ranks each recorded one stands for."""
    now: float = 0.0
    running: list[_Thread] = field(default_factory=list)
    ending: list[tuple[float, int, tuple[object, ...]]] = field(default_factory=list)
    """Communications under way: when each ends, and what ends then."""
    over: set[object] = field(default_factory=set)
    """What may be waited for and is over."""
    waiting: dict[object, list[_Thread]] = field(default_factory=dict)
    meeting: dict[object, list[tuple[int, int]]] = field(default_factory=dict)
    """Who has come to a communication of several recorded ranks: rank and number."""
    count: dict[object, int] = field(default_factory=dict)
    free: dict[object, float] = field(default_factory=dict)
    """When the channel of a group or of a pair of ranks is free."""
    done: dict[int, float] = field(default_factory=dict)
    """When each rank is done."""
    order: int = 0

    def play(self, threads: Iterable[_Thread], ranks: frozenset[int]) -> None:
        self.ranks = ranks
        for each in threads:
            self._go_on(each)
        while self.running or self.ending:
            active = len(self.running) * self.copies
            rate = min(1.0, self.cores / active) if self.cores is not None and active else 1.0
            first = min(self.running, key=lambda each: each.left, default=None)
            computed = self.now + first.left / rate if first is not None else float("inf")
            over = self.ending[0][0] if self.ending else float("inf")
            until = min(computed, over)
            for each in self.running:
                each.left -= (until - self.now) * rate
            self.now = until
            if first is not None and computed <= over:
                self.running.remove(first)
                self._go_on(first)
            else:
                _, _, keys = heapq.heappop(self.ending)
                self._finish(keys)
        if self.waiting:
            stuck = ", ".join(str(key) for key in list(self.waiting)[:3])
            raise AssertionError(f"recorded ranks wait for what none of them begins: {stuck}")

    def _go_on(self, thread: _Thread) -> None:
        """Follows a thread to its next stretch of computing, its next wait, or its end."""
        while thread.todo:
            what, value, message = thread.todo.pop()
            if what == "compute":
                thread.left = value
                self.running.append(thread)
                return
            if what == "begin":
                assert message is not None, "what begins is a message"
                self._begin(thread.rank, int(value), message)
            elif what == "record":
                self._finish((("event", thread.rank, value),))
            else:  # wait for a communication, or for an event of another stream
                key = (what, thread.rank, value)
                if key not in self.over:
                    self.waiting.setdefault(key, []).append(thread)
                    return
        self.done[thread.rank] = max(self.done.get(thread.rank, 0.0), self.now)

    def _finish(self, keys: tuple[object, ...]) -> None:
        self.over.update(keys)
        for key in keys:
            for thread in self.waiting.pop(key, ()):
                self._go_on(thread)

    def _begin(self, rank: int, number: int, message: "Message") -> None:
        members = self.ranks.intersection(message.ranks)
        if message.peer is not None:
            ends = (rank, message.peer) if message.kind == "send" else (message.peer, rank)
            channel: object = (message.group, *ends)
            members = self.ranks.intersection(ends)
            # Messages between two ranks meet in their order, those of each tag by themselves.
            meeting: object = (channel, message.tag)
        else:
            channel = meeting = message.group
        turn = self.count[rank, meeting] = self.count.get((rank, meeting), 0) + 1
        there = self.meeting.setdefault((meeting, turn), [])
        there.append((rank, number))
        if len(there) < len(members):
            return
        del self.meeting[meeting, turn]
        # A group of ranks that are not recorded together has a channel of its own for each recorded rank.
        channel = channel if len(members) > 1 else (channel, rank)
        ends_at = max(self.now, self.free.get(channel, 0.0)) + self.price(message)
        self.free[channel] = ends_at
        self.order += 1
        heapq.heappush(self.ending, (ends_at, self.order, tuple(("wait", *each) for each in there)))


def play(
    steps: Sequence["StepTrace"],
    price: Price,
    *,
    cores: float | None = None,
    world_size: int | None = None,
    slower: float = 1.0,
) -> Played:
    """The step of all ranks together, from one recorded step of each of some of them.

    Args:
        steps: of different ranks: all stages of a pipeline, or one rank where there is none.
        price: of each communication.
        cores: that all ranks share, as on a CPU; None where each has a device of its own.
        world_size: of the training; by default there are no other ranks than these.
        slower: what a rank computes takes so many times as long among the others as alone.
    """
    ranks = frozenset(each.rank for each in steps)
    player = _Player(price, cores, (world_size or len(steps)) / len(steps))
    threads = [thread for each in steps for thread in _threads(each, slower)]
    player.play(threads, ranks)
    last = max(steps, key=lambda each: player.done[each.rank])
    return Played(player.done[last.rank], last.own_seconds)


def _threads(step: "StepTrace", slower: float) -> list[_Thread]:
    """A step as what each of its streams does, in order."""
    from ..training.emulation import Act

    todo: dict[int, list[_Action]] = {step.stream: []}
    reached: dict[int, float] = {}
    words = {Act.WAIT: "wait", Act.RECORD: "record", Act.AWAIT: "event"}
    begun: set[tuple[str, int]] = set()
    for entry in step.entries:
        stream = todo.setdefault(entry.stream, [])
        stretch = entry.at - reached.get(entry.stream, 0.0)
        if stretch > 0:
            stream.append(("compute", stretch * slower, None))
        reached[entry.stream] = entry.left
        if entry.act is Act.BEGIN:
            begun.add(("wait", entry.number))
            stream.append(("begin", entry.number, entry.message))
            continue
        what = words[entry.act]
        if what == "record":
            begun.add(("event", entry.number))
        # What was begun in an earlier step is over.
        if what == "record" or (what, entry.number) in begun:
            stream.append((what, entry.number, None))
    rest = step.seconds - reached.get(step.stream, 0.0)
    if rest > 0:
        todo[step.stream].append(("compute", rest * slower, None))
    return [_Thread(step.rank, actions[::-1]) for actions in todo.values()]
