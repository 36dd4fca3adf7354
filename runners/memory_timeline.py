"""Memory of one rank over an optimizer step, without a device: its traced allocations, replayed through an allocator's model.

The trace is that of `training/memory_trace.py`; for CUDA it is taken with operators that allocate what CUDA's allocate. NCCL,
contexts and libraries are outside of the allocator, and so of the timeline.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..base.device import liger_obstacle
from ..base.errors import UsageError
from ..estimator.allocator import MIB, Allocator, CachingAllocator, HostAllocator
from ..models import Workload

if TYPE_CHECKING:
    from ..schedule import Schedule
    from ..training.memory_trace import Block, MemoryTrace

LARGEST = 10
"""Number of tensors that a timeline names."""
POINTS = 120
"""Number of intervals of a timeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelinePoint:
    """Memory during one interval of the last step: the largest totals in it."""

    phase: str
    live_bytes: int
    """Bytes of tensors."""
    reserved_bytes: int
    """Bytes that the allocator has taken from the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTimeline:
    """Memory of one rank."""

    rank: int
    kind: str
    """`cuda`: the caching allocator; `cpu`: the resident set."""
    live_bytes: int
    """Peak of the bytes of tensors."""
    allocated_bytes: int
    """Peak of the bytes of blocks in use, rounded as the allocator does."""
    reserved_bytes: int
    """Peak of the bytes taken from the device."""
    expandable_bytes: int | None
    """The same with `expandable_segments:True`; None on a CPU."""
    phase: str
    """Part of the step with the peak of tensors."""
    roles: Mapping[str, int]
    """Bytes of tensors at that peak by purpose, the largest first."""
    largest: "tuple[Block, ...]"
    """The largest tensors at that peak."""
    points: tuple[TimelinePoint, ...]
    """The last step."""
    untraced: tuple[str, ...] = ()
    """Knobs whose effect on memory is not traced."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; bytes."""
        return {
            "rank": self.rank,
            "allocator": "cuda caching" if self.kind == "cuda" else "resident set",
            "peak_live_bytes": self.live_bytes,
            "peak_allocated_bytes": self.allocated_bytes,
            "peak_reserved_bytes": self.reserved_bytes,
            "peak_reserved_bytes_expandable_segments": self.expandable_bytes,
            "peak_phase": self.phase,
            "at_peak": dict(self.roles),
            "largest": [
                {
                    "name": each.name,
                    "role": each.role.value,
                    "bytes": each.num_bytes,
                    "shape": list(each.shape),
                    "dtype": each.dtype,
                }
                for each in self.largest
            ],
            "step": [
                {"phase": each.phase, "live_bytes": each.live_bytes, "reserved_bytes": each.reserved_bytes}
                for each in self.points
            ],
            "untraced": list(self.untraced),
        }


def memory_timeline(
    workload: Workload,
    config: Mapping[str, Any],
    *,
    rank: int = 0,
    devices: int = 1,
    kind: str = "cuda",
) -> MemoryTimeline:
    """Traces a rank and replays it. Nothing is computed, and no device is needed.

    Raises:
        WorkloadError: the configuration is invalid for the workload or for this number of ranks.
        UsageError: the kind is unknown.
    """
    from ..training.memory_trace import trace_memory

    if kind not in ("cuda", "cpu"):
        raise UsageError(f"memory is traced for 'cuda' or 'cpu', but the kind of device is '{kind}'")
    traced, untraced = traceable(config, kind)
    cpu = kind == "cpu"
    trace = trace_memory(
        workload,
        traced,
        rank=rank,
        world_size=devices,
        gloo=cpu,
        operators=None if cpu else _as_on_cuda(),
        kernels=None if cpu else _liger_modules(workload, traced),
    )
    return timeline_of(trace, kind, untraced=untraced)


def traceable(config: Mapping[str, Any], kind: str) -> tuple[dict[str, Any], list[str]]:
    """Returns a configuration that can be traced on a CPU, and the knobs of the given one whose effect on memory is left out.

    Compiled blocks keep less than the operators that they replace; float8 keeps casts and scales.

    Raises:
        UsageError: states of the optimizer are offloaded: a trace on a CPU does not tell host memory from the device's.
    """
    out, left = dict(config), []
    if kind == "cuda" and config.get("offload", "none") != "none":
        raise UsageError(
            f"offload={config['offload']}: memory of offloaded states cannot be traced; trace a configuration with offload=none"
        )
    if out.get("fusion"):
        out["fusion"] = False
        left.append("fusion")
    left += ["precision"] if out.get("precision") == "fp8" else []
    # The sizes are the same, and a CPU trains in these.
    computed_as = {"fp8": "bf16", "fp16": "bf16", "tf32": "fp32"}
    if out.get("precision") in computed_as:
        out["precision"] = computed_as[out["precision"]]
    if out.get("attention") not in (None, "eager", "sdpa"):
        out["attention"] = "sdpa"  # every fused attention keeps the same tensors
    return out, left


def _as_on_cuda() -> AbstractContextManager[Any]:
    from ..estimator.facts.device_operators import function_mode

    return function_mode("cuda", lambda query, key, value, causal, run: run(), lambda rows, weights: None)


