"""Several programs of one job that stay in memory and take short turns, so that all see the same weather.

A machine whose speed others share is now fast and now slow, for parts of a second and for minutes. What is measured one
after the other differs by that; what alternates every half second does not.

On every rank a process is forked for each program. On rank 0 they are told whose turn it is; the other ranks follow by
the collective that every turn begins with.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from ..results import Status
from . import failure
from .job import Job, RankOutcome
from .load import CHANGED_CORES, Watch, family_s, foreign_cores
from .process import die_with_parent

YOURS, ENOUGH = "yours", "enough"
FEWEST_TURNS = 2
"""Turns of each program, however long they take."""

HostWorker = Callable[[int, Job, Connection, "Turn"], None]
"""Runs a program's job in the process forked for it, given the program's number; never returns."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A program's side: when it may run."""

    seconds: float
    """How long a turn is, s."""
    channel: Connection | None = None
    """To who gives the turns; None on ranks that follow."""

    def wait(self) -> bool:
        """Blocks until it is this program's turn; False when all turns are over. Ranks that follow return at once."""
        return self.channel is None or self.channel.recv() == YOURS

    def done(self) -> None:
        """The turn is over; the first one when all is built and warm."""
        if self.channel is not None:
            self.channel.send(None)


class _Program:
    """A program's process, seen by who gives the turns."""

    def __init__(self, number: int, job: Job, rank: int, limit_s: float | None, run: HostWorker) -> None:
        self.reports, sender = Pipe(duplex=False)
        self._channel, its = Pipe()
        self._rank, self._limit_s = rank, limit_s
        self.outcome: RankOutcome | None = None
        me = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            die_with_parent(me)
            turn = Turn(job.turn_s, its if rank == 0 else None)
            turn.wait()
            run(number, job, sender, turn)
        sender.close()
        its.close()
        self._pidfd = os.pidfd_open(self._pid)

    def give(self, word: str, tell: Callable[[tuple[str, object]], None]) -> None:
        """Says a word to it, and returns when it has done its turn, or has ended; no turn comes of `ENOUGH`. It is killed
        where that takes longer than a trial may."""
        with suppress(OSError):  # that it has ended shows below
            self._channel.send(word)
        ends = [self.reports, self._pidfd, *([self._channel] if word == YOURS else ())]
        end = None if self._limit_s is None else time.monotonic() + self._limit_s
        while self.outcome is None:
            ready = wait(ends, None if end is None else max(0.0, end - time.monotonic()))
            if not ready:
                os.kill(self._pid, signal.SIGKILL)
                why = f"took more than {self._limit_s:g} s in its turn"
                self.outcome = RankOutcome(rank=self._rank, status=Status.TIMEOUT, reason=why)
            elif self.reports in ready and self._heard(tell):
                continue
            elif self._channel in ready:
                with suppress(EOFError, OSError):
                    self._channel.recv()
                    return
                ends.remove(self._channel)
            elif self._pidfd in ready:
                _, status = os.waitpid(self._pid, 0)
                how, why = failure.from_exit(os.waitstatus_to_exitcode(status))
                self.outcome = RankOutcome(rank=self._rank, status=how, reason=why)

    def _heard(self, tell: Callable[[tuple[str, object]], None]) -> bool:
        try:
            kind, value = self.reports.recv()
        except (EOFError, OSError):
            return False
        if kind == "outcome":
            self.outcome = value
        elif kind == "compiling":
            tell((kind, value))
        return True


def run_interleaved(job: Job, rank: int, reports: Connection, run: HostWorker) -> RankOutcome:
    """Runs all programs of a job as one of its ranks; the report is a tuple of their `RankOutcome`.

    Args:
        job: with programs beside the first.
        rank: global rank.
        reports: to the supervisor, which hears what is done and when any of them compiles.
        run: see `HostWorker`.
    """
    programs = (job.program, *job.beside)
    # Ranks that follow wait for a program from its building to its last turn.
    share = len(programs) if rank == 0 else 1
    limit_s = None if job.timeout_s is None else (job.timeout_s + job.compile_timeout_s) / share
    every = [
        _Program(number, replace(job, program=program, beside=()), rank, limit_s, run)
        for number, program in enumerate(programs)
    ]
    if rank == 0:
        reports.send(("phase", "build"))
        for each in every:
            each.give(YOURS, reports.send)
        reports.send(("phase", "turns"))
        _give_turns(job, every, reports)
    for each in every:
        each.give(ENOUGH, reports.send)
    return RankOutcome(rank=rank, status=Status.OK, report=tuple(each.outcome for each in every))


def _give_turns(job: Job, every: list[_Program], reports: Connection) -> None:
    """Gives turns until each program has had enough of them while the machine was theirs, or the time is up."""
    supervisor = os.getppid()
    watch = Watch(lambda: family_s(supervisor))
    begin, number, calm = time.monotonic(), 0, 0
    while number < FEWEST_TURNS or calm < job.turns:
        allowed_s = job.turns_s + (job.patience_s if calm < number else 0.0)
        alive = [each for each in every if each.outcome is None]
        if not alive or (number >= FEWEST_TURNS and time.monotonic() > begin + allowed_s):
            break
        watch.restart()
        # Another one goes first each time, so that no one's turn comes always after the same.
        start = number % len(alive)
        for each in [*alive[start:], *alive[:start]]:
            each.give(YOURS, reports.send)
        number += 1
        calm += (foreign_cores([watch.load()]) or 0.0) < CHANGED_CORES
