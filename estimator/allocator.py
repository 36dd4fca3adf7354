"""Models of memory allocators: PyTorch's caching allocator of CUDA, and glibc's of a CPU process.

A trace of allocations (`training/memory_trace.py`) has the bytes of live tensors. An allocator takes more from the device: it
rounds sizes, splits and caches blocks, and leaves gaps. Constants and rules of `CachingAllocator` are those of
c10/cuda/CUDACachingAllocator.cpp in torch 2.13:

 constant | value |
---|---|
 kMinBlockSize | 512 B, sizes are multiples of it |
 kSmallSize | 1 MiB, the largest request of the small pool |
 kSmallBuffer | 2 MiB, a segment of the small pool |
 kMinLargeAlloc | 10 MiB, smaller requests share segments of kLargeBuffer |
 kLargeBuffer | 20 MiB |
 kRoundLarge | 2 MiB, larger segments are multiples of it |
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from dataclasses import dataclass, field

KIB, MIB = 1024, 1024 * 1024
MIN_BLOCK = 512
SMALL_SIZE = MIB
SMALL_BUFFER = 2 * MIB
MIN_LARGE = 10 * MIB
LARGE_BUFFER = 20 * MIB
ROUND_LARGE = 2 * MIB


class DeviceFull(MemoryError):
    """A request does not fit, although every cached segment was released."""


class Allocator(ABC):
    """Serves requests in order, and keeps the peak of what it takes from the device."""

    reserved = 0
    """Bytes taken from the device."""
    peak = 0
    """Maximum of `reserved`."""

    @abstractmethod
    def allocate(self, num_bytes: int, stream: int = 0) -> int:
        """Serves a request and returns its number.

        Raises:
            DeviceFull: it does not fit.
        """

    @abstractmethod
    def free(self, number: int) -> None:
        """Frees a request by its number."""


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment. Blocks of a segment form a list by address."""

    address: int
    size: int
    stream: int
    small: bool
    allocated: bool = False
    before: "_Block | None" = None
    after: "_Block | None" = None
    requested: int = 0

    def key(self) -> tuple[int, int]:
        return self.size, self.address


@dataclass(slots=True)
class _Pool:
    """Free blocks of one stream and one of the two pools, by size and then address."""

    keys: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)
    """By address."""
    end: _Block | None = None
    """Last block of the expandable segment."""

    def add(self, block: _Block) -> None:
        insort(self.keys, block.key())
        self.blocks[block.address] = block

    def remove(self, block: _Block) -> None:
        del self.keys[bisect_left(self.keys, block.key())]
        del self.blocks[block.address]

    def best(self, size: int) -> _Block | None:
        """The smallest free block of at least this size, at the lowest address; None if there is none."""
        at = bisect_left(self.keys, (size, 0))
        return self.blocks[self.keys[at][1]] if at < len(self.keys) else None


