"""Clock and power of a rank's GPU during a measurement."""

import statistics
import time
from collections.abc import Callable, Iterable

from ...base.gpus import GpuGauge


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
