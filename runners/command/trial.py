"""One trial of a command: runs it, again if its port is taken, and classifies the outcome."""

import math
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ...results import Measurement, Status
from ..trial import failure
from ..trial.timing import Timing, median_interval
from .comparison import STATE_SAMPLES, observed_facts, printed_deviation
from .objective import BESIDE, RATES, STEP_TIMES
from .observation import ObservedTraining, Speed
from .run import Run, RunTerms

if TYPE_CHECKING:
    from ..trial.rank import RankContext


STALLED = 0.1
"""Share of the time beyond the median step above which a trial has a note that its steps stall."""
_KILLED = re.compile(r"SIGKILL|\bKilled\b|exitcode\s*:?\s*-9\b|exit(?:ed)? with (?:code|status) 137\b")
"""Messages of launchers and shells about a child that was killed; 137 is 128 + SIGKILL."""
_TRACEBACK = "Traceback (most recent call last)"


def outcome(run: Run, timing: Timing | None) -> Measurement:
    """Returns the measurement of a run.

    Args:
        run: the run, which has ended.
        timing: of its steps; None if it ended before its speed was known.
    """
    code = run.process.returncode
    peak = run.peak_mib or None
    training, speed = run.observation.training, run.speed
    # Out of memory comes first: an exit code, missing metrics and an exception may all follow from it.
    if run.out_of_memory:
        needed = 0.0 if run.over_limit else failure.requested_in(run.out_of_memory)
        return Measurement(
            status=Status.OOM,
            reason=failure.shortened(run.out_of_memory),
            peak_memory_mib=(peak or 0.0) + needed if needed is not None else None,
        )
    # The exit code of a stopped command is that of redline's signal.
    if timing is None and code != 0 and not run.stopped:
        return _crashed(run, code)
    if training is not None and speed is not None and not run.speed_is_reported:
        return _observed(run, training, speed)
    if timing is None and not run.costs:
        return _silent(run)
    if (loss := run.metrics.get("loss")) is not None and not math.isfinite(loss):
        return Measurement(status=Status.WRONG, reason=f"the reported loss is {loss}", peak_memory_mib=peak, loss=loss)
    for requirement in run.terms.requirements:
        if violation := requirement.violation(run.metrics):
            other_metrics = _other_metrics(run, requirement.rule.names)
            return Measurement(
                status=Status.WRONG, reason="; ".join(filter(None, [violation, other_metrics])), peak_memory_mib=peak
            )
    assert run.objective is not None
    cost, spread, note = _cost(run, timing)
    if training is not None and speed is not None:
        samples = run.samples_per_step(training, speed)
        value = (
            run.objective.throughput(cost)
            if run.objective.name in RATES
            else cost / STEP_TIMES.get(run.objective.name, 1.0)
        )
        if deviation := printed_deviation(run.objective.name, value, speed, samples):
            return Measurement(status=Status.WRONG, reason=deviation, peak_memory_mib=peak)
    throughput, unit = run.objective.throughput(cost), run.objective.unit
    timed = run.objective.name in STEP_TIMES
    other_metrics = _other_metrics(run, (run.objective.name,))
    return Measurement(
        status=Status.OK,
        reason="; ".join(filter(None, [note, other_metrics])),
        throughput=throughput,
        unit=unit,
        told=other_metrics,
        tokens_per_second=throughput if unit == "tokens/s" else None,
        samples_per_second=throughput if unit == "samples/s" else None,
        step_ms=cost if timed else None,
        step_ms_spread=spread if timed else None,
        throughput_spread=None if timed or spread is None else throughput * spread / cost,
        peak_memory_mib=peak,
        loss=loss,
    )


