"""Limits of a search: trials and time."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from ..base.errors import UsageError
from ..results import Trial
from ..results.measurement import REFINEMENT

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"MIB": 1.0, "M": 1.0, "GIB": 1024.0, "G": 1024.0, "MB": 1e6 / 2**20, "GB": 1e9 / 2**20}
_SIZES |= {"KIB": 1 / 1024, "TIB": 1024.0**2, "TB": 1e12 / 2**20}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of a search. The first one that is reached ends it."""

    trials: int | None = None
    """Number of trials, including the earlier ones of a resumed run; None for no limit."""
    seconds: float | None = None
    """Wall time from the start of a search to its winner, s; None for no limit."""
    patience: int = 0
    """Stop when this many of the most promising candidates together are unlikely to gain another 1 %; 0 never stops
    early.
    """

    def check_against(self, timeout_s: float | None) -> None:
        """Raises UsageError if the requested deadline of a trial, s, is longer than the whole search."""
        if self.seconds is not None and timeout_s is not None and timeout_s > self.seconds:
            raise UsageError(
                f"one trial may take {timeout_s:g} s, which is more than the {self.seconds:g} s of the whole "
                "search; lower the trial timeout or raise the time"
            )


def counts(trial: Trial) -> bool:
    """True if a trial counts towards the limit of trials: it was not skipped, and does not refine the winner."""
    return trial.sampler != REFINEMENT and not trial.skipped


class Stopwatch:
    """Remaining time of a budget, counted from construction."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begin = clock()
        self._seconds = seconds

    def exclude(self, seconds: float) -> None:
        """Excludes a wait for devices from the time."""
        self._begin += seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._begin

    @property
    def left(self) -> float:
        """Seconds left; infinite without a limit."""
        return math.inf if self._seconds is None else self._seconds - self.elapsed


def parse_duration(text: str | float | None, what: str = "time") -> float | None:
    """Converts `30m`, `1h30m`, `90s`, `5 min`, or a number, which counts seconds, to seconds; None stays None.

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
            raise UsageError(f"{what} must be an amount with a unit: {compact}s or {compact}m?")
        if re.fullmatch(r"-(\d+(\.\d+)?(ms|s|min|m|h|d))+", compact):
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
    """Converts `8GiB`, `512MiB`, `1.5G`, or a number, which counts MiB, to MiB; None stays None.

    Raises:
        UsageError: it is not an amount of memory, or not positive.
    """
    if text is None:
        return None
    if isinstance(text, Real) and not isinstance(text, bool):
        mib = float(text)
    else:
        match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
        if match and not match[2]:
            raise UsageError(f"{what} must be an amount with a unit: {match[1]}GiB or {match[1]}MiB?")
        if not match or match[2].upper() not in _SIZES:
            raise UsageError(f"{what} must be an amount such as 8GiB or 512MiB, but got '{text}'")
        mib = float(match[1]) * _SIZES[match[2].upper()]
    if not (mib > 0 and math.isfinite(mib)):
        raise UsageError(f"{what} must be more than 0, but got '{text}'")
    return mib
