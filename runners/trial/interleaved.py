"""Interleaved timing: several programs of one job stay in memory and run in short turns, under the same load of the
machine.

The speed of a shared machine varies within seconds and over minutes. Measurements one after the other differ by that;
measurements that alternate every half second do not.

Each rank forks a process for each program. On rank 0 the programs receive their turns; the other ranks follow through
the collective that begins every turn.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from ...base.forked import die_with_parent
from ...results import Status
from . import failure
from .job import Job, RankOutcome
from .load import CHANGED_CORES, Watch, family_s, foreign_cores

YOURS, ENOUGH = "yours", "enough"
"""Messages to a program: it has the next turn, or all turns are over."""
FEWEST_TURNS = 2
"""Smallest number of turns of each program, regardless of time."""

RunProgram = Callable[[int, Job, Connection, "Turn"], None]
"""Runs a program's job in the process forked for it, given the program's number; never returns."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A program's end of the channel that gives it turns."""

    seconds: float
    channel: Connection | None = None
    """To the process that gives turns; None on ranks other than 0, which follow."""

    def wait(self) -> bool:
        """Waits for this program's turn. Returns False when all turns are over. Returns at once on ranks that follow."""
        return self.channel is None or self.channel.recv() == YOURS

    def done(self) -> None:
        """Ends the turn. The first call reports that the program is built and warm."""
        if self.channel is not None:
            self.channel.send(None)


class _Program:
    """The process of a program, which it forks, and the parent's ends of its channels."""

    def __init__(self, number: int, job: Job, rank: int, limit_s: float | None, run: RunProgram) -> None:
        self.reports, sender = Pipe(duplex=False)
        self._channel, child_end = Pipe()
        self._rank, self._limit_s = rank, limit_s
        self.outcome: RankOutcome | None = None
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            die_with_parent(parent)
            turn = Turn(job.turn_s, child_end if rank == 0 else None)
            turn.wait()  # the first turn is for building: programs build one after the other
            run(number, job, sender, turn)
        sender.close()
        child_end.close()
        self._pidfd = os.pidfd_open(self._pid)

    def give(self, message: str, forward: Callable[[tuple[str, object]], None]) -> None:
        """Sends `YOURS` or `ENOUGH` to the program and waits until its turn is done, or with `ENOUGH` until it has ended.
        Kills it if that takes longer than a trial may. Its compilations are passed to `forward`.
        """
        with suppress(OSError):  # the program's end is detected below
            self._channel.send(message)
        events = [self.reports, self._pidfd, *([self._channel] if message == YOURS else ())]
        end = None if self._limit_s is None else time.monotonic() + self._limit_s
        while self.outcome is None:
            ready = wait(events, None if end is None else max(0.0, end - time.monotonic()))
            if not ready:
                os.kill(self._pid, signal.SIGKILL)  # its exit is not waited for: the supervisor kills what is left
                reason = f"its turn took more than {self._limit_s:g} s"
                self.outcome = RankOutcome(rank=self._rank, status=Status.TIMEOUT, reason=reason)
            elif self.reports in ready and self._receive(forward):
                continue
            elif self._channel in ready:
                with suppress(EOFError, OSError):
                    self._channel.recv()
                    return
                events.remove(self._channel)
            elif self._pidfd in ready:
                _, wait_status = os.waitpid(self._pid, 0)
                status, reason = failure.from_exit(os.waitstatus_to_exitcode(wait_status))
                self.outcome = RankOutcome(rank=self._rank, status=status, reason=reason)

    def _receive(self, forward: Callable[[tuple[str, object]], None]) -> bool:
        try:
            kind, value = self.reports.recv()
        except (EOFError, OSError):
            return False
        if kind == "outcome":
            self.outcome = value
        elif kind == "compiling":
            forward((kind, value))
        return True


def run_interleaved(job: Job, rank: int, reports: Connection, run: RunProgram) -> RankOutcome:
    """Runs all programs of a job as one of its ranks. The report is a tuple of their `RankOutcome`.

    Args:
        job: with programs in `beside`.
        rank: global rank.
        reports: to the supervisor; gets phases and compilations.
        run: see `RunProgram`.
    """
    pickles = (job.program, *job.beside)
    # Ranks that follow wait for one program after the other, each from its build to its last turn.
    share = len(pickles) if rank == 0 else 1
    limit_s = None if job.timeout_s is None else (job.timeout_s + job.compile_timeout_s) / share
    programs = [
        _Program(number, replace(job, program=program, beside=()), rank, limit_s, run)
        for number, program in enumerate(pickles)
    ]
    if rank == 0:
        reports.send(("phase", "build"))
        for program in programs:
            program.give(YOURS, reports.send)
        reports.send(("phase", "turns"))
        _give_turns(job, programs, reports)
    for program in programs:
        program.give(ENOUGH, reports.send)
    return RankOutcome(rank=rank, status=Status.OK, report=tuple(program.outcome for program in programs))


def _give_turns(job: Job, programs: list[_Program], reports: Connection) -> None:
    """Gives turns until each program has had `job.turns` without other load on the machine, or the time is over."""
    supervisor = os.getppid()
    watch = Watch(lambda: family_s(supervisor))
    begin, number, calm = time.monotonic(), 0, 0
    while number < FEWEST_TURNS or calm < job.turns:
        allowed_s = job.turns_s + (job.patience_s if calm < number else 0.0)
        alive = [program for program in programs if program.outcome is None]
        if not alive or (number >= FEWEST_TURNS and time.monotonic() > begin + allowed_s):
            break
        watch.restart()
        # The order rotates, so that a program does not always follow the same one.
        start = number % len(alive)
        for program in [*alive[start:], *alive[:start]]:
            program.give(YOURS, reports.send)
        number += 1
        calm += (foreign_cores([watch.load()]) or 0.0) < CHANGED_CORES
