"""Host memory available to a process: limits and free memory of the machine and its control groups (Linux)."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from .control_groups import OWN, control_groups, read

MIB = 1024 * 1024
_NO_LIMIT = 1 << 60
"""Bytes from which a limit means none: version 1 writes the largest multiple of a page for it."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group with the memory controller."""

    folder: Path
    """Its folder below the mount point."""
    version: int
    """1 or 2."""

    @property
    def limit_mib(self) -> float | None:
        """Limit of this group, MiB; None if it has none."""
        limit = _number(self.folder / ("memory.max" if self.version == 2 else "memory.limit_in_bytes"))
        return None if limit is None or limit >= _NO_LIMIT else limit / MIB

    @property
    def free_mib(self) -> float | None:
        """Free memory within the limit, MiB, with reclaimable cached files counted as free. None without a limit."""
        limit = self.limit_mib
        if limit is None:
            return None
        new = self.version == 2
        used = _number(self.folder / ("memory.current" if new else "memory.usage_in_bytes")) or 0
        cached = _field(self.folder / "memory.stat", "inactive_file" if new else "total_inactive_file") or 0
        return max(0.0, limit - max(0, used - cached) / MIB)

    @property
    def oom_kills(self) -> int | None:
        """Number of its processes that the kernel killed for lack of memory; None if it is not counted."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return _field(self.folder / name, "oom_kill")

    @property
    def kills_all(self) -> bool:
        """True if the kernel kills all of its processes together when it is out of memory, as Kubernetes sets it."""
        return self.version == 2 and _number(self.folder / "memory.oom.group") == 1


def memory_groups(proc: Path = OWN) -> tuple[MemoryGroup, ...]:
    """Returns the control group of a process and its ancestors, innermost first; empty if they are not visible.

    Args:
        proc: the process's folder in /proc.
    """
    version, folders = control_groups("memory", proc)
    return tuple(MemoryGroup(folder, version) for folder in folders)


def total_memory_mib(groups: tuple[MemoryGroup, ...]) -> float:
    """Memory of the machine, or the lowest limit of these groups, MiB."""
    limits = [group.limit_mib for group in groups]
    return min([psutil.virtual_memory().total / MIB, *(limit for limit in limits if limit is not None)])


def shared_memory(folder: str = "/dev/shm") -> tuple[int, int] | None:
    """Returns free and total bytes of the shared-memory file system; None if there is none."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free, usage.total


def free_memory_mib(groups: tuple[MemoryGroup, ...]) -> float:
    """Memory available without swapping, of the machine and within the limits of these groups, MiB."""
    free = [group.free_mib for group in groups]
    return min([psutil.virtual_memory().available / MIB, *(amount for amount in free if amount is not None)])


def _number(path: Path) -> int | None:
    content = read(path).strip()
    return int(content) if content.isdigit() else None


def _field(path: Path, name: str) -> int | None:
    for line in read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return None
