"""A rank's process after the fork: set up, run the program, report the outcome."""

import faulthandler
import os
import random
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

from ...base.device import usable_cores
from ...base.host_memory import MIB, shared_memory
from ...results import Status
from . import failure
from .compiling import share_compile_threads, sweep_compiled
from .job import Job, RankOutcome
from .memory import CudaMemoryMeter, HostMemoryMeter, MemoryMeter

DUMP_STACKS = signal.SIGUSR1
"""Signal that makes a rank print the stack of every thread to its log."""


@dataclass
class RankContext:
    """A program's information about its rank."""

    rank: int
    """Global rank."""
    local_rank: int
    """Rank on this host."""
    world_size: int
    """Ranks over all hosts."""
    device_type: str
    """`cpu` or `cuda`."""
    init_method: str
    """URL of the rendezvous of torch.distributed."""
    memory_limit_mib: float | None
    memory: MemoryMeter
    reports: Connection | None = None
    """To the supervisor; None without one."""
    local_world_size: int = 1
    """Ranks on this host."""
    collective_timeout_s: float | None = None
    """How long this rank may wait for others in a collective, s; None for torch's default."""
    phase_name: str = "start"
    used_mib: float = 0.0
    """Memory that other processes used on its device before it started, MiB."""

    def outside_mib(self) -> float | None:
        """Device memory of this rank outside the allocator (context, libraries, NCCL), MiB; None on a CPU."""
        outside = self.memory.outside_mib()
        return None if outside is None else max(0.0, outside - self.used_mib)

    def phase(self, name: str) -> None:
        """Reports the next phase to the supervisor, so that a failure can state when it happened."""
        self.phase_name = name
        self._report("phase", name)

    def peak(self, mib: float) -> None:
        """Reports the peak memory of this rank's child processes to the supervisor, which uses it if the rank is
        stopped.
        """
        self._report("peak", mib)

    def compiling(self, yes: bool) -> None:
        """Reports to the supervisor that this rank begins to compile, or to wait for one that may, or that this ends."""
        self._report("compiling", yes)

    def _report(self, kind: str, value: object) -> None:
        if self.reports is not None:
            self.reports.send((kind, value))


def run_rank(job: Job, local_rank: int, init_method: str, reports: Connection) -> None:
    """Runs the job's program as one of its ranks and ends the process. Never returns."""
    code = 1
    # Ends by `os._exit` in any case: the frames that called this belong to the process that was forked.
    try:
        faulthandler.enable(file=sys.stderr, all_threads=True)
        faulthandler.register(DUMP_STACKS, file=sys.stderr, all_threads=True, chain=False)
        outcome = _run(job, local_rank, init_method, reports)
        reports.send(("outcome", outcome))
        code = 0
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _run(job: Job, local_rank: int, init_method: str, reports: Connection) -> RankOutcome:
    rank = job.rendezvous.first_rank + local_rank
    meter: MemoryMeter = HostMemoryMeter()
    context = None
    try:
        random.seed(0)  # a fork has the state of its parent's generator
        # A callable may not need torch, whose import can take longer than a trial.
        if job.device_type == "cuda" or "torch" in sys.modules:
            meter = _prepare_torch(job, local_rank) or meter
        if job.memory_limit_mib is not None:
            meter.limit(job.memory_limit_mib)
        context = RankContext(
            rank=rank,
            local_rank=local_rank,
            world_size=job.rendezvous.world_size,
            device_type=job.device_type,
            init_method=init_method,
            memory_limit_mib=job.memory_limit_mib,
            memory=meter,
            reports=reports,
            local_world_size=job.ranks,
            collective_timeout_s=job.collective_timeout_s,
            used_mib=job.used_mib,
        )
        import cloudpickle

        program = cloudpickle.loads(job.program)
        report = program(context)
        return RankOutcome(rank=rank, status=Status.OK, report=report, peak_memory_mib=meter.peak_mib())
    except (Exception, SystemExit) as error:  # any failure of a candidate is its outcome
        return _failed(rank, job, meter, context, error)


def _prepare_torch(job: Job, local_rank: int) -> CudaMemoryMeter | None:
    """Sets threads, seeds and the current device. Returns the meter of this rank's CUDA devices; None on a CPU."""
    import torch

    ranks = job.ranks * job.at_once
    share_compile_threads(ranks)
    sweep_compiled()
    if job.threads:
        torch.set_num_threads(job.threads)
    elif job.device_type == "cuda":
        # Threads update offloaded states. Ray and launchers set OMP_NUM_THREADS=1; torch alone would use all cores in each rank.
        torch.set_num_threads(max(1, usable_cores() // ranks))
    torch.manual_seed(0)
    if job.device_type == "cuda":
        torch.cuda.set_device(local_rank)
        # A callable is one process for all its devices.
        devices = max(1, len(job.device_ids) // job.ranks)
        return CudaMemoryMeter([torch.device("cuda", local_rank * devices + number) for number in range(devices)])
    # Starts the threads that compute, and those of backward passes in CUDA builds (8 without a GPU), before the limit counts:
    # their stacks belong to the framework.
    ones = torch.ones(256, 256, requires_grad=True)
    torch.mm(ones, ones).sum().backward()
    return None


def _failed(rank: int, job: Job, meter: MemoryMeter, context: RankContext | None, error: BaseException) -> RankOutcome:
    needed = None
    reason = failure.one_line(error)
    out_of_memory = failure.is_oom(error)
    if not out_of_memory and failure.may_be_oom(error) and (evidence := meter.shortage()):
        out_of_memory, reason = True, f"{reason}, as {evidence}"
    full_shared = not out_of_memory and failure.lacks_shared_memory(error)
    if full_shared and (sizes := shared_memory()) is not None:
        # The device memory that would have been needed is unknown.
        free, total = (size / MIB for size in sizes)
        reason = (
            f"{reason} ({free:,.0f} of {total:,.0f} MiB of /dev/shm are free; give a container more with --shm-size)"
        )
    if out_of_memory:
        # Read before the frames are cleared, while their tensors are still in memory.
        held_mib, requested_mib = meter.held_mib(), failure.requested_mib(error)
        if job.memory_limit_mib is None and isinstance(meter, HostMemoryMeter):
            needed = requested_mib  # the memory that ran out is unknown, and so is the part in use
        else:
            needed = max(held_mib + (requested_mib or 0.0), job.memory_limit_mib or 0.0)
            if requested_mib is not None:
                # The allocator's full message is in the log.
                limit = f" of {job.memory_limit_mib:,.0f}" if job.memory_limit_mib else ""
                reason = f"requested {requested_mib:,.0f} MiB with {held_mib:,.0f}{limit} MiB in use"
        traceback.clear_frames(error.__traceback__)
    if isinstance(meter, HostMemoryMeter):
        meter.lift()
    traceback.print_exception(error)
    phase = f" (during {context.phase_name})" if context else ""
    return RankOutcome(
        rank=rank,
        status=Status.OOM if out_of_memory or full_shared else Status.CRASH,
        reason=reason + phase,
        peak_memory_mib=meter.peak_mib(),
        needed_memory_mib=needed,
        secondary=not out_of_memory and not full_shared and failure.is_peer_lost(error),
    )
