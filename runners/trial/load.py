"""Load of a host's CPUs, and clock and power of its GPUs, during a measurement."""

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...base.gpus import GpuGauge
from ..host.process import family

CHANGED_CORES = 0.25
"""Change in the number of cores that other processes keep busy, from which on the conditions of a measurement differ."""

_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Load of a host's CPUs in a period, measured by one process."""

    host: str
    seconds: float
    """Length of the period, s."""
    busy: float
    """Time in which its cores were not idle, summed over them, s. Time that a hypervisor gave to others is included."""
    own: float
    """CPU time of the measuring processes, s."""


class Watch:
    """Measures the load of a period, which begins with its creation.

    Args:
        measuring_s: returns the CPU time of the measuring processes so far, s; by default that of this process.
    """

    def __init__(self, measuring_s: Callable[[], float] = time.process_time) -> None:
        self._measuring_s = measuring_s
        self.restart()

    def restart(self) -> None:
        """Begins a new period."""
        self._begin = self._now()

    def load(self) -> HostLoad | None:
        """Returns the load since the beginning; None if the kernel does not report it."""
        begin, end = self._begin, self._now()
        if begin is None or end is None:
            return None
        seconds, busy, measuring = (later - earlier for earlier, later in zip(begin, end))
        return HostLoad(socket.gethostname(), seconds, busy, measuring)

    def _now(self) -> tuple[float, float, float] | None:
        busy = _busy_s()
        return None if busy is None else (time.monotonic(), busy, self._measuring_s())


def family_s(pid: int) -> float:
    """Returns the CPU time so far of a process and its live descendants, s."""
    total_s = 0.0
    for process in family(pid):
        with suppress(psutil.Error):  # it has ended meanwhile
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


def foreign_cores(loads: Sequence[HostLoad | None]) -> float | None:
    """Returns the mean number of cores kept busy by other processes, on the host where it is largest; None if unknown."""
    hosts: dict[str, list[HostLoad]] = {}
    for load in loads:
        if load is not None and load.seconds > 0:
            hosts.setdefault(load.host, []).append(load)
    foreign = [
        # Processes of one trial on a host see the same cores, each in its own period: the longest counts.
        max(load.busy for load in host_loads) / max(load.seconds for load in host_loads)
        - sum(load.own / load.seconds for load in host_loads)
        for host_loads in hosts.values()
    ]
    return max(0.0, *foreign) if foreign else None


def _busy_s() -> float | None:
    """Returns the time so far in which the cores that this process may use were not idle, summed over them, s."""
    try:
        lines = _STAT.read_text().splitlines()
    except OSError:
        return None
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    cores = [fields for fields in (line.split() for line in lines) if fields and fields[0] in usable]
    busy = 0
    for fields in cores or [lines[0].split()]:
        # cpuN user nice system idle iowait irq softirq steal guest guest_nice; user includes guest.
        ticks = [int(count) for count in fields[1:9]]
        busy += sum(ticks) - sum(ticks[3:5])
    return busy / os.sysconf("SC_CLK_TCK")


class GpuWatch:
    """Samples clock and power of a rank's GPU between steps.

    Args:
        index: the GPU, among those visible to this process.
        every_s: sampling interval, s.
    """

    def __init__(self, index: int, every_s: float = 0.25) -> None:
        self._gauge, self._every_s = GpuGauge(index), every_s
        self.restart()

    def restart(self) -> None:
        """Discards the samples. The next step takes one."""
        self._due, self._samples = time.monotonic(), list[tuple[float | None, float | None]]()

    def sampling(self, step: Callable[[], object]) -> Callable[[], object]:
        """Returns the step, preceded by a sample when one is due."""

        def watched() -> object:
            if time.monotonic() >= self._due:
                self._samples.append(self._gauge.read())
                self._due = time.monotonic() + self._every_s
            return step()

        return watched

    @property
    def clock_mhz(self) -> float | None:
        """Median clock of the multiprocessors, MHz; None if unknown."""
        return _median(clock for clock, _ in self._samples)

    @property
    def power_w(self) -> float | None:
        """Median power, W; None if unknown."""
        return _median(power for _, power in self._samples)


def _median(values: Iterable[float | None]) -> float | None:
    readings = [value for value in values if value is not None]
    return statistics.median(readings) if readings else None