def _liger_modules(workload: Workload, config: Mapping[str, Any]) -> "Callable[[Schedule], None] | None":
    """What puts the form of Liger-Kernel's modules into a traced model; None where they are not installed."""
    from ..estimator.facts.liger_modules import forwards_of, put_forwards
    from ..models.skeleton import skeleton

    if not config.get("kernels") or liger_obstacle("cuda"):
        return None
    forwards = forwards_of(skeleton(workload, config))  # nothing is computed in the trace
    return lambda sch: put_forwards(sch.module, forwards)


def timeline_of(trace: "MemoryTrace", kind: str, *, untraced: Sequence[str] = ()) -> MemoryTimeline:
    """Replays a trace through the allocator of a kind of device."""
    live, peak, at = 0, 0, 0
    totals = []
    for event, (block, begins) in enumerate(events_of(trace)):
        live += block.num_bytes if begins else -block.num_bytes
        totals.append(live)
        if live > peak:
            peak, at = live, event
    alive = sorted(
        (each for each in trace.blocks if each.begin <= at and (each.end is None or each.end > at)),
        key=lambda each: -each.num_bytes,
    )
    roles: dict[str, int] = {}
    for each in alive:
        roles[each.role.value] = roles.get(each.role.value, 0) + each.num_bytes
    allocator: Allocator = CachingAllocator() if kind == "cuda" else HostAllocator()
    reserved = replayed(trace, allocator)
    expandable = None
    if kind == "cuda":
        expandable = max(replayed(trace, CachingAllocator(expandable=True)))
    return MemoryTimeline(
        rank=trace.rank,
        kind=kind,
        live_bytes=peak,
        allocated_bytes=allocator.peak_allocated if isinstance(allocator, CachingAllocator) else peak,
        reserved_bytes=max(reserved) if kind == "cuda" else resident_bytes(trace),
        expandable_bytes=expandable,
        phase=trace.part_at(at).phase.value,
        roles=dict(sorted(roles.items(), key=lambda item: -item[1])),
        largest=tuple(alive[:LARGEST]),
        points=tuple(_points(trace, totals, reserved)),
        untraced=tuple(untraced),
    )


def events_of(trace: "MemoryTrace") -> "list[tuple[Block, bool]]":
    """Blocks in the order in which they are allocated (True) and freed (False)."""
    events: list[Any] = [None] * trace.num_events
    for block in trace.blocks:
        events[block.begin] = (block, True)
        if block.end is not None:
            events[block.end] = (block, False)
    return events


def replayed(trace: "MemoryTrace", allocator: Allocator) -> list[int]:
    """Replays a trace, and returns the bytes that the allocator has reserved after each event.

    Raises:
        DeviceFull: the allocator has a limit, and the trace does not fit.
    """
    numbers: dict[int, int] = {}
    out = []
    for block, begins in events_of(trace):
        if begins:
            numbers[block.begin] = allocator.allocate(block.num_bytes, block.stream)
        else:
            allocator.free(numbers.pop(block.begin))
        out.append(allocator.reserved)
    return out


def _points(trace: "MemoryTrace", totals: list[int], reserved: list[int]) -> list[TimelinePoint]:
    """Maxima of the last step in intervals that do not cross phases."""
    last = max(each.step for each in trace.parts)
    ends = [*(each.begin for each in trace.parts), trace.num_events]
    spans = [
        (part.phase.value, begin, end) for part, (begin, end) in zip(trace.parts, pairwise(ends)) if part.step == last
    ]
    width = max(1, sum(end - begin for _, begin, end in spans) // POINTS)
    return [
        TimelinePoint(
            phase=phase,
            live_bytes=max(totals[at : min(at + width, end)]),
            reserved_bytes=max(reserved[at : min(at + width, end)]),
        )
        for phase, begin, end in spans
        for at in range(begin, end, width)
    ]


PROCESS_MIB = 1.1
"""Growth of a rank's process without tensors and communication: modules of Python and objects of the model, MiB."""
PRODUCTS_MIB = 3.2
"""Buffers in which MKL packs operands of large products, forward and backward, and which it keeps, MiB. Measured as the growth of
a process with one thread by products of 256 x 64 x 16,384."""
PRODUCTS_FROM = 4 * MIB
"""Bytes of a product's result from which the buffers have that size; products of 256 x 64 x 384 took 0.2 MiB."""
SMALL_MIB = 2.1 / 1024
"""Memory beside each small tensor of a trace, MiB: gaps in glibc's heap, and objects of Python and autograd, which share it."""
GROUP_MIB = 0.2
"""Memory of a gloo group, MiB."""


def resident_bytes(trace: "MemoryTrace") -> int:
    """Peak growth of the resident set of a CPU rank, as `HostMemoryMeter` measures it, bytes."""
    allocator = HostAllocator()
    replayed(trace, allocator)
    products = any(
        each.num_bytes >= PRODUCTS_FROM and each.name.rpartition(": ")[2] in ("mm", "addmm", "bmm")
        for each in trace.blocks
    )
    beside = PROCESS_MIB + SMALL_MIB * allocator.small + GROUP_MIB * trace.groups + PRODUCTS_MIB * products
    return allocator.peak + round(beside * MIB)
