"""A trial starts when its GPUs are free, and memory of other processes is always subtracted; on a faked NVML."""

from types import SimpleNamespace

import cloudpickle
import pynvml
import pytest
import redline
import torch
from redline.base import gpus
from redline.base.device import Device
from redline.base.gpus import GpuUse, gpu_use
from redline.estimator import Estimator, TrainingSetup
from redline.runners.dispatch import SETTLE_S, DryRuns
from redline.runners.runner import TrialRequest, TrialTerms
from redline.runners.trial import memory
from redline.runners.trial.memory import MIB, CudaMemoryMeter, GpuMemory, wait_for_room
from redline.runners.trial.rank import RankContext
from redline.space import Config
from redline.tuner import rank_memory

LLAMA = {"layers": 16, "hidden": 2048, "heads": 32, "vocabulary": 128_000}


def used(*mib, name="0"):
    """Readings of one GPU; the last one repeats."""
    left = list(mib)

    def read(names):
        return [GpuUse(name=name, total_mib=80_000, used_mib=left.pop(0) if len(left) > 1 else left[0])]

    return read


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only by sleeping."""
    now = [0.0]
    monkeypatch.setattr(memory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(memory.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_a_trial_waits_until_the_memory_of_the_one_before_is_back(tmp_path, clock):
    messages = []
    assert wait_for_room(("0",), tmp_path, messages.append, use=used(600)) == 600
    assert clock == [0] and not messages
    assert wait_for_room(("0",), tmp_path, messages.append, use=used(70_000, 40_000, 9_000, 630)) == 630
    assert clock[0] == pytest.approx(3 * memory.POLL_S)
    assert messages == ["waited 0.3 s until the memory of GPU 0 was free again"]


def test_memory_that_does_not_come_back_is_another_s_and_waited_for_once(tmp_path, clock):
    messages = []
    wait_for_room(("0",), tmp_path, messages.append, use=used(600))
    assert wait_for_room(("0",), tmp_path, messages.append, use=used(20_600)) == 20_600
    assert clock[0] == pytest.approx(memory.WAIT_S, abs=0.2)
    assert messages == [
        "GPU 0: after 30 s 20,600 of 80,000 MiB are still used, 20,000 more than before; other processes use them now"
    ]
    before = clock[0]
    assert wait_for_room(("0",), tmp_path, messages.append, use=used(20_600)) == 20_600
    assert clock[0] == before and len(messages) == 1
    wait_for_room(("0",), tmp_path, messages.append, use=used(600))  # the other process has ended
    assert wait_for_room(("0",), tmp_path, messages.append, use=used(20_600, 610)) == 610
    assert clock[0] == pytest.approx(before + memory.POLL_S)


@pytest.fixture
def nvml(monkeypatch):
    """Two GPUs of 80,000 MiB with this much memory in use; the driver reserves 500 MiB."""

    def made(first, second):
        held = {"first": first, "second": second}

        def memory(handle, version=None):
            return SimpleNamespace(total=80_000 * MIB, used=(held[handle] + (0 if version else 500)) * MIB)

        def no_mig(handle):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda at: ("first", "second")[at])
        monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}")
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", no_mig)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)
        monkeypatch.delenv(gpus.VARIABLE, raising=False)

    return made


def test_nvml_tells_what_is_used_of_the_gpus_that_are_named(nvml, monkeypatch):
    nvml(100, 9000)
    assert [(each.name, each.used_mib, each.total_mib) for each in gpu_use()] == [
        ("0", 100, 80_000),
        ("1", 9000, 80_000),
    ]
    assert [each.used_mib for each in gpu_use(("GPU-second",))] == [9000]
    monkeypatch.setenv(gpus.VARIABLE, "1")
    assert [each.name for each in gpu_use()] == ["1"]


@pytest.mark.parametrize(("listed", "held"), [([SimpleNamespace(pid=7, usedGpuMemory=300 * MIB)], 300), ([], 4000)])
def test_where_a_container_hides_processes_their_memory_is_what_was_added(nvml, monkeypatch, listed, held):
    def handle(at):
        if at == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)  # of another job
        return "second"

    nvml(0, 1000)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: listed)
    memory_of = GpuMemory()
    nvml(0, 5000)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    assert memory_of.held_mib([7, 8]) == held
    assert memory_of.held_mib([]) == 0


@pytest.mark.parametrize(
    ("held", "asked", "expected"),
    [
        ((100, 200), None, None),
        ((100, 20_000), None, 58_800),
        ((0, 20_000), 70_000, 58_800),
        ((0, 20_000), 40_000, 40_000),
    ],
)
def test_limit_and_estimate_leave_other_processes_what_they_hold(nvml, held, asked, expected):
    nvml(*held)
    messages = []
    request = SimpleNamespace(limit_mib=asked, runner="local", runs_on="local", concurrency=None)
    task = SimpleNamespace(own=object(), emulated=False, device=SimpleNamespace(type="cuda"), devices=2)
    limit_mib = rank_memory.memory_of_rank(request, task, messages.append)
    assert limit_mib == expected
    assert bool(messages) == (expected == 58_800) and (
        "20,000 of the 80,000 MiB of GPU 1" in "".join(messages)
    ) == bool(messages)
    if limit_mib is not None:
        setup = TrainingSetup(seq_len=512, global_batch=8, memory_limit_mib=limit_mib)
        assert Estimator(LLAMA, "h100", setup).memory_limit_mib == limit_mib
    elsewhere = SimpleNamespace(limit_mib=asked, runner="ray", runs_on="ray", concurrency=None)
    assert rank_memory.memory_of_rank(elsewhere, task) == asked


def test_a_rank_reports_what_it_takes_beside_the_allocator_s_memory(monkeypatch):
    free = {0: 30_000, 1: 50_000}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index] * MIB, 80_000 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 29_000 * MIB)
    meter = CudaMemoryMeter([torch.device("cuda", number) for number in (0, 1)])
    assert meter.outside_mib() == 21_000
    context = RankContext(
        rank=0, local_rank=0, world_size=1, device_type="cuda", init_method="", memory_limit_mib=None, memory=meter,
        used_mib=20_000.0,
    )  # fmt: skip
    assert context.outside_mib() == 1000


def test_likely_winners_are_measured_at_settled_clocks():
    workload = redline.workload("gpt2-tiny")
    plans = {}
    for device in (Device(type=each, name="", count=1, memory_mib=80_000) for each in ("cuda", "cpu")):
        for sustained in (False, True):
            asked = TrialRequest(config=Config({"micro_batch": 8}), number=1, sustained=sustained)
            job = DryRuns(workload).job(asked, TrialTerms(device=device))
            plans[device.type, sustained] = cloudpickle.loads(job.program).plan.settle_seconds
    assert plans == {("cuda", True): SETTLE_S, ("cuda", False): 0, ("cpu", True): 0, ("cpu", False): 0}
