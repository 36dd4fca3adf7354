"""Memory of a process with several GPUs, such as a callable's: each GPU has the limit, and the fullest counts."""

from types import SimpleNamespace

import torch
from redline.runners.trial.memory import MIB, CudaMemoryMeter


def test_a_process_of_several_gpus_is_limited_on_each_and_measured_by_the_fullest(monkeypatch):
    limited, held = {}, {0: 100 * MIB, 1: 700 * MIB}

    def limit(share, device):
        limited[device.index] = share

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: SimpleNamespace(total_memory=1000 * MIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    for name in ("max_memory_reserved", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: held[device.index])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 1 + device.index})
    meter = CudaMemoryMeter([torch.device("cuda", number) for number in (0, 1)])
    meter.limit(800)
    assert limited == {0: 0.8, 1: 0.8}
    assert (meter.peak_mib(), meter.held_mib(), meter.peak_allocated_mib()) == (700, 700, 700)
    assert meter.allocation_retries() == 3


def test_a_request_that_the_allocator_refused_is_a_shortage_although_memory_is_free_again(monkeypatch):
    refused = {0: 0, 1: 0}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9000 * MIB, 80_000 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_ooms": refused[device.index]})
    meter = CudaMemoryMeter([torch.device("cuda", number) for number in (0, 1)])
    assert meter.shortage() is None
    refused[1] = 1
    assert meter.shortage() == "the allocator had no memory for a request"
