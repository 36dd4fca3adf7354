"""Host memory available to a process: limits and free memory of the machine and its control groups (Linux)."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

MIB = 1024 * 1024
_NO_LIMIT = 1 << 60
"""Bytes from which a limit means none: version 1 writes the largest multiple of a page for it."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group with the memory controller.

    Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html,
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """

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


def memory_groups(proc: Path = Path("/proc/self")) -> tuple[MemoryGroup, ...]:
    """Returns the control group of a process and its ancestors, innermost first; empty if they are not visible.

    Args:
        proc: the process's folder in /proc.
    """
    paths: dict[int, str] = {}
    for line in _read(proc / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths[1] = path
        elif number == "0":
            paths[2] = path
    mounts: dict[int, tuple[str, str]] = {}
    for line in _read(proc / "mountinfo").splitlines():  # `man 5 proc_pid_mountinfo`
        mount, _, source = line.partition(" - ")
        root, point = mount.split()[3:5]
        kind, *_, options = source.split()
        if kind == "cgroup2":
            mounts.setdefault(2, (root, point))
        elif kind == "cgroup" and "memory" in options.split(","):
            mounts.setdefault(1, (root, point))
    version = 1 if 1 in paths and 1 in mounts else 2  # a controller belongs to only one of the versions
    if version not in paths or version not in mounts:
        return ()
    return tuple(MemoryGroup(folder, version) for folder in _upwards(paths[version], *mounts[version]))


def total_memory_mib(groups: tuple[MemoryGroup, ...]) -> float:
    """Memory of the machine, or the lowest limit of these groups, MiB."""
    limits = [each.limit_mib for each in groups]
    return min([psutil.virtual_memory().total / MIB, *(each for each in limits if each is not None)])


def shared_memory(folder: str = "/dev/shm") -> tuple[int, int] | None:
    """Returns free and total bytes of the shared-memory file system; None if there is none."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free, usage.total


def free_memory_mib(groups: tuple[MemoryGroup, ...]) -> float:
    """Memory available without swapping, of the machine and within the limits of these groups, MiB."""
    free = [each.free_mib for each in groups]
    return min([psutil.virtual_memory().available / MIB, *(each for each in free if each is not None)])


def _upwards(path: str, root: str, point: str) -> Iterator[Path]:
    """Yields the folder of a group and of its ancestors up to the mount point, at which `root` is mounted."""
    group = PurePosixPath(path)
    below = group.relative_to(root).parts if group.is_relative_to(root) else ()
    if ".." in below:  # the group is outside of this namespace
        below = ()
    for count in range(len(below), -1, -1):
        yield Path(point, *below[:count])


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int | None:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
