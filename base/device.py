"""Detection of the local devices, without creating a CUDA context."""

import importlib.util
import os
import platform
import shutil
import sysconfig
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from .errors import not_installed
from .gpus import VARIABLE, find_gpus
from .host_memory import cpu_quota, free_memory_mib, memory_groups, total_memory_mib

DESCRIBED = "described"
"""Feature of a device that is described and not local: packages missing on this machine are not taken into account."""


SHARE_OF_HOST = 0.9
"""Share of a host's memory that ranks on its CPU may use together: the rest is for the page cache and the agent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device type and its number of devices. Detection creates no CUDA context."""

    type: str
    """`cuda` or `cpu`, as torch names it."""
    name: str
    """Marketing name."""
    count: int
    """Number of devices; the CPU counts as one."""
    memory_mib: int
    """Memory of one device, MiB."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability."""
    features: frozenset[str] = frozenset()
    """CPU: native number formats, `bf16` and `fp16`. `DESCRIBED` for a device that is not local."""

    def to_dict(self) -> dict[str, Any]:
        """Returns a YAML-ready mapping."""
        data = asdict(self)
        data["capability"] = ".".join(map(str, self.capability)) if self.capability else None
        data["features"] = sorted(self.features)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Device":
        """Inverse of `to_dict`; unknown keys are ignored."""
        capability = data.get("capability")
        major, minor = str(capability).split(".") if capability else ("0", "0")
        return cls(
            type=str(data["type"]),
            name=str(data["name"]),
            count=int(data["count"]),
            memory_mib=int(data["memory_mib"]),
            capability=(int(major), int(minor)) if capability else None,
            features=frozenset(data.get("features", ())),
        )


@lru_cache(maxsize=1)
def detect() -> Device:
    """Returns the GPUs that CUDA shows to this process, or the CPU if there are none.

    Raises:
        UsageError: there are GPUs, but `CUDA_VISIBLE_DEVICES` names none of them, or NVML fails.
        MissingDependency: there is a GPU, but pynvml is not installed.
    """
    return _cuda() or _cpu()


def fusion_obstacle(device: Device) -> str | None:
    """Returns the reason why `torch.compile` cannot work on this device, or None.

    On a CPU the generated code needs a C++ compiler and Python's headers, on CUDA triton and a C compiler.
    """
    if DESCRIBED in device.features:
        return None
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        compilers = [os.environ.get("CC", ""), "gcc", "clang", "cc"]
    else:
        compilers = [os.environ.get("CXX", ""), "g++", "clang++"]
    if not any(compiler and shutil.which(compiler) for compiler in compilers):
        return f"there is no compiler ({' or '.join(compiler for compiler in compilers if compiler)})"
    include = sysconfig.get_path("include")
    if not os.path.isfile(os.path.join(include, "Python.h")):
        return f"Python's headers are missing ({include}/Python.h)"
    return None


def float8_obstacle(device: Device) -> str | None:
    """Returns the reason why a device does not support 8-bit matrix products, or None.

    Source: https://docs.pytorch.org/ao/stable/ (torchao.float8), which requires compute capability 8.9.
    """
    if device.type != "cuda":
        return "a CPU does not support 8-bit products"
    if (device.capability or (0, 0)) < (8, 9):
        capability = ".".join(map(str, device.capability or (0, 0)))
        return f"8-bit products need compute capability 8.9, but this device has {capability}"
    return None if DESCRIBED in device.features else not_installed("torchao", "fp8")


def liger_obstacle(device_type: str) -> str | None:
    """Returns the reason why the knob `kernels` has no effect, or None if Liger-Kernel can replace modules."""
    return not_installed("liger_kernel", "kernels") if device_type == "cuda" else "Liger-Kernel needs a GPU"


def available_memory_mib() -> int:
    """Host memory that is available without swapping, MiB; limits of control groups count."""
    return int(free_memory_mib(memory_groups()))


def share_of_host(ranks: int = 1) -> float:
    """Memory of this host for each of `ranks` ranks, whole MiB: 90 % of what is free, divided evenly."""
    return float(int(available_memory_mib() * SHARE_OF_HOST / ranks))


def one_thread(name: str) -> ThreadPoolExecutor:
    """Returns an executor of one thread, whose CUDA device is that of the calling thread, if this process uses CUDA.

    A new thread uses device 0, where any CUDA call, as for pinned memory, would open a context from every rank."""
    import torch

    if not torch.cuda.is_initialized():
        return ThreadPoolExecutor(1, thread_name_prefix=name)
    current = torch.cuda.current_device()
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=torch.cuda.set_device, initargs=(current,))


def usable_cores() -> int:
    """Number of cores this process may use, at least 1, by its affinity and the quota of its control group."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def _cuda() -> Device | None:
    gpus = find_gpus()
    if not gpus:
        return None
    return Device(
        type="cuda",
        name=gpus[0].model,
        count=len(gpus),
        memory_mib=min(gpu.memory_mib for gpu in gpus),
        capability=gpus[0].capability,
    )


def _cpu() -> Device:
    flags, name = set(), platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    name = value.strip()
                elif key.strip() == "flags":
                    flags = set(value.split())
                    break
    except OSError:
        flags = set()
    features = set()
    if flags & {"avx512_bf16", "amx_bf16"}:
        features.add("bf16")
    if flags & {"avx512_fp16", "amx_fp16"}:
        features.add("fp16")
    return Device(
        type="cpu",
        name=f"{name} ({usable_cores()} cores)",
        count=1,
        memory_mib=int(total_memory_mib(memory_groups())),
        features=frozenset(features),
    )


def visible_gpus(count: int) -> list[str]:
    """Returns the GPUs that CUDA shows to this process, as CUDA_VISIBLE_DEVICES names them; `count` indices if
    neither NVML nor the variable names any.
    """
    detected = [gpu.name for gpu in find_gpus()]
    visible = os.environ.get(VARIABLE)
    if detected and visible is None:
        return detected[:count]
    if detected or visible is None:
        return detected or [str(index) for index in range(count)]
    return [entry.strip() for entry in visible.split(",") if entry.strip()]
