"""Control groups of a process (Linux), by which containers and batch systems limit memory and cores.

Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/,
`man 5 proc_pid_mountinfo`.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

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
