"""How much a search may spend."""

import math
import re
import time
from dataclasses import dataclass
from numbers import Real

from ..errors import UsageError

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"": 1.0, "MIB": 1.0, "M": 1.0, "GIB": 1024.0, "G": 1024.0, "MB": 1e6 / 2**20, "GB": 1e9 / 2**20}
_SIZES |= {"KIB": 1 / 1024, "TIB": 1024.0**2, "TB": 1e12 / 2**20}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of a search; whichever is reached first ends it.

    Raises:
        UsageError: a limit is not positive.
    """

    trials: int | None = None
    """Trials in all, a resumed run's earlier ones included; None for no limit."""
    seconds: float | None = None
    """Wall time of this process's search, s; None for no limit."""

    def __post_init__(self) -> None:
        if self.trials is not None and (isinstance(self.trials, bool) or int(self.trials) != self.trials):
            raise UsageError(f"trials must be a whole number, but got {self.trials!r}")
        if self.trials is not None and self.trials < 1:
            raise UsageError(f"trials must be at least 1, but got {self.trials}")
        if self.seconds is not None and not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise UsageError(f"time must be more than 0, but got {self.seconds:g} s")


class Stopwatch:
    """Time left of a budget, counted from when it was made."""

    def __init__(self, seconds: float | None) -> None:
        self._begin = time.monotonic()
        self._seconds = seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    @property
    def left(self) -> float:
        """Seconds left; infinite without a limit."""
        return math.inf if self._seconds is None else self._seconds - self.elapsed


def parse_duration(text: str | float | None, what: str = "time") -> float | None:
    """Seconds of `30m`, `1h30m`, `90s`, `5 min` or a number of seconds; None stays None.

    Raises:
        UsageError: it is not a duration, or not positive.
    """
    if text is None:
        return None
    if isinstance(text, Real) and not isinstance(text, bool):
        seconds = float(text)
    else:
        compact = re.sub(r"\s+", "", str(text)).lower()
        if re.fullmatch(r"-?\d+(\.\d+)?", compact):
            seconds = float(compact)
        elif re.fullmatch(r"-(\d+(\.\d+)?(ms|s|min|m|h|d))+", compact):
            seconds = -1.0
        elif re.fullmatch(r"(\d+(\.\d+)?(ms|s|min|m|h|d))+", compact):
            parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|min|m|h|d)", compact)
            seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
        else:
            raise UsageError(f"{what} must be a duration such as 90s, 30m or 1h30m, but got '{text}'")
    if not (seconds > 0 and math.isfinite(seconds)):
        raise UsageError(f"{what} must be more than 0, but got '{text}'")
    return seconds


def parse_memory(text: str | float | None, what: str = "memory limit") -> float | None:
    """MiB of `8GiB`, `512MiB`, `1.5G` or a number of MiB; None stays None.

    Raises:
        UsageError: it is not an amount of memory, or not positive.
    """
    if text is None:
        return None
    if isinstance(text, Real) and not isinstance(text, bool):
        mib = float(text)
    else:
        match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
        if not match or match[2].upper() not in _SIZES:
            raise UsageError(f"{what} must be an amount such as 8GiB or 512MiB, but got '{text}'")
        mib = float(match[1]) * _SIZES[match[2].upper()]
    if not (mib > 0 and math.isfinite(mib)):
        raise UsageError(f"{what} must be more than 0, but got '{text}'")
    return mib
