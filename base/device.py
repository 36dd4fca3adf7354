"""The devices at hand, found without touching them."""

import importlib.util
import os
import platform
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import psutil

from .errors import not_installed
from .gpus import VARIABLE, find_gpus
from .host_memory import MIB, free_memory_mib, memory_groups

DESCRIBED = "described"
"""Feature of a device that is not at hand: what this machine lacks says nothing about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A kind of device and how many of it there are. Detection creates no CUDA context."""

    type: str
    """`cuda` or `cpu`, as torch names it."""
    name: str
    """Marketing name."""
    count: int
    """Devices present; a machine's CPU counts as one."""
    memory_mib: int
    """Memory of one device, MiB."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability."""
    features: frozenset[str] = frozenset()
    """CPU: native number formats, of `bf16` and `fp16`. `DESCRIBED` where the device is not at hand."""

    def to_dict(self) -> dict[str, Any]:
        """A YAML-ready mapping."""
        out = asdict(self)
        out["capability"] = ".".join(map(str, self.capability)) if self.capability else None
        out["features"] = sorted(self.features)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Device":
        """The inverse of `to_dict`; unknown keys are ignored."""
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
    """The GPUs that CUDA shows to this process, or the machine's CPU where there are none.

    Raises:
        UsageError: there are GPUs, but `CUDA_VISIBLE_DEVICES` names none of them, or NVML fails.
        MissingDependency: there is a GPU, but pynvml is not installed.
    """
    return _cuda() or _cpu()


def fusion_obstacle(device: Device) -> str | None:
    """Why `torch.compile` cannot work on this device, or None where it can.

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
    if not any(each and shutil.which(each) for each in compilers):
        return f"there is no compiler ({' or '.join(each for each in compilers if each)})"
    include = sysconfig.get_path("include")
    if not os.path.isfile(os.path.join(include, "Python.h")):
        return f"Python's headers are missing ({include}/Python.h)"
    return None


def float8_obstacle(device: Device) -> str:
    """Why a device does not multiply numbers of 8 bits, or empty where it does.

    Source: https://docs.pytorch.org/ao/stable/ (torchao.float8), which asks for compute capability 8.9.
    """
    if device.type != "cuda":
        return "a CPU does not multiply numbers of 8 bits"
    if (device.capability or (0, 0)) < (8, 9):
        found = ".".join(map(str, device.capability or (0, 0)))
        return f"8-bit products need compute capability 8.9, and this device has {found}"
    return "" if DESCRIBED in device.features else not_installed("torchao", "fp8")


def liger_obstacle(device_type: str) -> str:
    """Why `kernels` leaves modules as they are, or empty where Liger-Kernel's replace them."""
    return not_installed("liger_kernel", "kernels") if device_type == "cuda" else "they are for GPUs"


def available_memory_mib() -> int:
    """Host memory that can be taken without swapping, MiB; a control group's limit counts."""
    return int(free_memory_mib(memory_groups()))


def usable_cores() -> int:
    """Cores this process may use, at least 1: its affinity and the control group's quota count, not the machine."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _cgroup_text("cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def _cgroup_text(name: str) -> str:
    try:
        with open(f"/sys/fs/cgroup/{name}") as file:
            return file.read().strip()
    except OSError:
        return ""


def _cuda() -> Device | None:
    gpus = find_gpus()
    if not gpus:
        return None
    return Device(
        type="cuda",
        name=gpus[0].model,
        count=len(gpus),
        memory_mib=min(each.memory_mib for each in gpus),
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
        memory_mib=psutil.virtual_memory().total // MIB,
        features=frozenset(features),
    )


def visible_gpus(count: int) -> list[str]:
    """The GPUs that CUDA shows to this process, as CUDA_VISIBLE_DEVICES names them; `count` of them where nothing names any."""
    found = [each.name for each in find_gpus()]
    visible = os.environ.get(VARIABLE)
    if found and visible is None:
        return found[:count]
    if found or visible is None:
        return found or [str(each) for each in range(count)]
    return [each.strip() for each in visible.split(",") if each.strip()]
