"""Control groups of both versions are found as the kernel shows them, and the tightest limit counts."""

import psutil
import pytest
from redline.base.host_memory import MIB, cpu_quota, free_memory_mib, memory_groups, total_memory_mib

MOUNTS = {
    1: "36 25 0:30 {root} {point} rw,nosuid shared:9 - cgroup cgroup rw,cpu,memory",
    2: "36 25 0:30 {root} {point} rw,nosuid shared:9 - cgroup2 cgroup rw,nsdelegate",
}
LINES = {1: "9:name=systemd:/\n4:cpu,memory:{path}\n0::/", 2: "0::{path}"}
LIMIT, USED = {1: "memory.limit_in_bytes", 2: "memory.max"}, {1: "memory.usage_in_bytes", 2: "memory.current"}
CACHED, KILLS = {1: "total_inactive_file", 2: "inactive_file"}, {1: "memory.oom_control", 2: "memory.events"}
NONE = {1: str(2**63 - 4096), 2: "max"}


class Kernel:
    """Files that imitate /proc and a mounted hierarchy."""

    def __init__(self, folder, version, path="/jobs/7", root="/"):
        self.version, self.proc, self.point = version, folder / "proc", folder / "mounted"
        self.proc.mkdir(parents=True)
        other = "35 25 0:29 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids"
        mount = MOUNTS[version].format(root=root, point=self.point)
        (self.proc / "mountinfo").write_text(f"24 1 0:22 / /proc rw - proc proc rw\n{other}\n{mount}\n")
        (self.proc / "cgroup").write_text(LINES[version].format(path=path) + "\n")

    def group(self, path, limit=None, used=0, cached=0, kills=0):
        folder = self.point / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LIMIT[self.version]).write_text(NONE[self.version] if limit is None else str(limit * MIB))
        (folder / USED[self.version]).write_text(str(used * MIB))
        (folder / "memory.stat").write_text(f"anon 1\n{CACHED[self.version]} {cached * MIB}\nactive_file 5\n")
        (folder / KILLS[self.version]).write_text(f"oom 0\nunder_oom 0\noom_kill {kills}\n")

    @property
    def groups(self):
        return memory_groups(self.proc)


@pytest.mark.parametrize("version", [1, 2])
def test_the_group_and_those_around_it_are_read(tmp_path, version):
    kernel = Kernel(tmp_path, version)
    kernel.group("jobs/7", limit=512, used=300, cached=100, kills=3)
    kernel.group("jobs")
    assert [each.folder for each in kernel.groups] == [kernel.point / "jobs/7", kernel.point / "jobs", kernel.point]
    inner, outer, root = kernel.groups
    assert (inner.limit_mib, inner.free_mib, inner.oom_kills) == (512, 312, 3)
    assert (outer.limit_mib, outer.free_mib, outer.oom_kills) == (None, None, 0)
    assert (root.limit_mib, root.oom_kills) == (None, None)


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_limit_counts_wherever_it_is(tmp_path, version):
    kernel = Kernel(tmp_path, version)
    kernel.group("jobs/7", limit=200, used=50)
    kernel.group("jobs", limit=300, used=290)
    assert total_memory_mib(kernel.groups) == 200
    assert free_memory_mib(kernel.groups) == 10
    kernel.group("jobs/7")
    assert total_memory_mib(kernel.groups) == 300


def test_without_limits_it_is_the_machines(tmp_path):
    kernel = Kernel(tmp_path, 2)
    kernel.group("jobs/7")
    assert total_memory_mib(kernel.groups) == psutil.virtual_memory().total / MIB


def test_a_machine_without_control_groups_has_none(tmp_path):
    assert memory_groups(tmp_path / "proc") == ()
    assert total_memory_mib(()) == psutil.virtual_memory().total / MIB


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_quota_of_cores_counts_wherever_it_is(tmp_path, version):
    kernel = Kernel(tmp_path, version)

    def limit(path, quota):
        folder = kernel.point / path
        folder.mkdir(parents=True, exist_ok=True)
        if version == 2:
            (folder / "cpu.max").write_text(f"{'max' if quota is None else quota} 100000\n")
        else:
            (folder / "cpu.cfs_quota_us").write_text(f"{-1 if quota is None else quota}\n")
            (folder / "cpu.cfs_period_us").write_text("100000\n")

    assert cpu_quota(kernel.proc) is None
    limit("jobs/7", None)
    assert cpu_quota(kernel.proc) is None
    limit("jobs", 150_000)
    assert cpu_quota(kernel.proc) == 1.5
    limit("jobs/7", 50_000)
    assert cpu_quota(kernel.proc) == 0.5


def test_a_group_whose_processes_are_killed_together_is_known(tmp_path):
    kernel = Kernel(tmp_path, 2)
    kernel.group("jobs/7")
    assert not kernel.groups[0].kills_all
    (kernel.point / "jobs/7/memory.oom.group").write_text("1\n")
    assert kernel.groups[0].kills_all and not kernel.groups[1].kills_all
