"""What a host's processors do meanwhile, for whoever measures on them."""

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..base.gpus import GpuGauge
from .process import family

CHANGED_CORES = 0.25
"""Cores more or fewer that others keep busy, from which conditions count as changed."""

_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class HostLoad:
    """What a host's processors did in a stretch of time, seen by one process."""

    host: str
    """The host's name."""
    seconds: float
    """How long the stretch was, s."""
    busy: float
    """Time in which its cores were not idle, summed over them, s; what a hypervisor gave to others counts."""
    own: float
    """Processor time of the process, or the processes, that measure, s."""


class Watch:
    """Begins a stretch when it is made.

    Args:
        own_s: processor time so far of who measures, s; that of this process by default.
    """

    def __init__(self, own_s: Callable[[], float] = time.process_time) -> None:
        self._own_s = own_s
        self.restart()

    def restart(self) -> None:
        """Begins the stretch anew."""
        self._begin = self._now()

    def load(self) -> HostLoad | None:
        """The stretch until now; None where the kernel does not tell."""
        then, now = self._begin, self._now()
        if then is None or now is None:
            return None
        seconds, busy, own = (b - a for a, b in zip(then, now))
        return HostLoad(socket.gethostname(), seconds, busy, own)

    def _now(self) -> tuple[float, float, float] | None:
        busy = _busy_s()
        return None if busy is None else (time.monotonic(), busy, self._own_s())


def family_s(pid: int) -> float:
    """Processor time so far of a process and of all that descend from it, s; of those alive."""
    total = 0.0
    for each in family(pid):
        with suppress(psutil.Error):  # it has ended meanwhile
            used = each.cpu_times()
            total += used.user + used.system
    return total


def foreign_cores(loads: Sequence[HostLoad | None]) -> float | None:
    """Cores that others than these processes kept busy, on average, on the host where they were most; None where
    that is not known."""
    hosts: dict[str, list[HostLoad]] = {}
    for each in loads:
        if each is not None and each.seconds > 0:
            hosts.setdefault(each.host, []).append(each)
    found = [
        max(each.busy for each in here) / max(each.seconds for each in here)
        - sum(each.own / each.seconds for each in here)
        for here in hosts.values()
    ]
    return max(0.0, *found) if found else None


def _busy_s() -> float | None:
    """Time so far in which this host's cores were not idle, summed over them, s."""
    try:
        first = _STAT.read_text().partition("\n")[0]
    except OSError:
        return None
    # cpu  user nice system idle iowait irq softirq steal guest guest_nice; guests are counted in user already.
    ticks = [int(each) for each in first.split()[1:9]]
    return (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")


class GpuWatch:
    """Clock and power of a rank's GPU while its steps run, looked at between steps.

    Args:
        index: the GPU, of those that CUDA shows to this process.
        every_s: how often it is looked, s.
    """

    def __init__(self, index: int, every_s: float = 0.25) -> None:
        self._gauge, self._every_s = GpuGauge(index), every_s
        self.restart()

    def restart(self) -> None:
        """Forgets what was seen; the next step is looked at."""
        self._next, self._seen = time.monotonic(), list[tuple[float | None, float | None]]()

    def beside(self, step: Callable[[], object]) -> Callable[[], object]:
        """The step, with a look before it now and then."""

        def watched() -> object:
            if time.monotonic() >= self._next:
                self._seen.append(self._gauge.read())
                self._next = time.monotonic() + self._every_s
            return step()

        return watched

    @property
    def clock_mhz(self) -> float | None:
        """Median clock of the multiprocessors, MHz; None where it is not known."""
        return _median(clock for clock, _ in self._seen)

    @property
    def power_w(self) -> float | None:
        """Median power, W; None where it is not known."""
        return _median(power for _, power in self._seen)


def _median(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return statistics.median(known) if known else None
