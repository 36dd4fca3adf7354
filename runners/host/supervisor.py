"""The process that supervises one trial on one host: starts its ranks, determines the outcome, and cleans up."""

import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import InitVar, dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from ...results import Status
from ..trial import failure
from ..trial.job import Begun, Compiling, Job, Outcome, RankOutcome
from ..trial.memory import SAMPLE_S, Shortage, wait_for_room
from ..trial.rank import DUMP_STACKS, run_rank
from .log import LogFile
from .process import (
    Deadline,
    adopt_orphans,
    builds_released,
    die_with_parent,
    family,
    kill_descendants,
    offer_to_oom_killer,
)
from .protocol import CANCEL, Received

GRACE_S = 0.2
"""Time after the first failure for other ranks to report theirs, so that the cause can be distinguished from its
consequences, s."""
STOPPED = "ended with the ranks of another host"
LAST_BYTES = 1 << 17
"""Bytes at the end of a rank's output that are searched for the cause of its end."""
STACKS_S = 0.5
"""Time after a deadline for the ranks to print their stacks, s."""


@dataclass
class _Rank:
    number: int
    pid: int
    pidfd: int
    reports: Connection
    output: int
    phase: str = "start"
    compiling: bool = False
    peak_mib: float | None = None
    """Last peak reported for its child processes."""
    outcome: RankOutcome | None = None
    returncode: int | None = None
    open_output: bool = True
    last_words: bytes = b""
    """The end of its output, up to `LAST_BYTES`."""


