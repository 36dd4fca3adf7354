"""Measures, among real ranks on this CPU, the time of each kind of communication, and how much slower a rank computes while the
others compute too."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import RunnerError
from ..estimator.wire import Price, WireTable
from ..results import Status
from .dry_run import join
from .host import HostAgent
from .job import Job, Rendezvous
from .rank import RankContext

if TYPE_CHECKING:
    import torch

SIZES = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 23)
"""Bytes that are timed."""
REPEATS = (30, 30, 20, 12, 6)
"""How often each."""
WORK_S = 0.4
"""How long each rank computes, alone and in company, s."""
COMPUTED_S = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""Computing before a communication, as it is varied to time how late communications start, s."""
LATE_S = 0.3
"""How long each of these is repeated for each kind of communication, s."""
LATE_BYTES = 1 << 14
"""Bytes of the communications that start late."""
VERSION = 6
"""Version of the measurement; a table that was cached under another one is not used."""


def group_sizes(world_size: int) -> list[int]:
    """Sizes of groups that ranks can form."""
    return [size for size in range(2, world_size + 1) if world_size % size == 0]


@dataclass(frozen=True, kw_only=True)
class WireMeasurement:
    """A program for real ranks: times communications in groups of each size, all groups at once, as in a training."""

    share: float = 1.0
    """Number of ranks that share a core."""

    def __call__(self, context: RankContext) -> WireTable:
        import torch.distributed as dist

        join(context)
        world, rank = context.world_size, context.rank
        seconds: dict[str, dict[int, list[tuple[int, float, float]]]] = {}
        late: dict[str, dict[int, list[tuple[float, float]]]] = {}
        # Many ranks on a core compute after each other.
        intervals = COMPUTED_S if self.share <= 2 else COMPUTED_S[::2]
        for size in group_sizes(world):
            lines = [list(range(first, first + size)) for first in range(0, world, size)]
            own_group, _ = dist.new_subgroups_by_enumeration(lines)
            for number, num_bytes in enumerate(SIZES):
                for kind, call in _calls(num_bytes, own_group, rank % size, size):
                    price = self._undisturbed(call, REPEATS[number])
                    seconds.setdefault(kind, {}).setdefault(size, []).append((num_bytes, *price))
            for kind, call in _calls(LATE_BYTES, own_group, rank % size, size):
                alone = self._undisturbed(call, 10).seconds
                extra = [self._late(call, computed, alone) for computed in intervals]
                late.setdefault(kind, {})[size] = smoothed(intervals, extra)
        return WireTable(ranks=world, seconds=seconds, late=late, company=self._company(rank, world))

    def _undisturbed(self, call: Callable[[], None], times: int) -> Price:
        """Lower quartile of repetitions, mean over ranks: what disturbs makes a call longer, never shorter. The CPU time is that
        of all threads of a rank."""
        import torch
        import torch.distributed as dist

        call()
        taken, used = [], []
        for _ in range(times):
            dist.barrier()
            begin, before = time.perf_counter(), time.process_time()
            call()
            taken.append(time.perf_counter() - begin)
            used.append(time.process_time() - before)
        total = torch.tensor([statistics.quantiles(each, n=4)[0] for each in (taken, used)], dtype=torch.float64)
        dist.all_reduce(total)
        return Price(*(total / dist.get_world_size()).tolist())

    def _late(self, call: Callable[[], None], computed_s: float, alone_s: float) -> float:
        """How much longer a piece of computing and a communication take after each other than each by itself: ranks arrive at
        unlike times, threads that wait are woken on cores that compute, and caches are cold afterwards. Mean over repetitions and
        ranks, because a step contains the rare long ones too."""
        import torch
        import torch.distributed as dist

        weights, data = torch.randn(256, 512), torch.randn(64, 256)
        pieces = 1

        def compute() -> None:
            for _ in range(pieces):
                torch.nn.functional.gelu(data @ weights)

        def thread_s(times: int) -> float:
            start = time.thread_time()
            for _ in range(times):
                compute()
            return (time.thread_time() - start) / times

        thread_s(20)
        pieces = max(1, round(computed_s / thread_s(50)))
        times = max(4, int(LATE_S / (computed_s * self.share + alone_s + 2e-3)))
        worked = thread_s(times)
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(times):
            compute()
            call()
        extra = torch.tensor((time.perf_counter() - begin) / times - worked * self.share - alone_s, dtype=torch.float64)
        dist.all_reduce(extra)
        return float(extra) / dist.get_world_size()

    def _company(self, rank: int, world: int) -> float:
        """Thread time of a piece of work while others do the same, over that of the first rank alone."""
        import torch
        import torch.distributed as dist

        alone = torch.zeros(2, dtype=torch.float64)
        dist.barrier()
        if rank == 0:
            alone[0] = _work_seconds()
        dist.barrier()
        alone[1] = _work_seconds() / world
        dist.all_reduce(alone)
        return max(1.0, float(alone[1] / alone[0]))


