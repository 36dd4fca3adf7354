"""A callable `fn(config) -> throughput | Measurement`, called in processes of its own or in this one."""

import math
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from ..base.errors import UsageError
from ..results import Measurement, Status
from ..space import Config
from . import failure
from .job import Job, Outcome
from .log import LogFile
from .runner import Runner, TrialRequest
from .work import Work

if TYPE_CHECKING:
    from .rank import RankContext
    from .work import Known, TrialTerms

_OFTEN_NEEDED = ("numpy", "torch", "transformers")
"""Imported once in the host agent where this process has them too: a callable is likely to need them."""


class Calls(Work):
    """Calls of a function, each in a fresh process of its own.

    The function is copied when this is made: whatever a call changes is gone with its process.

    Raises:
        UsageError: it cannot be sent to another process.
    """

    several_hosts = False
    confirms = False

    def __init__(self, function: Callable[[Config], Any]) -> None:
        self._function = _pickled(function)
        own = ("redline.runners.supervisor", "redline.runners.function", "cloudpickle")
        self.imports = (*own, *(name for name in _OFTEN_NEEDED if name in sys.modules))

    def job(self, request: TrialRequest, terms: "TrialTerms") -> Job:
        import cloudpickle

        return Job(
            program=cloudpickle.dumps(Call(function=self._function, config=request.config)),
            # Without a limit the devices are left to the callable, which may want none of them.
            device_type="cpu" if terms.memory_limit_mib is None else terms.device.type,
            threads=terms.threads,
            memory_limit_mib=terms.memory_limit_mib,
            timeout_s=request.timeout_s or terms.timeout_s,
            log=str(request.log) if request.log else None,
        )

    def measurement(self, request: TrialRequest, terms: "TrialTerms", outcome: Outcome, known: "Known") -> Measurement:
        return measured_by_itself(outcome, terms.memory_limit_mib, known)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A program for the one process of a trial."""

    function: bytes
    """The callable, cloudpickled."""
    config: Config
    """What it is called with."""

    def __call__(self, context: "RankContext") -> Measurement:
        import cloudpickle

        context.phase("loading the callable")
        function = cloudpickle.loads(self.function)
        context.phase("the call")
        return _read(function(self.config))


class FunctionRunner(Runner):
    """Calls `function(config)` in this process, one trial at a time.

    Args:
        function: returns a throughput (higher is better) or a `Measurement`. `redline.OutOfMemory`,
            `torch.OutOfMemoryError` and `MemoryError` are recorded as `oom`, any other exception as
            `crash` with its traceback in the trial's log.

    A call in this process cannot be interrupted, so trials have no deadline; what ends the process ends the
    search.
    """

    name = "function"
    isolated = False
    confirms = False

    def __init__(self, function: Callable[[Config], Any]) -> None:
        self._function = function

    def run(self, request: TrialRequest) -> Measurement:
        started, begin = time.time(), time.perf_counter()
        try:
            measured = _read(self._function(request.config))
        except (Exception, SystemExit) as error:  # every way a candidate can fail is its outcome
            measured = _failed(error, request)
        return _completed(measured, started=started, seconds_total=time.perf_counter() - begin)


def measured_by_itself(outcome: Outcome, limit_mib: float | None, known: "Known") -> Measurement:
    """The measurement that the one process of a trial returned, or how it ended without one."""
    rank = next(iter(outcome.ranks), None)
    peak = None
    if rank is not None:
        # What a process takes by itself says nothing of a memory that nobody limits.
        peak = rank.needed_memory_mib or (rank.peak_memory_mib if limit_mib is not None else None)
    if outcome.status is Status.OK and rank is not None:
        return _completed(rank.report, **known, peak_memory_mib=peak, memory_limit_mib=limit_mib)
    return Measurement(
        status=outcome.status, reason=outcome.reason, peak_memory_mib=peak, memory_limit_mib=limit_mib, **known
    )


def _pickled(function: Callable[[Config], Any]) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(function)
    except Exception as error:  # whatever it holds has its own way of refusing
        name = getattr(function, "__name__", type(function).__name__)
        raise UsageError(
            f"{name} cannot be sent to a process of its own ({failure.one_line(error)}): make what it holds "
            "inside of it, or call it in this process with isolate=False, where trials have no deadline and no "
            "memory limit"
        ) from error


def _read(value: Any) -> Measurement:
    """What a callable returned, as a measurement.

    Raises:
        UsageError: it is neither a number nor a measurement.
    """
    if isinstance(value, Measurement):
        return _sound(value)
    number = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        number = value.item()  # a tensor or an array of one number without dimensions
    if isinstance(number, bool) or not isinstance(number, Real):
        text = " ".join(repr(value).split())
        raise UsageError(
            f"a tuned callable must return a number (throughput, higher is better) or a redline.Measurement, "
            f"but returned {text if len(text) <= 100 else text[:99] + '…'}"
        )
    if not math.isfinite(number):
        return Measurement(status=Status.WRONG, reason=f"the callable returned {float(number)}")
    return Measurement(status=Status.OK, throughput=float(number))


def _sound(measured: Measurement) -> Measurement:
    """A measurement of somebody's own: `wrong` where it is `ok` with a throughput that is none, and without any other
    number that is not finite."""
    senseless: dict[str, Any] = {
        each.name: None
        for each in fields(Measurement)
        if isinstance(number := getattr(measured, each.name), float) and not math.isfinite(number)
    }
    if measured.ok and (measured.throughput is None or "throughput" in senseless):
        reason = f"the callable returned an ok measurement with throughput={measured.throughput}"
        measured = replace(measured, status=Status.WRONG, reason=reason)
    return replace(measured, **senseless) if senseless else measured


def _completed(measured: Measurement, **known: Any) -> Measurement:
    """A measurement with what it does not say itself."""
    return replace(measured, **{name: value for name, value in known.items() if not getattr(measured, name)})


def _failed(error: BaseException, request: TrialRequest) -> Measurement:
    with LogFile(request.log) as log:
        log.write("".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace"))
    status = Status.OOM if failure.is_oom(error) else Status.CRASH
    needed = failure.requested_mib(error) if status is Status.OOM else None
    return Measurement(status=status, reason=failure.one_line(error), peak_memory_mib=needed, log=request.log_name)
