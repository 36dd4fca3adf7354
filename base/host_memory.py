"""Host memory available to a process: limits and free memory of the machine and its control groups, by which containers and
batch systems limit memory and cores (Linux).

Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/,
`man 5 proc_pid_mountinfo`.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

OWN = Path("/proc/self")


class Groups(NamedTuple):
    """The control group of a process and its ancestors, for one controller."""

    version: int
    """1 or 2."""
    folders: tuple[Path, ...]
    """Below the mount point, innermost first; empty if they are not visible."""


def control_groups(controller: str, proc: Path = OWN) -> Groups:
    """Returns the control groups of a process.

    Args:
        controller: `memory` or `cpu`.
        proc: the process's folder in /proc.
    """
    paths: dict[int, str] = {}
    for line in read(proc / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            paths[1] = path
        elif number == "0":
            paths[2] = path
    mounts: dict[int, tuple[str, str]] = {}
    for line in read(proc / "mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        root, point = mount.split()[3:5]
        kind, *_, options = source.split()
        if kind == "cgroup2":
            mounts.setdefault(2, (root, point))
        elif kind == "cgroup" and controller in options.split(","):
            mounts.setdefault(1, (root, point))
    version = 1 if 1 in paths and 1 in mounts else 2  # a controller belongs to only one of the versions
    if version not in paths or version not in mounts:
        return Groups(version, ())
    return Groups(version, tuple(_upwards(paths[version], *mounts[version])))


def cpu_quota(proc: Path = OWN) -> float | None:
    """Returns the number of cores whose time a process and the others of its groups may use; None without a limit."""
    version, folders = control_groups("cpu", proc)
    quotas = []
    for folder in folders:
        if version == 2:
            quota, _, period = read(folder / "cpu.max").strip().partition(" ")
        else:
            quota, period = (read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):  # otherwise `max`, or -1
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def read(path: Path) -> str:
    """Returns the content of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _upwards(path: str, root: str, point: str) -> Iterator[Path]:
    """Yields the folder of a group and of its ancestors up to the mount point, at which `root` is mounted."""
    group = PurePosixPath(path)
    below = group.relative_to(root).parts if group.is_relative_to(root) else ()
    if ".." in below:  # the group is outside of this namespace
        below = ()
    for count in range(len(below), -1, -1):
        yield Path(point, *below[:count])


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