@dataclass
class Supervisor:
    """Runs one job, in a process forked from the agent."""

    job: Job
    call: Received
    """From the client. If its channel closes, the trial is abandoned."""
    folder: str | None = None
    """Parent of the folder for the rendezvous of ranks; None for the system's temporary directory."""
    shortage: InitVar[Shortage | None] = None
    """Samples the host's memory; by default created for the job."""
    _ranks: list[_Rank] = field(default_factory=list)
    _stopped: bool = False

    def __post_init__(self, shortage: Shortage | None) -> None:
        job = self.job
        self._deadline = Deadline(time.monotonic(), job.timeout_s, job.compile_timeout_s)
        self._shortage = shortage or Shortage(job.memory_limit_mib if job.device_type == "cpu" else None)

    def run(self) -> Outcome | None:
        """Returns the job's outcome; None if the client closed the connection. All processes it started have ended."""
        adopt_orphans()
        self.call.note(Begun(os.getpid()))
        folder = tempfile.mkdtemp(prefix="rendezvous-", dir=self.folder)
        try:
            with LogFile(self.job.log, continues=self.job.log_continues) as log:
                try:
                    self._wait_for_gpus(log)
                    self._start(folder)
                    return self._watch(log)
                finally:
                    self._end(log)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _wait_for_gpus(self, log: LogFile) -> None:
        """Waits until the GPUs' memory is free. The trial's time begins after that."""
        if not self.job.on_gpus:
            return

        def notify(message: str) -> None:
            log.write(f"redline: {message}\n".encode())

        used_mib = wait_for_room(self.job.device_ids, self.folder, notify, cancelled=self.call.channel.poll)
        self.job = replace(self.job, used_mib=used_mib)
        self._deadline = Deadline(time.monotonic(), self.job.timeout_s, self.job.compile_timeout_s)

    def _start(self, folder: str) -> None:
        rendezvous = self.job.rendezvous
        if rendezvous.port:
            host = f"[{rendezvous.host}]" if ":" in rendezvous.host else rendezvous.host
            init_method = f"tcp://{host}:{rendezvous.port}"
        else:
            init_method = f"file://{folder}/store"
        for local_rank in range(self.job.ranks):
            receiver, sender = Pipe(duplex=False)
            output, stdout = os.pipe()
            sys.stdout.flush()
            sys.stderr.flush()
            supervisor_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                die_with_parent(supervisor_pid)
                offer_to_oom_killer()
                os.dup2(stdout, 1)
                os.dup2(stdout, 2)
                # Descriptors of the supervisor: a copy in this rank would hide that the other end was closed.
                for fd in (stdout, output, receiver.fileno(), self.call.channel.fileno()):
                    os.close(fd)
                for earlier in self._ranks:
                    os.close(earlier.output)
                    earlier.reports.close()
                    os.close(earlier.pidfd)
                # The agent has not initialised CUDA, so that the variable still has an effect in its fork.
                if self.job.device_ids:
                    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.job.device_ids)
                if rendezvous.interface:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", rendezvous.interface)
                    # NCCL treats a name without = as a prefix.
                    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={rendezvous.interface}")
                run_rank(self.job, local_rank, init_method, sender)
            os.close(stdout)
            sender.close()
            os.set_blocking(output, False)
            self._ranks.append(_Rank(rendezvous.first_rank + local_rank, pid, os.pidfd_open(pid), receiver, output))

    def _watch(self, log: LogFile) -> Outcome | None:
        sample_at = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self.call.channel, selectors.EVENT_READ, ("client", None))
            for rank in self._ranks:
                selector.register(rank.reports, selectors.EVENT_READ, ("reports", rank))
                selector.register(rank.output, selectors.EVENT_READ, ("output", rank))
                selector.register(rank.pidfd, selectors.EVENT_READ, ("exit", rank))
            while True:
                now = time.monotonic()
                if all(rank.outcome and rank.outcome.status is Status.OK for rank in self._ranks):
                    return self._outcome()
                if any(rank.outcome and rank.outcome.status is not Status.OK for rank in self._ranks):
                    self._gather(selector, log, now + GRACE_S)
                    return self._outcome()
                if self._stopped:
                    return Outcome(status=Status.CRASH, reason=STOPPED, ranks=self._as_stopped(), secondary=True)
                if now >= self._deadline.at:
                    return self._timeout(selector, log)
                if now >= sample_at:
                    self._shortage.look([rank.pid for rank in self._ranks if rank.returncode is None])
                    sample_at = now + SAMPLE_S
                if not self._handle_events(selector, log, min(sample_at, self._deadline.at)):
                    return None

    def _gather(self, selector: selectors.BaseSelector, log: LogFile, end: float) -> None:
        """Waits for the outcomes of the other ranks after a failure, until `end`."""
        while time.monotonic() < end and not all(rank.outcome for rank in self._ranks):
            if not self._handle_events(selector, log, end):
                return

    def _handle_events(self, selector: selectors.BaseSelector, log: LogFile, until: float) -> bool:
        """Handles the next events, waiting for them until `until`. Returns False if the client closed the connection."""
        for key, _ in selector.select(max(0.0, until - time.monotonic())):
            kind, rank = key.data
            if kind == "client":
                if not self._stop_requested():
                    return False
                self._stopped = True
            if kind == "output" and not self._drain(rank, log):
                selector.unregister(rank.output)
            elif kind == "reports" and not self._receive(rank):
                selector.unregister(rank.reports)
            elif kind == "exit":
                selector.unregister(rank.pidfd)
                self._exited(rank, log)
        return True

    def _stop_requested(self) -> bool:
        """True if the client wants an early outcome, False if it closed the connection."""
        try:
            return self.call.channel.receive()[0] == CANCEL
        except EOFError:
            return False

    def _receive(self, rank: _Rank) -> bool:
        try:
            kind, value = rank.reports.recv()
        except (EOFError, OSError):
            return False
        if kind == "phase":
            rank.phase = value
        elif kind == "peak":
            rank.peak_mib = value
        elif kind == "compiling":
            rank.compiling = value
            compiling = any(member.compiling for member in self._ranks)
            if self._deadline.compiling(compiling, time.monotonic()):
                self.call.note(Compiling(compiling))
        elif rank.outcome is None:
            rank.outcome = value
        return True

    def _exited(self, rank: _Rank, log: LogFile) -> None:
        _, status, usage = os.wait4(rank.pid, 0)
        rank.returncode = os.waitstatus_to_exitcode(status)
        # Reports that it sent before its end may not have been read yet.
        while rank.outcome is None and rank.reports.poll(0) and self._receive(rank):
            continue
        if rank.outcome is None:
            if rank.open_output:
                self._drain(rank, log)
            evidence = self._shortage.evidence(rank.pid, usage.ru_maxrss / 1024)
            last_words = rank.last_words.decode(errors="replace")
            kind, reason = failure.from_exit(rank.returncode, last_words[-4096:], evidence)
            # NCCL's watchdog aborts a rank whose peers have ended; the stacks of all threads follow its message.
            aborted = rank.returncode == -signal.SIGABRT and kind is Status.CRASH
            rank.outcome = RankOutcome(
                rank=rank.number,
                status=kind,
                reason=f"{reason} (during {rank.phase})",
                secondary=aborted and failure.says_peer_lost(last_words),
            )

    def _drain(self, rank: _Rank, log: LogFile) -> bool:
        """Copies the output of a rank, a limited amount at a time. Returns False at the end of the output."""
        label = rank.number if self.job.rendezvous.world_size > 1 else None
        for _ in range(64):  # a rank that prints without end must not delay the events of others
            try:
                data = os.read(rank.output, 65536)
            except BlockingIOError:
                return True
            if not data:
                rank.open_output = False
                return False
            log.write(data, rank=label)
            rank.last_words = (rank.last_words + data)[-LAST_BYTES:]
        return True

    def _timeout(self, selector: selectors.BaseSelector, log: LogFile) -> Outcome:
        """Makes the ranks without an outcome print their stacks, and returns the outcome of an exceeded deadline."""
        several = self.job.rendezvous.world_size > 1
        message = self._deadline.reason
        alive = [rank for rank in self._ranks if rank.outcome is None]
        # If a compilation took too long, only the compiling ranks are late.
        late = [rank for rank in alive if rank.compiling == self._deadline.in_compilation] or alive
        for rank in alive:
            log.write(
                f"\nredline: {message} (during {rank.phase}); stacks follow\n".encode(),
                rank=rank.number if several else None,
            )
            os.kill(rank.pid, DUMP_STACKS)
        phases = sorted({rank.phase for rank in late})
        ranks = f" on rank {', '.join(str(rank.number) for rank in late)}" if several else ""
        end = time.monotonic() + STACKS_S
        while time.monotonic() < end and self._handle_events(selector, log, end):
            continue
        reason = f"{message} (during {', '.join(phases)}{ranks})"
        return Outcome(status=Status.TIMEOUT, reason=reason, ranks=self._reported())

    def _outcome(self) -> Outcome:
        return Outcome.of(self._reported(), several=self.job.rendezvous.world_size > 1)

    def _reported(self) -> tuple[RankOutcome, ...]:
        return tuple(rank.outcome for rank in self._ranks if rank.outcome is not None)

    def _as_stopped(self) -> tuple[RankOutcome, ...]:
        """Returns the outcomes of ranks that ended on their own, and of those that reported their memory."""
        stopped = (
            RankOutcome(
                rank=rank.number, status=Status.CRASH, reason=STOPPED, peak_memory_mib=rank.peak_mib, secondary=True
            )
            for rank in self._ranks
            if rank.outcome is None and rank.peak_mib is not None
        )
        return (*self._reported(), *stopped)

    def _end(self, log: LogFile) -> None:
        # Ranks first, then everything that they and this process started: descendants are found as orphans.
        killed = [rank.pid for rank in self._ranks if rank.returncode is None and rank.outcome is None]
        with builds_released(family(os.getpid()) if killed else ()):
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            kill_descendants(self.job.teardown_s)
        for rank in self._ranks:
            while rank.open_output and self._drain(rank, log) and self._more(rank):
                continue

    @staticmethod
    def _more(rank: _Rank) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(rank.output, selectors.EVENT_READ)
            return bool(selector.select(0))