def _observed(run: Run, training: ObservedTraining, speed: Speed) -> Measurement:
    """Returns the measurement of an observed training."""
    peak = run.peak_mib or None
    losses = training.losses()
    if losses and not all(map(math.isfinite, losses)):
        return Measurement(
            status=Status.WRONG, reason=f"its loss is {losses[-1]}", peak_memory_mib=peak, loss=losses[-1]
        )
    for requirement in run.terms.requirements:
        if violation := requirement.violation(run.metrics):
            return Measurement(status=Status.WRONG, reason=violation, peak_memory_mib=peak)
    samples = run.samples_per_step(training, speed)
    step_s, tokens = speed.seconds_per_step, speed.tokens_per_step
    throughput = (samples or 1.0) / step_s
    notes = [speed.stopped_early]
    if not speed.stopped_early and run.process.returncode == 0 and not run.stopped:
        notes.append(f"ended after {speed.steps} steps")
    if speed.stalled > STALLED:
        notes.append(
            f"stalls take {speed.stalled:.0%} of the time: the median step takes {speed.median_s * 1e3:,.4g} ms"
        )
    if run.observation.fault:
        notes.append(f"its observer failed: {run.observation.fault}")
    if samples is None:
        notes.append(f"the samples of a step are not known, as it has no DataLoader: {STATE_SAMPLES}")
    return Measurement(
        status=Status.OK,
        reason="; ".join(filter(None, notes)),
        throughput=throughput,
        unit="steps/s" if samples is None else "samples/s",
        told=_other_metrics(run, ()),
        samples_per_second=None if samples is None else throughput,
        tokens_per_second=None if tokens is None else tokens / step_s,
        step_ms=step_s * 1e3,
        step_ms_spread=None if speed.spread is None else speed.spread * step_s * 1e3,
        peak_memory_mib=peak,
        loss=losses[-1] if losses else run.metrics.get("loss"),
        samples_per_step=None if samples is None else round(samples),
        seconds_compile=speed.compile_s or None,
        seconds_warmup=speed.warmup_s,
        seconds_measure=speed.measure_s,
        observed=observed_facts(training, speed, samples, run.terms.split),
    )


def _other_metrics(run: Run, without: Collection[str]) -> str:
    """Returns the last values of requested and required metrics other than the objective, as text."""
    requested = [
        *run.terms.lines.requested,
        *(name for requirement in run.terms.requirements for name in requirement.rule.names),
    ]
    names = [name for name in dict.fromkeys(requested) if name in run.metrics and name not in (*BESIDE, *without)]
    return ", ".join(f"{name} = {run.metrics[name]:g}" for name in names)


def _cost(run: Run, timing: Timing | None) -> tuple[float, float | None, str | None]:
    """Returns the cost of the run, its spread, and a note."""
    if timing is not None:
        return timing.step_ms, timing.spread_ms, timing.stopped_early
    if run.terms.to_the_end or len(run.costs) == 1:
        return run.costs[-1], None, None
    # It ended before it was steady. The first value is left out, as it includes one-time work.
    median, half = median_interval(run.costs[1:])
    return median, half if len(run.costs) > 2 else None, f"ended after {len(run.costs)} values"


def _crashed(run: Run, code: int) -> Measurement:
    output = " ".join(run.tail)
    ending = f"the command was {failure.ended(code)}" if code < 0 else f"the command exited with code {code}"
    if code in (-signal.SIGKILL, 137) or _KILLED.search(output):
        for pid in sorted(run.pids):
            if evidence := run.shortage.evidence(pid):
                return Measurement(status=Status.OOM, reason=f"{ending}: {evidence}")
    last_line = next((line.strip() for line in reversed(run.tail) if line.strip()), "")
    raised = next(iter(run.observation.exceptions), None)
    if raised is not None and (not run.error or raised.type in run.error):
        return Measurement(status=Status.CRASH, reason=failure.shortened(f"{ending}: {raised.text}"))
    error = f": {run.error}" if run.error else f"; the last line it printed: {last_line}" if last_line else ""
    return Measurement(status=Status.CRASH, reason=failure.shortened(f"{ending}{error}"))


