"""The allocator's model compared with blocks computed by hand from constants of c10/cuda/CUDACachingAllocator.cpp."""

from itertools import pairwise

import pytest
from redline.estimator.allocator import KIB, MIB, CachingAllocator, DeviceFull, HostAllocator, rounded, segment_size


@pytest.mark.parametrize(("num_bytes", "size"), [(1, 512), (512, 512), (513, 1024), (1_000_000, 1_000_448)])
def test_sizes_are_multiples_of_512_bytes(num_bytes, size):
    assert rounded(num_bytes) == size


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB), (100 * MIB + 512, 102 * MIB),
    ],
)  # fmt: skip
def test_segments_are_those_of_the_pools(size, segment):
    assert segment_size(size) == segment


def test_small_requests_share_a_segment_and_split_it_at_512_bytes():
    allocator = CachingAllocator()
    allocator.allocate(100)
    allocator.allocate(MIB)
    assert allocator.segments() == [[(512, True), (MIB, True), (MIB - 512, False)]]
    assert (allocator.allocated, allocator.reserved) == (MIB + 512, 2 * MIB)


def test_a_large_block_is_split_only_if_more_than_one_mebibyte_is_left():
    allocator = CachingAllocator()
    first = allocator.allocate(12 * MIB)
    allocator.free(first)
    allocator.allocate(11 * MIB)  # 1 MiB would be left: it is not split
    assert allocator.segments() == [[(12 * MIB, True)]]
    assert allocator.allocated == 12 * MIB
    allocator.allocate(9 * MIB)
    assert allocator.segments()[1] == [(9 * MIB, True), (11 * MIB, False)]


def test_the_best_fit_is_taken_and_the_lowest_address_among_equals():
    allocator = CachingAllocator()
    big, fit, other = allocator.allocate(40 * MIB), allocator.allocate(16 * MIB), allocator.allocate(16 * MIB)
    for each in (big, other, fit):
        allocator.free(each)
    allocator.allocate(16 * MIB)
    assert allocator.segments() == [[(40 * MIB, False)], [(16 * MIB, True)], [(16 * MIB, False)]]


def test_neighbours_merge_when_they_are_freed():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    assert allocator.segments() == [[(4 * MIB, True)] * 5]
    for at in (1, 3):
        allocator.free(blocks[at])
    assert [used for _, used in allocator.segments()[0]] == [True, False, True, False, True]
    allocator.free(blocks[2])
    assert allocator.segments() == [[(4 * MIB, True), (12 * MIB, False), (4 * MIB, True)]]
    assert allocator.reserved == allocator.peak == 20 * MIB


def test_streams_do_not_share_blocks():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB, stream=0))
    allocator.allocate(20 * MIB, stream=1)
    assert allocator.reserved == 40 * MIB
    allocator.allocate(20 * MIB, stream=0)
    assert allocator.reserved == 40 * MIB


def test_fragments_cost_reserved_memory_that_expandable_segments_avoid():
    def peak(allocator):
        for size in (20, 30, 40, 50):  # grows: every freed block is too small for the next
            allocator.free(allocator.allocate(size * MIB))
        return allocator.peak

    assert peak(CachingAllocator()) == 140 * MIB
    assert peak(CachingAllocator(expandable=True)) == 60 * MIB  # in units of 20 MiB


def test_an_expandable_segment_grows_by_its_free_end():
    allocator = CachingAllocator(expandable=True)
    first = allocator.allocate(15 * MIB)
    allocator.allocate(15 * MIB)  # 5 MiB at the end, and one unit more
    assert allocator.reserved == 40 * MIB
    assert allocator.segments() == [[(15 * MIB, True), (15 * MIB, True), (10 * MIB, False)]]
    allocator.free(first)
    allocator.allocate(8 * MIB)  # the gap, not the end, which can grow
    assert allocator.segments()[0][:2] == [(8 * MIB, True), (7 * MIB, False)]


def test_a_full_device_releases_cached_segments_first():
    allocator = CachingAllocator(limit=60 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    allocator.allocate(50 * MIB)
    assert (allocator.retries, allocator.reserved) == (1, 50 * MIB)
    with pytest.raises(DeviceFull, match="12 MiB do not fit: 50 of 60 MiB are in use"):
        allocator.allocate(11 * MIB)


def test_the_end_of_an_expandable_segment_is_released():
    allocator = CachingAllocator(expandable=True, limit=60 * MIB)
    kept = allocator.allocate(10 * MIB)
    allocator.free(allocator.allocate(45 * MIB))
    assert allocator.reserved == 60 * MIB
    allocator.allocate(512)  # in the small pool
    assert (allocator.retries, allocator.reserved) == (1, 22 * MIB)
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 42 * MIB
    allocator.free(kept)


def test_random_requests_keep_every_segment_whole():
    import random

    draw = random.Random(0)
    for expandable in (False, True):
        allocator = CachingAllocator(expandable=expandable)
        live = {}
        for _ in range(3000):
            if live and draw.random() < 0.5:
                number = draw.choice(list(live))
                allocator.free(number)
                del live[number]
            else:
                size = int(2 ** draw.uniform(5, 26))
                live[allocator.allocate(size, draw.randrange(2))] = size
            assert sum(map(rounded, live.values())) <= allocator.allocated <= allocator.reserved
        segments = allocator.segments()
        assert sum(size for line in segments for size, _ in line) == allocator.reserved
        assert sum(size for line in segments for size, used in line if used) == allocator.allocated
        assert not any(not one and not two for line in segments for (_, one), (_, two) in pairwise(line))


def test_the_host_maps_large_requests_and_keeps_its_heap():
    allocator = HostAllocator()
    small, large = allocator.allocate(1000), allocator.allocate(100 * KIB)
    assert allocator.reserved == 1080 + 104 * KIB  # 80 bytes of header and alignment, pages of 4 KiB
    allocator.free(large)
    allocator.free(small)
    assert allocator.reserved == 1080
    assert allocator.peak == 1080 + 104 * KIB
