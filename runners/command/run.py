"""A running command: starts it, reads its metrics, and ends it once its speed is known."""

import contextlib
import json
import math
import os
import re
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from ...base.reading import JsonLines
from ...base.reporting import FILE, TIME
from ..host.process import builds_released, family
from ..trial import failure
from ..trial.memory import GpuMemory, Shortage
from ..trial.timing import Clock, Timing, TimingPlan, measure
from .files import TrialFile
from .objective import Objective, Requirement, chosen, usable
from .observation import FOLDER, OBSERVER, Observation, ObservedTraining, Speed
from .reading import Lines, Reported, StepNumbers, Suggestion, numbers_of, suggestion
from .template import CommandLine

CHECK_S = 0.25
"""Interval between checks of memory and of reports, s."""
OOM_DETAIL_S = 0.5
"""Time after the first line about an out-of-memory to wait for a line with the size of the allocation, s."""
LINGER_S = 1.0
"""Time without output after which a command's background processes are no longer waited for, s."""
TERM_S = 2.0
"""Time for a command to end after SIGTERM, s."""
REPORT_S = 1.0
"""Interval between reports of its state, s."""
HOLD_S = 60.0
"""Time to wait for observed steps after a printed speed is known, if a process of the command has imported torch, s. The
printed speed may belong to work before the training, such as tokenizing."""
COMPARED_S = 2.0
"""The same if the printed speed was requested, s: observed steps are then only compared with it."""
UNREAD_S = 10.0
"""Time after the first line with a speed in an unknown form, after which a command that is not observed is ended, s."""
SHOWN_LINES = 40
"""Number of last lines shown if no metric was found."""
MOST_LOSSES = 1000
"""Number of losses that are recorded."""
_PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE", re.IGNORECASE)
_ERROR = re.compile(
    r"^(?:\[[^\]]*\]:?\s*)*(?P<text>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b.*|.*\berror: \S.*)$"
)
# Messages of launchers and other ranks that follow from a rank's failure.
_ECHO = re.compile(
    rf"ChildFailedError|SignalException|CalledProcessError|ProcessExitedException|{failure.PEER_LOST}", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class RunTerms:
    """The command of a trial, with the settings for reading its output."""

    command: CommandLine
    environment: tuple[tuple[str, Any], ...]
    """Templates of environment variables."""
    files: tuple[TrialFile, ...]
    values: Mapping[str, Any]
    """Values of the knobs and of the trial."""
    folder: str
    cwd: str
    lines: Lines
    """Reads the output."""
    objective: str | None
    """The objective; None for the first known metric that is reported."""
    smaller: bool
    """True if a smaller value is better."""
    samples_per_step: float | None
    """Samples per step; None if unknown."""
    to_the_end: bool
    """True if the last value counts, False if it ends once the value is steady."""
    requirements: tuple[Requirement, ...]
    plan: TimingPlan
    best: float | None
    """Highest throughput so far."""
    memory_limit_mib: float | None
    """Memory limit of each of its processes, or of each GPU, MiB."""
    on_gpus: bool
    """True if the limit is that of GPUs."""
    observe: bool = True
    """Observe the command's processes from inside."""
    micro_batch: float | None = None
    """Samples of a pass of one replica by the knobs; None if they do not give it."""
    split: int = 1
    """Ranks that share a replica, by the knobs."""


class _Ended(Exception):
    """The command has ended or can be ended."""


@dataclass
class Run(Clock):
    """A running command. As a clock it returns the costs of its steps."""

    terms: RunTerms
    values: Mapping[str, Any]
    """Values of the knobs and of the trial on this host."""
    on_peak: Callable[[float], None] = lambda mib: None
    """Called with its peak memory, MiB, whenever that rises."""
    on_compiling: Callable[[bool], None] = lambda compiling: None
    """Called with True when one of its processes begins to compile, and with False when the last one has compiled."""
    on_state: Callable[[str], None] = lambda state: None
    """Called with a description of the output so far when it changes, at most once per `REPORT_S`."""
    costs: list[float] = field(default_factory=list)
    """Cost of each value of the objective, in order."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of each metric."""
    losses: dict[int, float] = field(default_factory=dict)
    """By reported step, or in order if no step was reported."""
    reported_metrics: list[str] = field(default_factory=list)
    """Metrics in the order of their first report."""
    objective: Objective | None = None
    """The objective, once it has been reported."""
    out_of_memory: str | None = None
    """Its message about an out-of-memory; None if there was none."""
    over_limit: bool = False
    """True if it ran out of memory by exceeding its memory limit."""
    port_taken: bool = False
    """True if it reported that a port is taken."""
    peak_mib: float = 0.0
    """Memory of the fullest of its processes, or of the fullest GPU, MiB."""
    error: str | None = None
    """The last error in its output that does not follow from another one; None without one."""
    speed: Speed | None = None
    """Its speed by observation; None if no training was observed."""
    unread_speed: Suggestion | None = None
    """Set if it was ended because it prints its speed in an unknown form."""
    _oom_until: float = math.inf
    _printed_at: float = 0.0
    """Time of its last output."""
    stopped: bool = False
    """True if it was stopped, False if it ended on its own."""

    def __post_init__(self) -> None:
        # Not in the trial's folder, because some trainers refuse an output folder that is not empty.
        folder = Path(f"{self.terms.folder}.observed", f"{self.values.get('node_rank', 0)}-{time.monotonic_ns()}")
        folder.mkdir(parents=True)
        self.report = folder / "report.json"
        self.observation = Observation(folder)
        self._reports = JsonLines(folder, self.report.name)
        self.tail: deque[str] = deque(maxlen=SHOWN_LINES)
        """Its last lines."""
        self._steps = StepNumbers()
        self._reported_at: float | None = None
        self._check_at = 0.0
        self._state, self._state_at = "", time.monotonic() + REPORT_S
        self.pids: set[int] = set()
        """All its processes."""
        self.shortage = Shortage(None if self.terms.on_gpus else self.terms.memory_limit_mib)
        self._gpus = GpuMemory() if self.terms.on_gpus else None
        self._unread_since: float | None = None
        """Time of the first line with a speed in an unknown form."""
        self._compiling = False

    # -- a clock -------------------------------------------------------------------------------------------------

    def mark(self) -> int:
        return len(self.costs)

    def read(self, marks: Sequence[int]) -> list[float]:
        return [self.costs[mark - 1] for mark in marks[1:]]

    # -- running -------------------------------------------------------------------------------------------------

    def timed(self) -> Timing | None:
        """Starts it, follows it until its speed is known, and ends it. Returns None if it ended before.

        Raises:
            OSError: it cannot be started.
        """
        self._start()
        try:
            with selectors.DefaultSelector() as selector:
                assert self.process.stdout is not None
                os.set_blocking(self.process.stdout.fileno(), False)
                selector.register(self.process.stdout, selectors.EVENT_READ)
                self._selector = selector
                timing = self._timed()
                self._end()
        finally:
            if self.process.poll() is None:  # after an error in this process
                self.process.kill()
        return timing

    def _start(self) -> None:
        terms = self.terms
        for file in terms.files:
            file.write(Path(terms.folder), self.values)
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",  # otherwise lines arrive when a buffer is full, not when they are printed
            FILE: str(self.report),
            **{name: template.text(self.values) for name, template in terms.environment},
        }
        words = terms.command.texts(self.values)
        environment |= {name: template.text(self.values) for name, template in terms.command.environment}
        if terms.observe:
            path = [str(OBSERVER), environment.get("PYTHONPATH", "")]
            environment |= {FOLDER: str(self.observation.folder), "PYTHONPATH": os.pathsep.join(filter(None, path))}
        print("redline:", json.dumps(words), flush=True)
        self.process = subprocess.Popen(
            words,
            cwd=terms.cwd,
            env=environment,
            stdin=subprocess.DEVNULL,  # a program that asks a question fails instead of waiting for an answer
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its process group, which `_signal` addresses, is then without this process
        )

    def _timed(self) -> Timing | None:
        """Follows it until its speed is known. Returns None if it ended before."""
        terms = self.terms
        try:
            # The first value selects the objective; only from then on can costs be compared with the best so far.
            self._step()
            if terms.to_the_end:
                while True:
                    self._step()
            best = None
            if terms.best is not None and self.objective is not None:
                best = self.objective.cost_of(terms.best)
            timing = measure(self._step, self, terms.plan, best_step_ms=best)
            self._hold()
            return timing
        except _Ended:
            return None

    def _hold(self) -> None:
        """Waits for observed steps after a printed speed is known. A requested speed is compared with them; any other may
        be that of work before the training.

        Raises:
            _Ended: the speed of the training is known by observation, or the command has ended.
        """
        end = time.monotonic() + (COMPARED_S if self.speed_is_reported else HOLD_S)
        while self.observation.processes and not (self.speed is not None and self.speed.complete):
            if time.monotonic() >= end and self.observation.training is None:
                return
            self._read_output()

    def _step(self) -> None:
        """Waits until the objective has been reported once more."""
        count = len(self.costs)
        while len(self.costs) == count:
            self._read_output()

    def _read_output(self) -> None:
        """Reads the next output."""
        exited = self.process.poll() is not None
        data = self._received(CHECK_S)
        now = time.monotonic()
        for line in self.terms.lines.feed(data):
            self._read_line(line, now)
        self._cost(self._steps.step_ms())
        self._printed_at = now if data else self._printed_at
        # Its background processes may still print.
        over = exited and not data and (not self._selector.get_map() or now >= self._printed_at + LINGER_S)
        if over:
            for line in self.terms.lines.remaining():
                self._read_line(line, now)
        if over or now >= self._check_at:
            self._check_at = now + CHECK_S
            self._watch(now, ended=over)
        if over or (self.out_of_memory and now >= self._oom_until):
            raise _Ended

    def _received(self, wait_s: float) -> bytes:
        """Returns the next output and copies it to the log; empty if there is none within `wait_s`."""
        if not self._selector.get_map():  # it has closed its output, but may still run
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(wait_s)
            return b""
        for key, _ in self._selector.select(wait_s):
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._selector.unregister(key.fileobj)
            written = 0  # a pipe may take only a part
            while written < len(data):
                written += os.write(1, data[written:])
            return data
        return b""

    def _read_line(self, line: str, now: float) -> None:
        self.tail.append(line)
        if not self.out_of_memory and failure.line_says_oom(line):
            self.out_of_memory, self._oom_until = line.strip(), now + OOM_DETAIL_S
        elif self.out_of_memory and failure.requested_in(line) and not failure.requested_in(self.out_of_memory):
            self.out_of_memory = line.strip()
        if _PORT_TAKEN.search(line):
            self.port_taken = True
        if (match := _ERROR.match(line)) and not _ECHO.search(line):
            self.error = match["text"]
        values = self.terms.lines.read(line)
        if values:
            self._take(Reported(values, now))
        elif self._unread_since is None and suggestion([line]) is not None:
            self._unread_since = now

    def _take(self, reported: Reported) -> None:
        """Records reported numbers. Values of the objective become costs."""
        self.reported_metrics += [name for name in reported.values if name not in self.reported_metrics]
        if self.objective is None:
            name = chosen(self.terms.objective, self.reported_metrics)
            if name is not None:
                self.objective = Objective(
                    name=name, smaller=self.terms.smaller, samples_per_step=self.terms.samples_per_step
                )
        self.metrics.update(reported.values)
        if "loss" in reported.values and len(self.losses) < MOST_LOSSES:
            step = reported.values.get("step", len(self.losses))
            if math.isfinite(step):
                self.losses[int(step)] = reported.values["loss"]
        if self.objective is None or (value := reported.values.get(self.objective.name)) is None:
            return
        if self.objective.name == "step":
            self._cost(self._steps.add(value, reported.at))
        else:
            self._cost(value)

    def _cost(self, value: float | None) -> None:
        """Records a value of the objective if it is valid."""
        if value is None or not usable(value):
            return
        assert self.objective is not None
        self.costs.append(self.objective.cost(value))

    def _watch(self, now: float, *, ended: bool) -> None:
        """Checks reports and memory."""
        for line in self._reports.lines():
            values = numbers_of(line)
            reported_at = values.pop(TIME, now)
            if values:
                self._take(self._with_rates(Reported(values, reported_at)))
        self._look_at_memory(now)
        if self.terms.observe:
            self._observe(now, ended=ended)
        self._give_up(now, ended=ended)
        if now >= self._state_at:
            self._state_at = now + REPORT_S
            previous, self._state = self._state, self._read_so_far()
            if self._state != previous:
                self.on_state(self._state)

    def _look_at_memory(self, now: float) -> None:
        """Records the memory of its processes, and whether it exceeds the limit."""
        resident_mib = _resident_mib(self.process.pid)
        memory_mib = self._gpus.held_mib(resident_mib) if self._gpus else max(resident_mib.values(), default=0.0)
        if memory_mib > self.peak_mib:
            self.peak_mib = memory_mib
            self.on_peak(memory_mib)
        limit = self.terms.memory_limit_mib
        # Checked here as well, since the inherited limit (RLIMIT_DATA) counts neither shared memory nor mapped files.
        if limit is not None and memory_mib > limit and not self.out_of_memory:
            scope = "a GPU are in use" if self._gpus else "memory are resident in one process"
            self.out_of_memory = f"{memory_mib:,.0f} MiB of {scope}, but the limit is {limit:,.0f} MiB"
            self._oom_until, self.over_limit = now, True
        self.pids.update(resident_mib)
        self.shortage.look(list(resident_mib))

    def _observe(self, now: float, *, ended: bool) -> None:
        """Reads what the observer has written.

        Raises:
            _Ended: the speed is known, and no other metric was requested.
        """
        self.observation.update()
        if (compiling := self.observation.compiling) != self._compiling:
            self._compiling = compiling
            self.on_compiling(compiling)
        for exception in self.observation.exceptions:
            if exception.is_oom and not self.out_of_memory:
                self.out_of_memory, self._oom_until = exception.text, now
        training = self.observation.training
        if training is None:
            return
        self.peak_mib = max(self.peak_mib, training.peak_mib() or 0.0)
        self.speed = training.speed(self.terms.plan, best_s=self._best_step_s(training), ended=ended)
        if not self.speed_is_reported and self.speed is not None and self.speed.complete and not ended:
            raise _Ended

    @property
    def speed_is_reported(self) -> bool:
        """True if its speed is a number that `--metric` names or the script reports."""
        return self.terms.objective is not None or self._reported_at is not None

    def _best_step_s(self, training: ObservedTraining) -> float | None:
        """Time of a step of the best candidate so far with the samples of this one's steps, s."""
        best, speed = self.terms.best, self.speed
        if best is None or speed is None:
            return None
        samples = self.samples_per_step(training, speed)
        return None if samples is None else samples / best

    def samples_per_step(self, training: ObservedTraining, speed: Speed) -> float | None:
        """Samples of a step over all ranks: those of the observed batches; without a loader, the micro-batch of the knobs
        times the observed passes and replicas, or the number in the request; None if unknown.
        """
        if speed.samples_per_step is not None:
            return speed.samples_per_step
        if self.terms.micro_batch is not None and speed.backwards_per_step:
            return self.terms.micro_batch * speed.backwards_per_step * max(1, training.world // self.terms.split)
        return self.terms.samples_per_step

    def _give_up(self, now: float, *, ended: bool) -> None:
        """Ends a command that prints its speed in an unknown form and cannot be observed.

        Raises:
            _Ended: this command is one.
        """
        overdue = self._unread_since is not None and now >= self._unread_since + UNREAD_S
        if ended or not overdue or self.reported_metrics or self.terms.requirements or self.observation.processes:
            return
        self.unread_speed = suggestion(list(self.tail))
        if self.unread_speed is not None and self.terms.objective is None:
            raise _Ended

    def _read_so_far(self) -> str:
        """Describes the output so far, for the reason of a timeout."""
        if self.speed is not None:
            return f"the command, after {self.speed.steps} observed step{'s'[: self.speed.steps > 1]}"
        if self.costs and self.objective is not None:
            return f"the command, after {len(self.costs)} value{'s'[: len(self.costs) > 1]} of '{self.objective.name}'"
        if not self.tail and not self.reported_metrics:
            return f"the command, {failure.NO_METRIC}: it has printed nothing"
        return f"the command, {failure.NO_METRIC}: its output does not contain {self.missing}{self.hint}"

    @property
    def missing(self) -> str:
        """Name of the objective that it should report."""
        return f"'{self.terms.objective}'" if self.terms.objective else "a throughput, a step's time or its number"

    @property
    def hint(self) -> str:
        """The metrics that it reported and a line with a speed in an unknown form, to append to an error; may be empty."""
        unread = suggestion(list(self.tail))
        reported = f"; it reported {', '.join(self.reported_metrics)}" if self.reported_metrics else ""
        return reported + (f"; {unread.text}" if unread is not None else "")

    def _with_rates(self, reported: Reported) -> Reported:
        """Replaces amounts in a report by rates since the previous report."""
        values, previous_at = dict(reported.values), self._reported_at
        self._reported_at = reported.at
        for amount in ("tokens", "samples"):
            if amount in values:
                total = values.pop(amount)
                if f"{amount}_per_second" not in self.reported_metrics:  # the first report announces the metric
                    self.reported_metrics.append(f"{amount}_per_second")
                if previous_at is not None and reported.at > previous_at:
                    values[f"{amount}_per_second"] = total / (reported.at - previous_at)
        return replace(reported, values=values)

    def _end(self) -> None:
        """Ends it and everything it started.

        SIGTERM comes first, because launchers such as torchrun start ranks in sessions of their own and pass it on.
        Output is read meanwhile: a process that cannot write to a full pipe would not end.
        """
        if self.process.poll() is not None:
            return
        self._look_at_memory(time.monotonic())  # its speed may be known before the next check
        processes: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = family(self.process.pid)
        with builds_released(processes):
            self._signal(signal.SIGTERM)
            end = time.monotonic() + (0.0 if self.out_of_memory else TERM_S)
            while time.monotonic() < end and self.process.poll() is None:
                try:
                    self._read_output()
                except _Ended:
                    break
            # Reaches the processes of its group that ignore SIGTERM; the supervisor kills those with sessions of their own.
            self._signal(signal.SIGKILL)
            self.process.wait()
        self.stopped = True

    def _signal(self, number: int) -> None:
        """Sends a signal to the command's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def _resident_mib(pid: int) -> dict[int, float]:
    """Returns the resident memory of a process and its live descendants, MiB, by process id."""
    resident_mib = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in family(pid):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                resident_mib[process.pid] = process.memory_info().rss / 2**20
    return resident_mib
