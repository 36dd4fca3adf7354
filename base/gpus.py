"""NVIDIA GPUs that CUDA shows to this process, found by NVML without creating a CUDA context.

Sources: CUDA C++ Programming Guide, "CUDA environment variables"; NVIDIA Multi-Instance GPU User Guide; the NVML API
reference.
"""

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .errors import MissingDependency, UsageError
from .host_memory import MIB

VARIABLE = "CUDA_VISIBLE_DEVICES"
DEVICE_FILE = "/dev/nvidia0"
"""Exists if the driver has a GPU."""
NO_DEVICE = ("", "-1", "NoDevFiles")
"""Values of the variable's first entry that hide all GPUs, as users or Slurm set it."""

# Return codes of NVML (nvml.h).
_NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND, _NO_DRIVER, _NO_LIBRARY, _NO_FUNCTION, _NO_GPU = 3, 4, 6, 9, 12, 13, 28


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU, or a MIG instance."""

    name: str
    """Entry of `CUDA_VISIBLE_DEVICES`: an index or a UUID."""
    model: str
    memory_mib: int
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Present:
    """A GPU that this process may use."""

    handle: Any
    uuid: str
    instances: list[Any] | None
    """Handles of its MIG instances; None if MIG is off."""


def find_gpus() -> list[Gpu]:
    """Returns the GPUs that CUDA shows to this process, in CUDA's order; empty if there are none or all are hidden on
    purpose.

    Raises:
        UsageError: there are GPUs, but `CUDA_VISIBLE_DEVICES` names none of them, or NVML fails.
        MissingDependency: there is a GPU, but pynvml is not installed.
    """
    setting = os.environ.get(VARIABLE)
    if setting is not None and setting.split(",")[0].strip() in NO_DEVICE:
        return []
    if importlib.util.find_spec("pynvml") is None:
        if os.path.exists(DEVICE_FILE):
            raise MissingDependency(
                f"this machine has an NVIDIA GPU ({DEVICE_FILE}), but pynvml, which redline needs to find it, is not installed: "
                f"pip install nvidia-ml-py, or set {VARIABLE}= (empty) to train on the CPU"
            )
        return []
    with _nvml() as nvml:
        return [] if nvml is None else _visible(nvml, setting)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """Memory of a GPU and its use by all processes, MiB."""

    name: str
    """As in `CUDA_VISIBLE_DEVICES`."""
    total_mib: float
    used_mib: float
    """Excludes memory that the driver reserves for itself."""


def gpu_use(names: Sequence[str] = ()) -> list[GpuUse]:
    """Returns the memory use of GPUs by all processes; of all GPUs that CUDA shows to this process if `names` is
    empty.

    Empty if there are no GPUs, or NVML cannot report it.
    """
    setting = ",".join(names) or os.environ.get(VARIABLE)
    if importlib.util.find_spec("pynvml") is None:
        return []
    try:
        with _nvml() as nvml:
            if nvml is None:
                return []
            chosen = _chosen(nvml, _present(nvml, nvml.nvmlDeviceGetCount()), setting)
            return [_use(nvml, name, handle) for name, handle, _ in chosen]
    except UsageError:  # the code that needs the GPU reports the error
        return []


def _use(nvml: Any, name: str, handle: Any) -> GpuUse:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    return GpuUse(name=name, total_mib=memory.total / MIB, used_mib=memory.used / MIB)


@contextmanager
def _nvml() -> Iterator[Any]:
    """Yields NVML, or None if it finds no GPU.

    Raises:
        UsageError: NVML fails.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value not in (_NO_LIBRARY, _NO_DRIVER, _NO_GPU):
            raise _unusable(error) from error
        yield None
        return
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise _unusable(error) from error
    finally:
        pynvml.nvmlShutdown()


def _unusable(error: Exception) -> UsageError:
    return UsageError(
        f"NVML cannot describe this machine's GPUs: {error}. Check that nvidia-smi works, or set {VARIABLE}= (empty) to "
        "train on the CPU"
    )


def _visible(nvml: Any, setting: str | None) -> list[Gpu]:
    count = nvml.nvmlDeviceGetCount()
    present = _present(nvml, count)
    chosen = _chosen(nvml, present, setting)
    # CUDA shows a process either whole GPUs or a single MIG instance.
    if chosen and chosen[0][2]:
        chosen = chosen[:1]
    gpus = [_described(nvml, name, handle, parent) for name, handle, parent in chosen if not parent or len(chosen) == 1]
    if not gpus and count and setting is not None:
        names = (
            ", ".join(f"{index}: {gpu.uuid}" for index, gpu in enumerate(present)) or "none that this process may use"
        )
        raise UsageError(
            f"{VARIABLE}={setting} names none of this machine's GPUs ({names}), so CUDA would show none. Name one by its index "
            "or the beginning of its UUID, unset the variable, or set it empty to train on the CPU"
        )
    if not gpus and present:
        raise UsageError(
            "all GPUs of this machine are in MIG mode and have no instance: create one (nvidia-smi mig -cgi), or set "
            f"{VARIABLE}= (empty) to train on the CPU"
        )
    return gpus