class CachingAllocator(Allocator):
    """PyTorch's caching allocator of one CUDA device, with its default settings.

    Every stream has its own pools, and a freed block is reused by its own stream only.

    Args:
        expandable: `expandable_segments:True`, by which each pool is one segment that grows by 2 or 20 MiB.
        limit: bytes that may be reserved; None for no limit.
    """

    def __init__(self, *, expandable: bool = False, limit: int | None = None) -> None:
        self.expandable, self.limit = expandable, limit
        self.allocated = self.peak_allocated = 0
        """Bytes of blocks in use, which are rounded, and their peak."""
        self.retries = 0
        """How often cached segments were released to serve a request."""
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._used: dict[int, _Block] = {}
        self._number = 0
        self._address = 0

    def allocate(self, num_bytes: int, stream: int = 0) -> int:
        size = rounded(num_bytes)
        small = size <= SMALL_SIZE
        pool = self._pools.setdefault((stream, small), _Pool())
        block = self._found(pool, size)
        if block is None:
            block = self._grown(pool, size, stream, small) if self.expandable else self._segment(size, stream, small)
        else:
            pool.remove(block)
        rest = block.size - size
        if rest >= MIN_BLOCK if small or self.expandable else rest > SMALL_SIZE:
            left = _Block(block.address + size, rest, stream, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = left
            if pool.end is block:
                pool.end = left
            block.after, block.size = left, size
            pool.add(left)
        block.allocated = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self._number += 1
        self._used[self._number] = block
        return self._number

    def free(self, number: int) -> None:
        block = self._used.pop(number)
        self.allocated -= block.size
        block.allocated = False
        pool = self._pools[block.stream, block.small]
        for other in (block.before, block.after):
            if other is None or other.allocated:
                continue
            pool.remove(other)
            if other is block.before:
                block.before, block.address = other.before, other.address
                if other.before is not None:
                    other.before.after = block
            else:
                block.after = other.after
                if other.after is not None:
                    other.after.before = block
                if pool.end is other:
                    pool.end = block
            block.size += other.size
        pool.add(block)

    def segments(self) -> list[list[tuple[int, bool]]]:
        """Size of each block and if it is in use, segment by segment, by address, as in `torch.cuda.memory_snapshot()`."""
        every = [*self._used.values(), *(each for pool in self._pools.values() for each in pool.blocks.values())]
        firsts = sorted((each for each in every if each.before is None), key=lambda each: each.address)
        out = []
        for each in firsts:
            line: list[tuple[int, bool]] = []
            at: _Block | None = each
            while at is not None:
                line.append((at.size, at.allocated))
                at = at.after
            out.append(line)
        return out

    def _found(self, pool: _Pool, size: int) -> _Block | None:
        block = pool.best(size)
        if block is None or not self.expandable or block is not pool.end:
            return block
        # The last block can grow: any other block is a better fit.
        at = bisect_left(pool.keys, block.key()) + 1
        return pool.blocks[pool.keys[at][1]] if at < len(pool.keys) else block

    def _segment(self, size: int, stream: int, small: bool) -> _Block:
        self._take(segment_size(size))
        block = _Block(self._address, segment_size(size), stream, small)
        self._address += block.size + ROUND_LARGE  # segments are not adjacent
        return block

    def _grown(self, pool: _Pool, size: int, stream: int, small: bool) -> _Block:
        """Extends the pool's segment so that its last block has at least this size."""
        unit = SMALL_BUFFER if small else LARGE_BUFFER
        last = pool.end
        free = last if last is not None and not last.allocated else None
        more = -(-(size - (free.size if free is not None else 0)) // unit) * unit
        self._take(more)
        last = pool.end  # a release may have shortened the segment
        if last is not None and not last.allocated:
            pool.remove(last)
            last.size += more
            return last
        if last is None:
            block = _Block(self._address, more, stream, small)
            self._address += 1 << 50  # of addresses
        else:
            block = _Block(last.address + last.size, more, stream, small, before=last)
            last.after = block
        pool.end = block
        return block

    def _take(self, size: int) -> None:
        if self.limit is not None and self.reserved + size > self.limit:
            self._release()
            self.retries += 1
            if self.reserved + size > self.limit:
                raise DeviceFull(
                    f"{size / MIB:,.0f} MiB do not fit: {self.reserved / MIB:,.0f} of {self.limit / MIB:,.0f} MiB are in use"
                )
        self.reserved += size
        self.peak = max(self.peak, self.reserved)

    def _release(self) -> None:
        """Returns segments without a used block; the free end of an expandable one."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                whole = block.before is None and block.after is None
                if not self.expandable and whole:
                    pool.remove(block)
                    self.reserved -= block.size
                elif self.expandable and block is pool.end:
                    unit = SMALL_BUFFER if block.small else LARGE_BUFFER
                    given = block.size // unit * unit
                    pool.remove(block)
                    self.reserved -= given
                    block.size -= given
                    if block.size:
                        pool.add(block)
                    else:
                        pool.end = block.before
                        if block.before is not None:
                            block.before.after = None


def rounded(num_bytes: int) -> int:
    """Size of the block that the caching allocator gives to a request, bytes."""
    return max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    """Size of a new segment for a block, bytes."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    return LARGE_BUFFER if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE


PAGE = 4096
MAPPED_FROM = 64 * KIB
"""Requests from this size on are mapped, and returned when freed, bytes: glibc's threshold as `bench/emulate.py` sets it. By
default glibc raises its threshold to the sizes that are freed, up to 32 MiB."""
ALIGNMENT, HEADER = 64, 16
"""torch aligns CPU tensors to 64 bytes; glibc has a header of 16."""


class HostAllocator(Allocator):
    """glibc's allocator of a process whose memory is resident where it was written.

    Large requests are mapped by themselves and rounded to pages. Small ones share the heap. The heap does not shrink, because
    live requests and objects of Python are spread over it.
    """

    def __init__(self, mapped_from: int = MAPPED_FROM) -> None:
        self.mapped_from = mapped_from
        self.small = 0
        """Number of requests that were served from the heap."""
        self._heap = self._top = self._mapped = self._number = 0
        self._live: dict[int, int] = {}

    def allocate(self, num_bytes: int, stream: int = 0) -> int:
        size = num_bytes + ALIGNMENT + HEADER
        if size >= self.mapped_from:
            size = -(-size // PAGE) * PAGE
            self._mapped += size
        else:
            self.small += 1
            self._heap += size
            self._top = max(self._top, self._heap)
        self.reserved = self._mapped + self._top
        self.peak = max(self.peak, self.reserved)
        self._number += 1
        self._live[self._number] = size
        return self._number

    def free(self, number: int) -> None:
        size = self._live.pop(number)
        if size >= self.mapped_from:
            self._mapped -= size
        else:
            self._heap -= size
        self.reserved = self._mapped + self._top