def _silent(run: Run) -> Measurement:
    """Returns the measurement of a run that ended successfully without reporting the objective."""
    print(f"redline: the command's output does not contain {run.missing}; its last lines:", file=sys.stderr)
    for line in run.tail:
        print(f"    {line}", file=sys.stderr)
    if run.unread_speed is not None:
        return Measurement(
            status=Status.CRASH,
            reason=f"no training of it can be observed, and its speed is printed in an unknown form: {run.unread_speed.text}",
        )
    if raised := next(iter(run.observation.exceptions), None):
        return Measurement(status=Status.CRASH, reason=failure.shortened(f"it exited with code 0 after {raised.text}"))
    if run.error and any(_TRACEBACK in line for line in run.tail):
        return Measurement(status=Status.CRASH, reason=failure.shortened(f"it exited with code 0 after {run.error}"))
    fault = f"; its observer failed: {run.observation.fault}" if run.observation.fault else ""
    unseen = "" if run.terms.objective else "an observed training step, and without "
    return Measurement(
        status=Status.CRASH, reason=f"the command ended without {unseen}reporting {run.missing}{run.hint}{fault}"
    )


SILENT_S = 10.0
"""How long a host without reports waits for another host's after its command has ended, s."""
PORTS = 3
"""Number of starts of a command that finds its port taken."""


@dataclass(frozen=True, kw_only=True)
class CommandReport:
    """The report of a trial's process."""

    measured: Measurement
    losses: Mapping[int, float] = field(default_factory=dict)
    """Reported losses, by step."""
    silent: bool = False
    """True if it ended successfully without reporting the objective."""
    echo: bool = False
    """True if it failed without an error of its own, as a rank that loses a peer does."""


@dataclass(frozen=True, kw_only=True)
class CommandTrial:
    """One trial of a command. Called in a process of its own, whose descendants are killed afterwards."""

    terms: RunTerms
    takes_port: bool

    def __call__(self, context: "RankContext") -> CommandReport:
        folder = Path(self.terms.folder)
        context.phase("the command")
        if context.world_size > 1:
            folder.mkdir(parents=True, exist_ok=True)
            return self._on_host(context)
        # Another process may take the free port before the command binds it.
        for attempt in range(PORTS):
            _make_empty(folder)
            run = Run(
                self.terms,
                {**self.terms.values, "master_port": _free_port()},
                context.peak,
                context.compiling,
                context.phase,
            )
            report = _report(run)
            if not self._port_taken(run, report) or attempt == PORTS - 1:
                break
            print(f"redline: the port {run.values['master_port']} is taken; restarting on another", flush=True)
        return report

    def _on_host(self, context: "RankContext") -> CommandReport:
        """Runs the command on this host, one of several.

        Raises:
            RuntimeError: the port is taken; the caller, which started all hosts, tries another.
        """
        address = urlsplit(context.init_method)
        hosts = {
            "hosts": context.world_size,
            "node_rank": context.rank,
            "devices_per_host": self.terms.values["devices"] // context.world_size,
            "master_addr": address.hostname,
            "master_port": address.port,
        }
        run = Run(self.terms, {**self.terms.values, **hosts}, context.peak, context.compiling, context.phase)
        report = _report(run)
        if self._port_taken(run, report):
            shutil.rmtree(self.terms.folder, ignore_errors=True)
            raise RuntimeError(f"EADDRINUSE: the port {address.port} is taken")
        if report.silent:
            # In most trainings one host reports; its result ends the others.
            time.sleep(SILENT_S)
        return report

    def _port_taken(self, run: Run, report: CommandReport) -> bool:
        """True if another port may help. Some commands report a taken port, choose another one themselves and continue."""
        return report.measured.status is Status.CRASH and run.port_taken and self.takes_port


def _make_empty(folder: Path) -> None:
    """Creates a folder, or replaces the one that an earlier start of the command left."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _report(run: Run) -> CommandReport:
    """Runs the command and returns its report."""
    try:
        timing = run.timed()
    except OSError as error:
        reason = f"the command cannot be started: {error.strerror or error}"
        return CommandReport(measured=Measurement(status=Status.CRASH, reason=reason))
    measured = outcome(run, timing)
    silent = run.process.returncode == 0 and not run.costs and run.speed is None and not run.out_of_memory
    echo = measured.status is Status.CRASH and not run.error
    return CommandReport(measured=measured, losses=run.losses, silent=silent, echo=echo)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