def smoothed(computed_s: Sequence[float], extra_s: Sequence[float]) -> list[tuple[float, float]]:
    """Points of the curve a + b sqrt(computed), a, b >= 0, that is closest to the measured ones: scheduling scatters them by half
    of their size. Arrivals spread like a sum of independent delays, by the root of the time."""
    import numpy as np

    roots, extra = np.sqrt(np.array(computed_s)), np.array(extra_s)
    weights = 1 / (1e-3 + np.array(computed_s))
    slope, fixed = np.polyfit(roots, extra, 1, w=np.sqrt(weights))
    if slope < 0:
        slope, fixed = 0.0, max(0.0, float(np.average(extra, weights=weights)))
    elif fixed < 0:
        slope, fixed = max(0.0, float((weights * roots * extra).sum() / (weights * roots**2).sum())), 0.0
    return [(each, float(fixed + slope * root)) for each, root in zip(computed_s, roots, strict=True)]


def _work_seconds() -> float:
    """Median thread time of a piece of work as in a small model: products, and passes over memory."""
    import torch

    weights, data = torch.randn(512, 512), torch.randn(1024, 512)
    taken: list[float] = []
    end = time.perf_counter() + WORK_S
    while time.perf_counter() < end or len(taken) < 3:
        begin = time.thread_time()
        hidden = torch.nn.functional.gelu(data @ weights)
        torch.nn.functional.layer_norm(hidden + data, (512,)) @ weights
        taken.append(time.thread_time() - begin)
    return statistics.median(taken)


def _calls(
    num_bytes: int, group: "torch.distributed.ProcessGroup", place: int, size: int
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each kind of communication of so many bytes."""
    import torch
    import torch.distributed as dist

    count = max(size, num_bytes // 4 // size * size)
    buffer, output, piece = torch.ones(count), torch.ones(count), torch.ones(count // size)
    first = dist.get_global_rank(group, 0)
    next_rank, previous_rank = ((place + step) % size for step in (1, -1))

    def ring() -> None:
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, buffer, group=group, group_peer=next_rank),
                dist.P2POp(dist.irecv, output, group=group, group_peer=previous_rank),
            ]
        ):
            work.wait()

    yield "all-reduce", lambda: dist.all_reduce(buffer, group=group)
    yield "all-gather", lambda: dist.all_gather_into_tensor(buffer, piece, group=group)
    yield "reduce-scatter", lambda: dist.reduce_scatter_tensor(piece, buffer, group=group)
    yield "all-to-all", lambda: dist.all_to_all_single(output, buffer, group=group)
    yield "broadcast", lambda: dist.broadcast(buffer, first, group=group)
    yield "reduce", lambda: dist.reduce(buffer, first, group=group)
    yield "send", ring
    yield "barrier", lambda: dist.barrier(group=group)


def measured_wire(agent: HostAgent, world_size: int, threads: int, cores: int) -> WireTable:
    """Times of communications among so many ranks on this CPU.

    Raises:
        RunnerError: a rank failed.
    """
    import cloudpickle

    job = Job(
        program=cloudpickle.dumps(WireMeasurement(share=max(1.0, world_size * threads / cores))),
        ranks=world_size,
        rendezvous=Rendezvous(world_size=world_size),
        threads=threads,
        timeout_s=600.0,
    )
    outcome = agent.run(job)
    if outcome.status is not Status.OK:
        raise RunnerError(f"measuring communication among {world_size} ranks failed: {outcome.reason}")
    table: WireTable = outcome.ranks[0].report
    return table


def cached_wire(agent: HostAgent, world_size: int, threads: int, cores: int) -> WireTable:
    """As `measured_wire`, kept on disk for 30 days.

    Raises:
        RunnerError: a rank failed.
    """
    import torch

    from ..base.device import detect
    from ..estimator.facts import disk_cache
    from ..estimator.measuring import MAX_AGE_S
    from ..models.fingerprint import digest

    what = {
        "device": detect().to_dict(),
        "cores": cores,
        "ranks": world_size,
        "threads": threads,
        "torch": torch.__version__,
        "version": VERSION,
    }
    name = Path("wire", f"{digest(what)}.json")
    kept = disk_cache.load_json(name)
    if isinstance(kept, dict) and time.time() - kept.get("measured", 0.0) < MAX_AGE_S:
        return WireTable.from_dict(kept["table"])
    table = measured_wire(agent, world_size, threads, cores)
    disk_cache.store_json(name, {"measured": time.time(), "table": table.to_dict()})
    return table
