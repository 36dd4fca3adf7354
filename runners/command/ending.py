"""What came of a command that ran: how fast it was, or how it failed and what says so."""

import math
import re
import signal
import sys
from collections.abc import Collection

from ...results import Measurement, Status
from .. import failure
from ..timing import Timing, median_interval
from .objective import BESIDE, STEP_TIMES
from .reading import near_misses
from .run import Run

_KILLED = re.compile(r"SIGKILL|\bKilled\b|exitcode\s*:?\s*-9\b|exit(?:ed)? with (?:code|status) 137\b")


def outcome(run: Run, timing: Timing | None) -> Measurement:
    """What came of a run.

    Args:
        run: has ended.
        timing: of its steps; None where it ended before that was known.
    """
    code = run.process.returncode
    peak = run.peak_mib or None
    if run.out_of_memory:
        needed = 0.0 if run.over_limit else failure.requested_in(run.out_of_memory)
        return Measurement(
            status=Status.OOM,
            reason=failure.shortened(run.out_of_memory),
            peak_memory_mib=(peak or 0.0) + needed if needed is not None else None,
        )
    if timing is None and code != 0 and not run.stopped:
        return _crashed(run, code)
    if timing is None and not run.costs:
        return _silent(run)
    if (loss := run.told.get("loss")) is not None and not math.isfinite(loss):
        return Measurement(status=Status.WRONG, reason=f"the loss it told is {loss}", peak_memory_mib=peak, loss=loss)
    for each in run.terms.requirements:
        if broken := each.broken(run.told):
            others = _told_beside(run, each.rule.names)
            return Measurement(
                status=Status.WRONG, reason="; ".join(filter(None, [broken, others])), peak_memory_mib=peak
            )
    assert run.objective is not None
    cost, spread, note = _cost(run, timing)
    throughput, unit = run.objective.throughput(cost), run.objective.unit
    timed = run.objective.name in STEP_TIMES
    beside = _told_beside(run, (run.objective.name,))
    return Measurement(
        status=Status.OK,
        reason="; ".join(filter(None, [note, beside])),
        throughput=throughput,
        unit=unit,
        told=beside,
        tokens_per_second=throughput if unit == "tokens/s" else None,
        samples_per_second=throughput if unit == "samples/s" else None,
        step_ms=cost if timed else None,
        step_ms_spread=spread if timed else None,
        peak_memory_mib=peak,
        loss=loss,
        foreign_cores=run.foreign,
    )


def _told_beside(run: Run, without: Collection[str]) -> str:
    """What was asked for by name or is required, as it was told last."""
    asked = [*run.terms.lines.asked, *(name for each in run.terms.requirements for name in each.rule.names)]
    shown = [name for name in dict.fromkeys(asked) if name in run.told and name not in (*BESIDE, *without)]
    return ", ".join(f"{name} = {run.told[name]:g}" for name in shown)


def _cost(run: Run, timing: Timing | None) -> tuple[float, float | None, str]:
    """What counts of all costs, how sure that is, and what is to be said of it."""
    if timing is not None:
        return timing.step_ms, timing.spread_ms, timing.stopped_early
    if run.terms.to_the_end or len(run.costs) == 1:
        return run.costs[-1], None, ""
    # It ended before it was steady: without the first, which holds what happens once.
    median, half = median_interval(run.costs[1:])
    return median, half, f"ended after {len(run.costs)} values"


def _crashed(run: Run, code: int) -> Measurement:
    said = " ".join(run.tail)
    how = f"the command was {failure.ended(code)}" if code < 0 else f"the command exited with code {code}"
    if code in (-signal.SIGKILL, 137) or _KILLED.search(said):
        for pid in sorted(run.pids):
            if short := run.shortage.evidence(pid):
                return Measurement(status=Status.OOM, reason=f"{how}: {short}")
    return Measurement(status=Status.CRASH, reason=failure.shortened(f"{how}: {run.error}" if run.error else how))


def _silent(run: Run) -> Measurement:
    """It ended well, and nothing that it said was the objective."""
    wanted = [run.terms.wanted] if run.terms.wanted else []
    missing = f"'{run.terms.wanted}'" if wanted else "a throughput, a step's time or its number"
    lines = list(run.tail)
    near = near_misses(lines, wanted)
    print(f"redline: nothing in what the command said was {missing}; its last lines:", file=sys.stderr)
    for line in lines:
        print(f"    {line}", file=sys.stderr)
    hint = f"; did you mean what is in '{failure.shortened(near[-1].strip(), 120)}'?" if near else ""
    seen = f"; it told {', '.join(run.seen)}" if run.seen else ""
    return Measurement(status=Status.CRASH, reason=f"the command ended without telling {missing}{seen}{hint}")
