"""Copies of a GPU's tensors are in pinned memory, which is reused by later saves and returned to the system at the end."""

import weakref
from dataclasses import replace

import pytest
import torch
from redline.schedule.parallel.weights import whole_region
from redline.training.checkpoint import saver as savers
from redline.training.checkpoint.folder import CheckpointFolder
from redline.training.checkpoint.restoring import check, stored_in
from redline.training.checkpoint.saver import Saver
from redline.training.checkpoint.state import Frozen

SHAPE, BYTES = (64, 32), 64 * 32 * 4


class OnGpu(torch.Tensor):
    """A tensor on the CPU that reports a GPU as its device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: torch.device("cuda"))


class PinnedMemory:
    """Pinned memory as torch manages it: unused blocks stay reserved until the cache is emptied."""

    def __init__(self):
        self.blocks, self.allocations = [], 0

    @property
    def reserved(self):
        """Bytes that have not been returned to the system."""
        return sum(size for _, size in self.blocks)

    def empty_like(self, tensor, *, device, pin_memory):
        assert (device, pin_memory) == ("cpu", True)
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.blocks.append((weakref.ref(made), made.nbytes))
        self.allocations += 1
        return made

    def empty_cache(self):
        self.blocks = [(ref, size) for ref, size in self.blocks if ref() is not None]


@pytest.fixture
def pinned(monkeypatch):
    memory, parts_of = PinnedMemory(), savers.parts_of
    monkeypatch.setattr(torch, "empty_like", memory.empty_like)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", memory.empty_cache, raising=False)  # torch 2.11 has none
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def on_gpu(tensors):
        return [replace(each, data=each.data.as_subclass(OnGpu)) for each in parts_of(tensors)]

    monkeypatch.setattr(savers, "parts_of", on_gpu)
    return memory


def state(*names):
    return Frozen({name: (torch.full(SHAPE, 3.0), whole_region(torch.Size(SHAPE))) for name in names})


def test_pinned_buffers_serve_several_saves_and_are_given_back_behind_the_last(pinned, tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.prepare()
    saver = Saver(folder)
    for step in (1, 2, 3):
        saver.save(state("a", "b"), step, {"samples": step})
        assert pinned.reserved == 2 * BYTES and pinned.allocations == 2
    assert not saver.wait().failure
    saver.close()
    assert pinned.reserved == 0
    saved = folder.all()[0]
    assert saved.step == 3 and check(saved, None) == ""
    assert torch.equal(stored_in(saved)["a"].read((slice(0, 64), slice(0, 32))), torch.full(SHAPE, 3.0))


def test_buffers_are_returned_after_a_failed_save(pinned, tmp_path):
    (tmp_path / "file").write_text("")
    saver = Saver(CheckpointFolder(tmp_path / "file" / "below"))
    saver.save(state("a"), 1, {"samples": 1})
    assert saver.wait().failure and pinned.reserved == BYTES
    saver.close()
    assert pinned.reserved == 0


def test_buffers_are_returned_when_a_rank_s_parts_change(pinned, tmp_path, alone):
    folder = CheckpointFolder(tmp_path)
    folder.prepare()
    saver = Saver(folder, 0, alone)
    for step, names in ((1, "abc"), (2, "d")):
        saver.save(state(*names), step, {"samples": step})
        assert not saver.wait().failure
        assert pinned.reserved == len(names) * BYTES
    saver.close()
    assert pinned.reserved == 0


@pytest.fixture
def alone():
    """A group of one rank, which divides the writing as several ranks do."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()
