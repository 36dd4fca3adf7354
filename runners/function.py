"""Any callable as a runner: `fn(config)` returns a throughput or a Measurement."""

import math
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from typing import Any

from ..errors import UsageError
from ..results import Measurement, Status
from ..space import Config
from . import failure
from .runner import Runner, TrialRequest


class FunctionRunner(Runner):
    """Calls `function(config)` in this process, one trial at a time.

    Args:
        function: returns a throughput (higher is better) or a `Measurement`. `redline.OutOfMemory`,
            `torch.OutOfMemoryError` and `MemoryError` are recorded as `oom`, any other exception as
            `crash` with its traceback in the trial's log.
        unit: unit of the number it returns.

    A call in this process cannot be interrupted, so trials have no deadline.
    """

    name = "function"

    def __init__(self, function: Callable[[Config], Any], *, unit: str = "") -> None:
        self._function = function
        self._unit = unit

    def run(self, request: TrialRequest) -> Measurement:
        started, begin = time.time(), time.perf_counter()
        try:
            measured = self._read(self._function(request.config))
        except Exception as error:  # every way a candidate can fail is its outcome
            measured = self._failed(error, request)
        total = time.perf_counter() - begin
        return replace(
            measured,
            started=measured.started or started,
            seconds_total=measured.seconds_total or total,
            unit=measured.unit or self._unit,
        )

    def _read(self, value: Any) -> Measurement:
        if isinstance(value, Measurement):
            return value
        if isinstance(value, bool) or not isinstance(value, Real):
            raise UsageError(
                f"a tuned callable must return a number (throughput, higher is better) or a "
                f"redline.Measurement, but returned {value!r}"
            )
        if not math.isfinite(value):
            return Measurement(status=Status.WRONG, reason=f"the callable returned {float(value)}")
        return Measurement(status=Status.OK, throughput=float(value))

    def _failed(self, error: Exception, request: TrialRequest) -> Measurement:
        log = ""
        if request.log is not None:
            request.log.parent.mkdir(parents=True, exist_ok=True)
            request.log.write_text("".join(traceback.format_exception(error)))
            log = f"logs/{request.log.name}"
        status = Status.OOM if failure.is_oom(error) else Status.CRASH
        needed = failure.requested_mib(error) if status is Status.OOM else None
        return Measurement(status=status, reason=failure.one_line(error), peak_memory_mib=needed, log=log)
