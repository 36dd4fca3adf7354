"""Memory of a trial: a rank's limit and peak, free GPU memory before it starts, and evidence that a kill was for lack
of memory.

On a CPU the limit is RLIMIT_DATA, which counts private writable mappings (`man 2 setrlimit`, Linux 4.7 and later), and
the peak is that of the anonymous resident set. Both count from the fork: the interpreter and the libraries, which all
candidates share, are free. On CUDA the limit is the allocator's share of the device, and the peak is the memory it
reserved.

The driver frees the memory of a killed process some time after the process is gone, and NVML's list of processes is
empty in many containers. So used memory is compared: a GPU is free again when no more is used than before an earlier
trial.

SIGKILL alone does not show that memory was short: the kernel's out-of-memory killer sends it, and so do people, batch
systems and deadlines. The evidence is the kernel's own count, and the memory that was left.
"""

import re
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...base.gpus import GpuUse, gpu_use
from ...base.host_memory import MIB, free_memory_mib, memory_groups, total_memory_mib

if TYPE_CHECKING:
    import torch


_STACK = 2 * MIB
"""Size of a thread's stack if RLIMIT_STACK is unlimited, on x86-64, bytes."""


def _status(*names: str) -> list[int]:
    """Returns fields of /proc/self/status, KiB."""
    values = dict.fromkeys(names, 0)
    with open("/proc/self/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in values:
                values[name] = int(value.split()[0])
    return [values[name] for name in names]


_HANDLES = 256 * MIB
"""Upper bound of the device memory of a CUDA library's handle, including its kernels, bytes. cuBLAS has 32 MiB of
workspace on compute capability 9.0 (https://docs.nvidia.com/cuda/cublas, cublasSetWorkspace); the rest is an
assumption.
"""


class MemoryMeter(ABC):
    """Limits and measures the memory of this process on its device."""

    @abstractmethod
    def limit(self, limit_mib: float) -> None:
        """Makes every allocation past `limit_mib` fail."""

    @abstractmethod
    def peak_mib(self) -> float:
        """Peak since the meter was created, MiB."""

    @abstractmethod
    def held_mib(self) -> float:
        """Memory in use now, MiB."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Excludes allocations within the `with` from the peak, if the allocator supports that."""
        yield

    def peak_allocated_mib(self) -> float | None:
        """Peak size of live tensors, MiB; None if the allocator does not count it."""
        return None

    def allocation_retries(self) -> int:
        """How often the allocator flushed its cache to serve a request."""
        return 0

    def outside_mib(self) -> float | None:
        """Device memory used outside of this process's tensors, by contexts, libraries and other processes, MiB; None
        on a CPU.
        """
        return None

    def shortage(self) -> str | None:
        """Returns evidence that there is no memory even for the smallest request; None without evidence."""
        return None


class HostMemoryMeter(MemoryMeter):
    """Memory of a CPU rank. Must be created right after the fork, before anything is allocated."""

    def __init__(self) -> None:
        (self._base_kib,) = _status("RssAnon")

    def limit(self, limit_mib: float) -> None:
        """Sets RLIMIT_DATA to the memory mapped already plus `limit_mib`."""
        (mapped_kib,) = _status("VmData")
        limit = mapped_kib * 1024 + int(limit_mib * MIB)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:  # a process may not exceed its hard limit
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def lift(self) -> None:
        """Removes the limit, so that a failed rank has the memory to report."""
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def shortage(self) -> str | None:
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        # glibc allocates this much for a thread (`man 3 pthread_create`).
        stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
        if limit == resource.RLIM_INFINITY:
            return None
        (mapped_kib,) = _status("VmData")
        fits = mapped_kib * 1024 + (_STACK if stack == resource.RLIM_INFINITY else stack) <= limit
        return None if fits else "not even a thread's stack fits under the limit"

    def peak_mib(self) -> float:
        # The kernel has a high-water mark only of the whole resident set. File pages (libraries) are touched once and
        # stay, so their present size is also that at the peak.
        peak_kib, file_kib, shared_kib = _status("VmHWM", "RssFile", "RssShmem")
        return max(0.0, (peak_kib - file_kib - shared_kib - self._base_kib) / 1024)

    def held_mib(self) -> float:
        (anonymous_kib,) = _status("RssAnon")
        return max(0.0, (anonymous_kib - self._base_kib) / 1024)


class CudaMemoryMeter(MemoryMeter):
    """Memory of the fullest of a process's CUDA devices, measured by torch's caching allocator."""

    def __init__(self, devices: "Sequence[torch.device]") -> None:
        import torch

        self._cuda = torch.cuda
        self._devices = list(devices)
        self._reserved_before = self._allocated_before = 0
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)

    def limit(self, limit_mib: float) -> None:
        """Limits the caching allocator. The context and NCCL are outside of it."""
        for device in self._devices:
            total_mib = self._cuda.get_device_properties(device).total_memory / MIB
            self._cuda.set_per_process_memory_fraction(min(1.0, limit_mib / total_mib), device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Excludes allocations within the `with` from the peak, and returns freed memory to the device."""
        self._reserved_before, self._allocated_before = self._peak_reserved(), self._peak_allocated()
        yield
        self._cuda.empty_cache()
        for device in self._devices:
            self._cuda.reset_peak_memory_stats(device)

    def peak_mib(self) -> float:
        return self._peak_reserved() / MIB

    def held_mib(self) -> float:
        return max(self._cuda.memory_allocated(device) for device in self._devices) / MIB

    def peak_allocated_mib(self) -> float | None:
        return self._peak_allocated() / MIB

    def shortage(self) -> str | None:
        if any(self._cuda.memory_stats(device).get("num_ooms", 0) for device in self._devices):
            return "the allocator had no memory for a request"  # which a library may have handled
        for device in self._devices:
            try:
                free, total = self._cuda.mem_get_info(device)
            except RuntimeError:  # the device does not answer after a failed assertion
                continue
            if free < _HANDLES:
                return f"{free / MIB:,.0f} of {total / MIB:,.0f} MiB of {device} are free"
        return None

    def outside_mib(self) -> float | None:
        most_mib = 0.0
        for device in self._devices:
            free, total = self._cuda.mem_get_info(device)
            most_mib = max(most_mib, (total - free - self._cuda.memory_reserved(device)) / MIB)
        return most_mib

    def _peak_reserved(self) -> int:
        return max(self._reserved_before, *(self._cuda.max_memory_reserved(device) for device in self._devices))

    def _peak_allocated(self) -> int:
        return max(self._allocated_before, *(self._cuda.max_memory_allocated(device) for device in self._devices))

    def allocation_retries(self) -> int:
        per_device = (self._cuda.memory_stats(device) for device in self._devices)
        return sum(int(statistics.get("num_alloc_retries", 0)) for statistics in per_device)


class GpuMemory:
    """Memory of processes on this host's GPUs as reported by NVML; 0 if NVML is unavailable.

    Many containers hide processes from NVML. There it is the increase of used memory since this object was created, on the
    GPUs that CUDA shows to this process.
    """

    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        self._handles = []
        self._initial_mib = {gpu.name: gpu.used_mib for gpu in gpu_use()}
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            for index in range(pynvml.nvmlDeviceGetCount()):
                with suppress(pynvml.NVMLError):  # a GPU of another job
                    self._handles.append(pynvml.nvmlDeviceGetHandleByIndex(index))

    def held_mib(self, pids: Iterable[int]) -> float:
        """Returns the memory of these processes together, on the GPU where it is largest, MiB."""
        requested, most_mib = set(pids), 0.0
        for handle in self._handles:
            try:
                running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except self._nvml.NVMLError:
                continue
            most_mib = max(
                most_mib, sum(process.usedGpuMemory or 0 for process in running if process.pid in requested) / MIB
            )
        if most_mib == 0.0 and requested:
            most_mib = max(
                (gpu.used_mib - self._initial_mib.get(gpu.name, gpu.used_mib) for gpu in gpu_use()), default=0.0
            )
        return max(0.0, most_mib)


WAIT_S = 30.0
"""Longest time to wait for memory to become free, s. Later the memory belongs to other processes."""
POLL_S = 0.1
"""Interval between readings while waiting, s."""
NEAR_MIB = 64.0
"""Tolerance when used memory is compared with that before an earlier trial, MiB."""
FLOOR = "used-of-gpu-"
"""Prefix of a file in the host agent's folder that contains the used memory of a GPU before the last trial, MiB."""


def wait_for_room(
    names: Sequence[str],
    folder: str | Path | None,
    notify: Callable[[str], None],
    *,
    cancelled: Callable[[], bool] = lambda: False,
    use: Callable[[Sequence[str]], list[GpuUse]] = gpu_use,
) -> float:
    """Waits until the memory of earlier trials is free, and returns the memory still used on the fullest GPU, MiB.

    Args:
        names: the GPUs, as in `CUDA_VISIBLE_DEVICES`.
        folder: contains the used memory before earlier trials; None to not wait.
        notify: called with messages about the wait and about memory of other processes.
        cancelled: returns True when the trial is not needed any more.
        use: reads the used memory.
    """
    begin, uses = time.monotonic(), use(names)
    files = {gpu.name: Path(folder, FLOOR + gpu.name.replace("/", "-")) for gpu in uses} if folder is not None else {}
    floors = {name: float(file.read_text()) for name, file in files.items() if file.exists()}

    def unfreed(uses: list[GpuUse]) -> list[GpuUse]:
        return [gpu for gpu in uses if gpu.used_mib > floors.get(gpu.name, gpu.used_mib) + NEAR_MIB]

    waited_for = unfreed(uses)
    while unfreed(uses) and time.monotonic() - begin < WAIT_S and not cancelled():
        time.sleep(POLL_S)
        uses = use(names)
    if waited_for:
        seconds, still_unfreed = time.monotonic() - begin, unfreed(uses)
        for gpu in still_unfreed:
            notify(
                f"GPU {gpu.name}: after {seconds:.0f} s {gpu.used_mib:,.0f} of {gpu.total_mib:,.0f} MiB are still used, "
                f"{gpu.used_mib - floors[gpu.name]:,.0f} more than before; other processes use them now"
            )
        if not still_unfreed:
            notify(
                f"waited {seconds:.1f} s until the memory of GPU {', '.join(gpu.name for gpu in waited_for)} was free again"
            )
    for gpu in uses if files else ():
        # Memory that was not freed belongs to other processes: later trials do not wait for it.
        files[gpu.name].write_text(f"{gpu.used_mib}")
    return max((gpu.used_mib for gpu in uses), default=0.0)


NEAR = 0.9
"""Used share of memory from which it counts as short; earlyoom and systemd-oomd kill from there on."""
SAMPLE_S = 0.5
"""Interval between samples of memory during a trial, s. A sample takes some tens of microseconds."""


@dataclass(frozen=True, slots=True)
class _ProcessMemory:
    """A process's memory at one moment, MiB."""

    resident: float
    anonymous: float


class Shortage:
    """Samples the memory of one trial's ranks on this host, to explain kills. Must be created before they start.

    Args:
        limit_mib: host memory limit of a rank, MiB; None for none.
        proc: this process's folder in /proc, for its control groups.
    """

    def __init__(self, limit_mib: float | None = None, *, proc: Path = Path("/proc/self")) -> None:
        self._limit_mib = limit_mib
        self._groups = memory_groups(proc)
        self._total_mib = total_memory_mib(self._groups)
        self._free_mib = free_memory_mib(self._groups)
        self._initial_kills = self._kills()
        self._initial: dict[int, _ProcessMemory] = {}
        self._latest: dict[int, _ProcessMemory] = {}

    def look(self, pids: Sequence[int]) -> None:
        """Records the memory of these processes and the free memory."""
        self._free_mib = free_memory_mib(self._groups)
        for pid in pids:
            memory = _process_memory(pid)
            if memory is not None:
                self._initial.setdefault(pid, memory)
                self._latest[pid] = memory

    def evidence(self, pid: int, peak_resident_mib: float = 0.0) -> str | None:
        """Returns evidence that memory was short when a process ended; None without evidence.

        Args:
            pid: the process, which has ended.
            peak_resident_mib: its peak resident set, as reported by the kernel at its end, MiB.
        """
        kills, initial = self._kills(), self._initial_kills
        if kills is not None and initial is not None and kills[0] > initial[0]:
            return f"oom_kill of {kills[1]} rose from {initial[0]} to {kills[0]}"
        latest = self._latest.get(pid)
        # Memory allocated between the last sample and its end.
        grown_mib = max(0.0, peak_resident_mib - latest.resident) if latest is not None else 0.0
        if latest is not None and self._limit_mib is not None:
            used_mib = latest.anonymous - self._initial[pid].anonymous + grown_mib
            if used_mib >= NEAR * self._limit_mib:
                return f"it used {used_mib:,.0f} of its limit of {self._limit_mib:,.0f} MiB"
        free_mib = max(0.0, self._free_mib - grown_mib)
        if free_mib <= (1 - NEAR) * self._total_mib:
            return f"{free_mib:,.0f} of {self._total_mib:,.0f} MiB of host memory were left"
        return None

    def _kills(self) -> tuple[int, str] | None:
        """Returns the kernel's count of out-of-memory kills and its scope: the control group if it counts them, else
        the machine.
        """
        for group in self._groups:
            if group.oom_kills is not None:
                return group.oom_kills, "its control group"
        try:
            with open("/proc/vmstat") as file:
                fields = dict(line.split() for line in file)
        except OSError:
            return None
        return (int(fields["oom_kill"]), "this machine") if "oom_kill" in fields else None


def _process_memory(pid: int) -> _ProcessMemory | None:
    """Returns a process's memory; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    fields = dict(re.findall(r"^(VmRSS|RssAnon):\s+(\d+)", status, re.MULTILINE))
    if len(fields) < 2:
        return None
    return _ProcessMemory(int(fields["VmRSS"]) / 1024, int(fields["RssAnon"]) / 1024)
