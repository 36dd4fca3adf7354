"""Trials of a callable `fn(config) -> throughput | Measurement`, in fresh processes or in this process."""

import math
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from ...base.errors import UsageError
from ...results import Measurement, Status
from ...space import Config
from ..host.log import LogFile
from ..runner import Runner, TrialRequest, Work
from . import failure
from .job import Job, Outcome

if TYPE_CHECKING:
    from ..runner import CommonFields, TrialTerms
    from .rank import RankContext

_OFTEN_NEEDED = ("numpy", "torch", "transformers")
"""Modules that the host agent imports once if this process has imported them, since the callable probably needs them."""


class Calls(Work):
    """Calls of a function, each in a fresh process.

    The function is copied when this is created. Changes made by a call are lost with its process.

    Args:
        function: see `FunctionRunner`.
        smaller: True if smaller numbers are better.

    Raises:
        UsageError: the function cannot be sent to another process.
    """

    several_hosts = False
    confirms = False

    def __init__(self, function: Callable[[Config], Any], *, smaller: bool = False) -> None:
        self._function, self._smaller = _pickled(function), smaller
        needed = ("redline.runners.host.supervisor", "redline.runners.trial.function", "cloudpickle")
        self.imports = (*needed, *(name for name in _OFTEN_NEEDED if name in sys.modules))

    def job(self, request: TrialRequest, terms: "TrialTerms") -> Job:
        import cloudpickle

        trial = FunctionTrial(function=self._function, config=request.config, smaller=self._smaller)
        return Job(
            program=cloudpickle.dumps(trial),
            # Without a limit the callable uses devices as it likes, possibly none.
            device_type="cpu" if terms.memory_limit_mib is None else terms.device.type,
            threads=terms.threads,
            memory_limit_mib=terms.memory_limit_mib,
            timeout_s=request.timeout_s or terms.timeout_s,
            log=str(request.log) if request.log else None,
        )

    def measurement(
        self, request: TrialRequest, terms: "TrialTerms", outcome: Outcome, common: "CommonFields"
    ) -> Measurement:
        return reported_measurement(outcome, terms.memory_limit_mib, common)


@dataclass(frozen=True, kw_only=True)
class FunctionTrial:
    """The program of a trial's single process."""

    function: bytes
    """The callable, cloudpickled."""
    config: Config
    smaller: bool = False

    def __call__(self, context: "RankContext") -> Measurement:
        import cloudpickle

        context.phase("loading the callable")
        function = cloudpickle.loads(self.function)
        context.phase("the call")
        return _read(function(self.config), self.smaller)


class FunctionRunner(Runner):
    """Calls `function(config)` in this process, one trial at a time.

    Args:
        function: returns a throughput (higher is better) or a `Measurement`. `redline.OutOfMemory`,
            `torch.OutOfMemoryError` and `MemoryError` are recorded as `oom`, any other exception as `crash` with its
            traceback in the trial's log.
        smaller: True if smaller numbers are better: the throughput is then the reciprocal, in `1/value`.

    A call in this process cannot be interrupted, so trials have no deadline, and a call that ends the process ends the
    search.
    """

    name = "function"
    isolated = False
    confirms = False

    def __init__(self, function: Callable[[Config], Any], *, smaller: bool = False) -> None:
        self._function, self._smaller = function, smaller

    def run(self, request: TrialRequest) -> Measurement:
        started, begin = time.time(), time.perf_counter()
        try:
            measured = _read(self._function(request.config), self._smaller)
        except (Exception, SystemExit) as error:  # any failure of a candidate is its outcome
            measured = _failed(error, request)
        return _completed(measured, started=started, seconds_total=time.perf_counter() - begin)


def reported_measurement(outcome: Outcome, limit_mib: float | None, common: "CommonFields") -> Measurement:
    """Returns the measurement that a trial's single process reported, or one with the reason why it reported none."""
    rank = next(iter(outcome.ranks), None)
    peak = None
    if rank is not None:
        # Without a limit the memory of the process alone is not comparable with anything.
        peak = rank.needed_memory_mib or (rank.peak_memory_mib if limit_mib is not None else None)
    if outcome.status is Status.OK and rank is not None:
        # Fields that the callable's own measurement contains take precedence.
        return _completed(rank.report, **common, peak_memory_mib=peak, memory_limit_mib=limit_mib)
    return Measurement(
        status=outcome.status, reason=outcome.reason, peak_memory_mib=peak, memory_limit_mib=limit_mib, **common
    )


def _pickled(function: Callable[[Config], Any]) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(function)
    except Exception as error:  # objects may fail to pickle with any exception
        name = getattr(function, "__name__", type(function).__name__)
        raise UsageError(
            f"{name} cannot be sent to another process ({failure.one_line(error)}): create the objects it uses "
            "inside of it, or call it in this process with isolate=False, where trials have no deadline and no "
            "memory limit"
        ) from error


def _read(value: Any, smaller: bool = False) -> Measurement:
    """Converts the result of a callable to a measurement.

    Args:
        value: the result.
        smaller: True if smaller numbers are better.

    Raises:
        UsageError: it is neither a number nor a measurement, or with `smaller` not a positive number.
    """
    if isinstance(value, Measurement):
        if smaller and value.ok:
            raise UsageError("with direction='min' a callable returns a number; a Measurement has a throughput")
        return _finite(value)
    number = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        number = value.item()  # a tensor or an array without dimensions
    if isinstance(number, bool) or not isinstance(number, Real):
        result = " ".join(repr(value).split())
        raise UsageError(
            f"a tuned callable must return a number (throughput, higher is better) or a redline.Measurement, "
            f"but returned {result if len(result) <= 100 else result[:99] + '…'}"
        )
    if not math.isfinite(number):
        return Measurement(status=Status.WRONG, reason=f"the callable returned {float(number)}")
    if not smaller:
        return Measurement(status=Status.OK, throughput=float(number))
    if number <= 0:
        raise UsageError(
            f"with direction='min' a callable must return a positive number, but returned {float(number):g}"
        )
    return Measurement(status=Status.OK, throughput=1.0 / float(number), unit="1/value")


def _finite(measured: Measurement) -> Measurement:
    """Returns a user's measurement without non-finite numbers. It is `wrong` if it was `ok` without a valid throughput."""
    invalid: dict[str, Any] = {
        field.name: None
        for field in fields(Measurement)
        if isinstance(number := getattr(measured, field.name), float) and not math.isfinite(number)
    }
    if measured.ok and (measured.throughput is None or "throughput" in invalid):
        reason = f"the callable returned an ok measurement with throughput={measured.throughput}"
        measured = replace(measured, status=Status.WRONG, reason=reason)
    return replace(measured, **invalid) if invalid else measured


def _completed(measured: Measurement, **defaults: Any) -> Measurement:
    """Fills in the fields that a measurement does not set itself."""
    return replace(measured, **{name: value for name, value in defaults.items() if not getattr(measured, name)})


def _failed(error: BaseException, request: TrialRequest) -> Measurement:
    with LogFile(request.log) as log:
        log.write("".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace"))
    status = Status.OOM if failure.is_oom(error) else Status.CRASH
    needed = failure.requested_mib(error) if status is Status.OOM else None
    return Measurement(status=status, reason=failure.one_line(error), peak_memory_mib=needed, log=request.log_name)
