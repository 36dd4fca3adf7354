"""A rank's memory: its limit and its peak.

On a CPU the limit is RLIMIT_DATA, which counts private writable mappings (`man 2 setrlimit`, Linux 4.7
and later), and the peak is that of the anonymous resident set; both count from the fork, so that the
interpreter and the libraries, which every candidate shares, cost nothing. On CUDA the limit is the
allocator's share of the device and the peak what it reserved.
"""

import resource
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MIB = 1024 * 1024
_STACK = 2 * MIB
"""A thread's stack where RLIMIT_STACK names none, on x86-64."""


def _status(*names: str) -> list[int]:
    """Fields of /proc/self/status, KiB."""
    values = dict.fromkeys(names, 0)
    with open("/proc/self/status") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in values:
                values[name] = int(rest.split()[0])
    return [values[name] for name in names]


_HANDLES = 256 * MIB
"""More than the handle of a CUDA library takes of a device, its kernels included. cuBLAS has 32 MiB of workspace on compute
capability 9.0 (https://docs.nvidia.com/cuda/cublas, cublasSetWorkspace); the rest is an assumption."""


class MemoryMeter(ABC):
    """Limits and measures the memory of this process on its device."""

    @abstractmethod
    def limit(self, limit_mib: float) -> None:
        """Makes every allocation past `limit_mib` fail."""

    @abstractmethod
    def peak_mib(self) -> float:
        """Peak since the meter was made, MiB."""

    @abstractmethod
    def held_mib(self) -> float:
        """What is held now, MiB."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is allocated within counts towards no peak, where the allocator can leave it out."""
        yield

    def peak_allocated_mib(self) -> float | None:
        """Peak of the bytes in live tensors where the allocator tells, MiB."""
        return None

    def allocation_retries(self) -> int:
        """Times the allocator flushed its cache to serve a request."""
        return 0

    def outside_mib(self) -> float | None:
        """What the device lacks that no tensor of this process has: contexts, libraries, other processes. MiB."""
        return None

    def shortage(self) -> str:
        """What says that there is no room for even what the smallest request needs, in words; empty where nothing does."""
        return ""


class HostMemoryMeter(MemoryMeter):
    """Memory of a CPU rank. Make it right after the fork, before anything is allocated."""

    def __init__(self) -> None:
        (self._base_kib,) = _status("RssAnon")

    def limit(self, limit_mib: float) -> None:
        """Sets RLIMIT_DATA to what the process has mapped already plus `limit_mib`."""
        (mapped_kib,) = _status("VmData")
        limit = mapped_kib * 1024 + int(limit_mib * MIB)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def lift(self) -> None:
        """Takes the limit away, so that a failed rank has the memory to report."""
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def shortage(self) -> str:
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        # What glibc takes for a thread (`man 3 pthread_create`).
        stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
        if limit == resource.RLIM_INFINITY:
            return ""
        (mapped_kib,) = _status("VmData")
        fits = mapped_kib * 1024 + (_STACK if stack == resource.RLIM_INFINITY else stack) <= limit
        return "" if fits else "not even a thread's stack fits under the limit"

    def peak_mib(self) -> float:
        # The kernel keeps a high-water mark of the whole resident set only. File pages (libraries) are
        # touched once and stay, so what is there now is what was there at the peak.
        peak_kib, file_kib, shared_kib = _status("VmHWM", "RssFile", "RssShmem")
        return max(0.0, (peak_kib - file_kib - shared_kib - self._base_kib) / 1024)

    def held_mib(self) -> float:
        (now_kib,) = _status("RssAnon")
        return max(0.0, (now_kib - self._base_kib) / 1024)


class CudaMemoryMeter(MemoryMeter):
    """Memory of a process's CUDA devices, the fullest of them, by torch's caching allocator."""

    def __init__(self, devices: "Sequence[torch.device]") -> None:
        import torch

        self._cuda = torch.cuda
        self._devices = list(devices)
        self._reserved_before = self._allocated_before = 0
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)

    def limit(self, limit_mib: float) -> None:
        """Caps the caching allocator; context and NCCL are outside of it."""
        for device in self._devices:
            total_mib = self._cuda.get_device_properties(device).total_memory / MIB
            self._cuda.set_per_process_memory_fraction(min(1.0, limit_mib / total_mib), device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is allocated within counts towards no peak; of what is freed in it nothing stays reserved."""
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

    def shortage(self) -> str:
        for device in self._devices:
            try:
                free, total = self._cuda.mem_get_info(device)
            except RuntimeError:  # after a failed assertion the device answers nothing
                continue
            if free < _HANDLES:
                return f"{free / MIB:,.0f} of {total / MIB:,.0f} MiB of {device} are free"
        return ""

    def outside_mib(self) -> float | None:
        most = 0.0
        for device in self._devices:
            free, total = self._cuda.mem_get_info(device)
            most = max(most, (total - free - self._cuda.memory_reserved(device)) / MIB)
        return most

    def _peak_reserved(self) -> int:
        return max(self._reserved_before, *(self._cuda.max_memory_reserved(device) for device in self._devices))

    def _peak_allocated(self) -> int:
        return max(self._allocated_before, *(self._cuda.max_memory_allocated(device) for device in self._devices))

    def allocation_retries(self) -> int:
        told = (self._cuda.memory_stats(device) for device in self._devices)
        return sum(int(each.get("num_alloc_retries", 0)) for each in told)


class GpuMemory:
    """What processes of others hold of this host's GPUs, as NVML tells; nothing where it does not."""

    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError:
            self._handles = []

    def held_mib(self, pids: Iterable[int]) -> float:
        """What these processes hold together on the device where that is most, MiB."""
        wanted, most = set(pids), 0.0
        for handle in self._handles:
            try:
                running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except self._nvml.NVMLError:
                continue
            most = max(most, sum(each.usedGpuMemory or 0 for each in running if each.pid in wanted) / MIB)
        return most
