"""Whether memory was short when a rank was killed.

SIGKILL by itself says nothing of memory: the kernel's out-of-memory killer sends it, and so do people, batch
systems and deadlines. What speaks for memory is the kernel's own count and log, and how little was left.
"""

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.host_memory import free_memory_mib, memory_groups, total_memory_mib

NEAR = 0.9
"""Share of what there is from which memory counts as short; earlyoom and systemd-oomd kill from there on."""
SAMPLE_S = 0.5
"""How often memory is looked at while a trial runs, s. A look takes some tens of microseconds."""
_KILLED = re.compile(r"[^;]*Killed process (?P<pid>\d+) \([^)]*\)")


@dataclass(frozen=True, slots=True)
class _Held:
    """A rank's memory at one moment, MiB."""

    resident: float
    anonymous: float


class KernelLog:
    """What the kernel has logged since this was made (`man 4 kmsg`); nothing where it may not be read."""

    def __init__(self, path: str | os.PathLike[str] = "/dev/kmsg") -> None:
        self._lines: list[str] = []
        try:
            self._file: int | None = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:
            self._file = None

    def killed(self, pid: int) -> str:
        """The line with which the out-of-memory killer names this process; empty where there is none."""
        while self._file is not None:
            try:
                record = os.read(self._file, 8192)
            except OSError as error:
                if error.errno == errno.EPIPE:  # records were overwritten before they were read
                    continue
                record = b""
            if not record:
                break
            self._lines += record.decode(errors="replace").splitlines()
        for line in self._lines:
            match = _KILLED.search(line)
            if match and int(match["pid"]) == pid:
                return match[0]
        return ""

    def close(self) -> None:
        """Lets go of the log."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Shortage:
    """Watches memory on behalf of one trial's ranks on this host. Make it before they start.

    Args:
        limit_mib: host memory a rank may take, MiB; None where it has no limit of its own.
        log: the kernel's log.
        proc: this process's folder in /proc, for its control groups.
    """

    def __init__(
        self, limit_mib: float | None = None, *, log: KernelLog | None = None, proc: Path = Path("/proc/self")
    ) -> None:
        self._limit_mib = limit_mib
        self._log = log or KernelLog()
        self._groups = memory_groups(proc)
        self._total_mib = total_memory_mib(self._groups)
        self._free_mib = free_memory_mib(self._groups)
        self._counted = self._count()
        self._first: dict[int, _Held] = {}
        self._last: dict[int, _Held] = {}

    def look(self, pids: Sequence[int]) -> None:
        """Takes note of what these processes hold and of what is free."""
        self._free_mib = free_memory_mib(self._groups)
        for pid in pids:
            held = _held(pid)
            if held is not None:
                self._first.setdefault(pid, held)
                self._last[pid] = held

    def evidence(self, pid: int, peak_resident_mib: float = 0.0) -> str:
        """What says that memory was short when a process ended, in words; empty where nothing does.

        Args:
            pid: the process, which has ended.
            peak_resident_mib: the largest resident set it ever had, as the kernel tells it at its end, MiB.
        """
        if line := self._log.killed(pid):
            return f"the kernel's log says '{line}'"
        count, before = self._count(), self._counted
        if count is not None and before is not None and count[0] > before[0]:
            return f"oom_kill of {count[1]} rose from {before[0]} to {count[0]}"
        last = self._last.get(pid)
        # What it took between the last look and its end.
        grown = max(0.0, peak_resident_mib - last.resident) if last is not None else 0.0
        if last is not None and self._limit_mib is not None:
            held = last.anonymous - self._first[pid].anonymous + grown
            if held >= NEAR * self._limit_mib:
                return f"it held {held:,.0f} of the {self._limit_mib:,.0f} MiB it may take"
        left = max(0.0, self._free_mib - grown)
        if left <= (1 - NEAR) * self._total_mib:
            return f"{left:,.0f} of {self._total_mib:,.0f} MiB of host memory were left"
        return ""

    def close(self) -> None:
        """Lets go of the kernel's log."""
        self._log.close()

    def _count(self) -> tuple[int, str] | None:
        """Kills so far as the kernel counts them, and where: in the control group, else on the machine."""
        for group in self._groups:
            if group.oom_kills is not None:
                return group.oom_kills, "its control group"
        try:
            with open("/proc/vmstat") as file:
                fields = dict(line.split() for line in file)
        except OSError:
            return None
        return (int(fields["oom_kill"]), "this machine") if "oom_kill" in fields else None


def _held(pid: int) -> _Held | None:
    """What a process holds now; None where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    fields = dict(re.findall(r"^(VmRSS|RssAnon):\s+(\d+)", status, re.MULTILINE))
    if len(fields) < 2:
        return None
    return _Held(int(fields["VmRSS"]) / 1024, int(fields["RssAnon"]) / 1024)