def _present(nvml: Any, count: int) -> list[_Present]:
    """Returns the GPUs that this process may use. A batch system's control group hides the others, and CUDA does not
    count them.
    """
    present = []
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            if error.value == _NO_PERMISSION:
                continue
            raise
        present.append(
            _Present(handle=handle, uuid=_text(nvml.nvmlDeviceGetUUID(handle)), instances=_instances(nvml, handle))
        )
    return present


def _instances(nvml: Any, handle: Any) -> list[Any] | None:
    try:
        mode, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError as error:
        if error.value in (_NOT_SUPPORTED, _NO_FUNCTION):
            return None
        raise
    if not mode:
        return None
    instances = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instances.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except nvml.NVMLError as error:
            if error.value != _NOT_FOUND:
                raise
    return instances


_Choice = tuple[str, Any, Any]
"""Name, handle, and for a MIG instance the handle of its GPU, else None."""


def _chosen(nvml: Any, present: list[_Present], setting: str | None) -> list[_Choice]:
    """Returns the GPUs that the variable selects: all before the first invalid entry, and none if one is repeated."""
    entries = list(map(str, range(len(present)))) if setting is None else setting.split(",")
    by_uuid = setting is not None and setting.strip().startswith(("GPU-", "MIG-"))
    chosen: list[_Choice] = []
    seen: list[Any] = []
    for entry in map(str.strip, entries):
        match = _with_uuid(nvml, present, entry) if by_uuid else _at_index(present, entry)
        if match is None:
            break
        handle, parent = match
        if (handle or parent) in seen:
            return []
        seen.append(handle or parent)
        if handle is not None:  # a GPU in MIG mode without instances has an index, but is not shown
            chosen.append((entry, handle, parent))
    return chosen


def _at_index(present: list[_Present], entry: str) -> tuple[Any, Any] | None:
    """Returns the GPU at an index, parsed as CUDA does (`strtoul`); for a GPU in MIG mode its first instance."""
    number = re.match(r"\+?(\d+)", entry)
    if number is None or int(number[1]) >= len(present):
        return None
    gpu = present[int(number[1])]
    if gpu.instances is None:
        return gpu.handle, None
    return (gpu.instances[0] if gpu.instances else None), gpu.handle


def _with_uuid(nvml: Any, present: list[_Present], entry: str) -> tuple[Any, Any] | None:
    """Returns the GPU or MIG instance whose UUID starts with `entry`, if there is exactly one."""
    pairs: list[tuple[Any, Any]] = []
    for gpu in present:
        if entry.startswith("GPU-") and gpu.uuid.startswith(entry):
            pairs.append((gpu.handle, None) if gpu.instances is None else (next(iter(gpu.instances), None), gpu.handle))
        for mig in gpu.instances or () if entry.startswith("MIG-") else ():
            if _text(nvml.nvmlDeviceGetUUID(mig)).startswith(entry):
                pairs.append((mig, gpu.handle))
    return pairs[0] if len(pairs) == 1 else None


def _described(nvml: Any, name: str, handle: Any, parent: Any) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(parent or handle)
    return Gpu(
        name=name,
        model=_text(nvml.nvmlDeviceGetName(handle)),
        memory_mib=int(nvml.nvmlDeviceGetMemoryInfo(handle).total) // MIB,
        capability=(int(major), int(minor)),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@contextmanager
def gpus_described() -> Iterator[None]:
    """Answers packages that ask for the compute capability of a GPU when they are imported without initialising CUDA.

    torchao calls `has_triton()`, which needs the capability, and transformers imports torchao. A process that has initialised
    CUDA holds some hundred MiB of the GPU, and no process forked from it can use one. torch's compile workers, which must not
    initialise CUDA either, use the same two dictionaries (torch._inductor.async_compile).
    """
    try:
        gpus = find_gpus()
    except (UsageError, MissingDependency):  # an error where devices are needed, not here
        gpus = []
    if not gpus:
        yield
        return
    import torch

    from ._torch import current_devices, device_properties

    if torch.cuda.is_initialized() or "cuda" in device_properties:
        yield
        return
    device_properties["cuda"] = [SimpleNamespace(major=gpu.capability[0], minor=gpu.capability[1]) for gpu in gpus]
    current_devices["cuda"] = 0
    try:
        yield
    finally:
        # Everything else reads the properties of the device.
        del device_properties["cuda"], current_devices["cuda"]
