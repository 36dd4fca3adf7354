"""A running command: started, its metrics read, and ended once its speed is known."""

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

from ...base.reporting import FILE
from .. import failure
from ..load import Watch, family_s, foreign_cores
from ..memory import GpuMemory, Shortage
from ..process import builds_released, family
from ..timing import Clock, Timing, TimingPlan, measure
from .files import TrialFile
from .objective import Objective, Requirement, chosen, usable
from .observation import FOLDER, OBSERVER, Observation, ObservedTraining, Speed
from .reading import Appended, Lines, Reported, StepNumbers
from .suggestion import Suggestion, suggestion
from .template import CommandLine, ShellLine

LOOK_S = 0.25
"""Interval between checks of memory and of growing files, s."""
WORDS_S = 0.5
"""Time after a line about an out-of-memory for a further line with the size of the allocation, s."""
LINGER_S = 1.0
"""Time without output after which a command's background processes are no longer waited for, s."""
TERM_S = 2.0
"""Time for a command to end after SIGTERM, s."""
REPORT_S = 1.0
"""Interval between reports of its state, s."""
HELD_S = 60.0
"""Time for which a speed that was only printed is held back while a process of the command has imported torch, s: it may
belong to work before the training, whose steps will be observed."""
COMPARED_S = 2.0
"""The same for a speed that was asked for, with which observed steps are only compared, s."""
HOPELESS_S = 10.0
"""Time after the first line with an unread rate after which a command that is not observed is ended, s."""
SHOWN_LINES = 40
"""Number of last lines shown if no metric was found."""
MOST_LOSSES = 1000
"""Number of losses that are kept."""
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

    command: CommandLine | ShellLine
    environment: tuple[tuple[str, Any], ...]
    """Templates of environment variables."""
    files: tuple[TrialFile, ...]
    values: Mapping[str, Any]
    """Values of the knobs and of the trial."""
    folder: str
    cwd: str
    lines: Lines
    """Reads the output."""
    grows: str | None
    """A file that it writes numbers to."""
    wanted: str | None
    """The objective; None for the first known metric that is reported."""
    smaller: bool
    """True if a smaller value is better."""
    work: float | None
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


class _Over(Exception):
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
    """Called when one of its processes begins to compile, and when none does any more."""
    on_state: Callable[[str], None] = lambda state: None
    """Called with a text of what has been read so far, when that changes, at most once per `REPORT_S`."""
    costs: list[float] = field(default_factory=list)
    """Cost of each value of the objective, in order."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of each metric."""
    losses: dict[int, float] = field(default_factory=dict)
    """By the step reported with them, or by their order."""
    seen: list[str] = field(default_factory=list)
    """Metrics in the order of their first report."""
    objective: Objective | None = None
    """The objective, once it has been reported."""
    out_of_memory: str = ""
    """Its message about an out-of-memory; empty if there was none."""
    over_limit: bool = False
    """True if that is because it exceeded its memory limit."""
    port_taken: bool = False
    """True if it reported that a port is taken."""
    peak_mib: float = 0.0
    """Memory of the fullest of its processes, or of the fullest GPU, MiB."""
    error: str = ""
    """The last error in its output that does not follow from another one."""
    speed: Speed | None = None
    """Its speed by observation; None if no training was observed."""
    hopeless: Suggestion | None = None
    """Set if it was ended because its speed is printed in a form that is not read."""
    _oom_until: float = math.inf
    _printed_at: float = 0.0
    """Time of its last output."""
    foreign: float | None = None
    """Mean number of cores that other processes kept busy meanwhile."""
    stopped: bool = False
    """True if it was stopped, False if it ended on its own."""

    def __post_init__(self) -> None:
        # Beside the trial's folder, which has to be empty for trainers that refuse any other.
        folder = Path(f"{self.terms.folder}.observed", f"{self.values.get('node_rank', 0)}-{time.monotonic_ns()}")
        folder.mkdir(parents=True)
        self.report = folder / "report.json"
        self.observation = Observation(folder)
        self._appended: list[Appended] = [Appended(self.report)]
        if self.terms.grows is not None:
            self._appended.append(Appended(Path(self.terms.cwd, self.terms.grows), self.terms.lines.names))
        self.tail: deque[str] = deque(maxlen=SHOWN_LINES)
        """Its last lines."""
        self._steps = StepNumbers()
        self._reported_at: float | None = None
        self._look = 0.0
        self._state, self._state_at = "", time.monotonic() + REPORT_S
        self.pids: set[int] = set()
        """All its processes."""
        self.shortage = Shortage(None if self.terms.on_gpus else self.terms.memory_limit_mib)
        self._gpus = GpuMemory() if self.terms.on_gpus else None
        self._load: Watch | None = None
        """Load of the machine since the objective was first reported."""
        self._unread_since: float | None = None
        """Time of the first line with a rate that is not read."""
        self._compiling = False

    # -- a clock -------------------------------------------------------------------------------------------------

    def mark(self) -> int:
        return len(self.costs)

    def read(self, marks: Sequence[int]) -> list[float]:
        return [self.costs[at - 1] for at in marks[1:]]

    # -- running -------------------------------------------------------------------------------------------------

    def timed(self) -> Timing | None:
        """Starts it, follows it until its speed is known, and ends it. Returns None if it ended before.

        Raises:
            OSError: it cannot be started.
        """
        try:
            self._start()
        except OSError:
            self.shortage.close()
            raise
        try:
            with selectors.DefaultSelector() as selector:
                assert self.process.stdout is not None
                os.set_blocking(self.process.stdout.fileno(), False)
                selector.register(self.process.stdout, selectors.EVENT_READ)
                self._selector = selector
                timing = self._timed()
                if self._load is not None:
                    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, so its CPU time is no longer known
                        self.foreign = foreign_cores([self._load.load()])
                self._end()
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self.shortage.close()
        return timing

    def _start(self) -> None:
        terms = self.terms
        for each in terms.files:
            each.write(Path(terms.folder), self.values)
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            FILE: str(self.report),
            **{name: template.text(self.values) for name, template in terms.environment},
        }
        if isinstance(terms.command, ShellLine):
            words = ["/bin/sh", "-c", terms.command.text(self.values)]
        else:
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
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _timed(self) -> Timing | None:
        """Follows it until its speed is known. Returns None if it ended before."""
        terms = self.terms
        try:
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
        except _Over:
            return None

    def _hold(self) -> None:
        """Waits for observed steps after a printed speed is known: one that was not asked for may be that of work before
        the training, and one that was is compared with them.

        Raises:
            _Over: the speed of the training is known by observation, or the command has ended.
        """
        end = time.monotonic() + (COMPARED_S if self.asked else HELD_S)
        while self.observation.processes and not (self.speed is not None and self.speed.complete):
            if time.monotonic() >= end and self.observation.training is None:
                return
            self._read_output()

    def _step(self) -> None:
        """Waits until the objective has been reported once more."""
        before = len(self.costs)
        while len(self.costs) == before:
            self._read_output()

    def _read_output(self) -> None:
        """Reads the next output."""
        exited = self.process.poll() is not None
        data = self._received(LOOK_S)
        now = time.monotonic()
        for line in self.terms.lines.feed(data):
            self._read_line(line, now)
        self._cost(self._steps.step_ms())
        self._printed_at = now if data else self._printed_at
        # Its background processes may still print.
        over = exited and not data and (not self._selector.get_map() or now >= self._printed_at + LINGER_S)
        if over:
            for line in self.terms.lines.last():
                self._read_line(line, now)
        if over or now >= self._look:
            self._look = now + LOOK_S
            self._watch(now, ended=over)
        if over or (self.out_of_memory and now >= self._oom_until):
            raise _Over

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
            written = 0
            while written < len(data):
                written += os.write(1, data[written:])
            return data
        return b""

    def _read_line(self, line: str, now: float) -> None:
        self.tail.append(line)
        if not self.out_of_memory and failure.line_says_oom(line):
            self.out_of_memory, self._oom_until = line.strip(), now + WORDS_S
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
        self.seen += [name for name in reported.values if name not in self.seen]
        if self.objective is None:
            name = chosen(self.terms.wanted, self.seen)
            if name is not None:
                self.objective = Objective(name=name, smaller=self.terms.smaller, work=self.terms.work)
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
        if self._load is None and self.process.poll() is None:
            self._load = Watch(lambda: family_s(self.process.pid))

    def _watch(self, now: float, *, ended: bool) -> None:
        """Checks growing files and memory."""
        for each in self._appended:
            for reported in each.read(now, ended=ended):
                self._take(self._with_rates(reported) if each.path == self.report else reported)
        held = _held_mib(self.process.pid)
        here = self._gpus.held_mib(held) if self._gpus else max(held.values(), default=0.0)
        if here > self.peak_mib:
            self.peak_mib = here
            self.on_peak(here)
        limit = self.terms.memory_limit_mib
        # The limit that a process inherits (RLIMIT_DATA) does not count shared memory and mapped files.
        if limit is not None and here > limit and not self.out_of_memory:
            whose = "a GPU are in use" if self._gpus else "memory are resident in one process"
            self.out_of_memory = f"{here:,.0f} MiB of {whose}, but the limit is {limit:,.0f} MiB"
            self._oom_until, self.over_limit = now, True
        self.pids.update(held)
        self.shortage.look(list(held))
        if self.terms.observe:
            self._observe(now, ended=ended)
        self._give_up(now, ended=ended)
        if now >= self._state_at:
            self._state_at = now + REPORT_S
            before, self._state = self._state, self._read_so_far()
            if self._state != before:
                self.on_state(self._state)

    def _observe(self, now: float, *, ended: bool) -> None:
        """Reads what the observer has written.

        Raises:
            _Over: the speed is known, and no other metric was asked for.
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
        if self._load is None and self.process.poll() is None:
            self._load = Watch(lambda: family_s(self.process.pid))
        self.peak_mib = max(self.peak_mib, training.peak_mib() or 0.0)
        self.speed = training.speed(self.terms.plan, best_s=self._best_step_s(training), ended=ended)
        if not self.asked and self.speed is not None and self.speed.complete and not ended:
            raise _Over

    @property
    def asked(self) -> bool:
        """True if its speed is a number that `--metric` names or the script reports."""
        return self.terms.wanted is not None or self._reported_at is not None

    def _best_step_s(self, training: ObservedTraining) -> float | None:
        """Time of a step of the best candidate so far with the samples of this one's steps, s."""
        best, speed = self.terms.best, self.speed
        if best is None or speed is None:
            return None
        samples = self.samples_per_step(training, speed)
        return None if samples is None else samples / best

    def samples_per_step(self, training: ObservedTraining, speed: Speed) -> float | None:
        """Samples of a step over all ranks: those of the observed batches; without a loader, the micro-batch of the knobs
        times the observed passes and replicas, or what the request says; None if nothing does.
        """
        if speed.samples_per_step is not None:
            return speed.samples_per_step
        if self.terms.micro_batch is not None and speed.backwards_per_step:
            return self.terms.micro_batch * speed.backwards_per_step * max(1, training.world // self.terms.split)
        return self.terms.work

    def _give_up(self, now: float, *, ended: bool) -> None:
        """Ends a command whose speed is printed in a form that is not read, and that cannot be observed.

        Raises:
            _Over: it is one.
        """
        waited = self._unread_since is not None and now >= self._unread_since + HOPELESS_S
        if ended or not waited or self.seen or self.terms.requirements or self.observation.processes:
            return
        self.hopeless = suggestion(list(self.tail))
        if self.hopeless is not None and self.terms.wanted is None:
            raise _Over

    def _read_so_far(self) -> str:
        """Describes what has been read, for the reason of a timeout."""
        if self.speed is not None:
            return f"the command, after {self.speed.steps} observed step{'s'[: self.speed.steps > 1]}"
        if self.costs and self.objective is not None:
            return f"the command, after {len(self.costs)} value{'s'[: len(self.costs) > 1]} of '{self.objective.name}'"
        if not self.tail and not self.seen:
            return f"the command, {failure.NO_METRIC}: it has printed nothing"
        return f"the command, {failure.NO_METRIC}: its output does not contain {self.missing}{self.hint}"

    @property
    def missing(self) -> str:
        """Name of the objective that it should report."""
        return f"'{self.terms.wanted}'" if self.terms.wanted else "a throughput, a step's time or its number"

    @property
    def hint(self) -> str:
        """Lists the metrics that it reported and the line that nearly matched, to be appended; may be empty."""
        near = suggestion(list(self.tail))
        reported = f"; it reported {', '.join(self.seen)}" if self.seen else ""
        return reported + (f"; {near.text}" if near is not None else "")

    def _with_rates(self, reported: Reported) -> Reported:
        """Replaces amounts in a report by rates since the report before."""
        values, before = dict(reported.values), self._reported_at
        self._reported_at = reported.at
        for amount in ("tokens", "samples"):
            if amount in values:
                of = values.pop(amount)
                if f"{amount}_per_second" not in self.seen:  # the first report announces the metric
                    self.seen.append(f"{amount}_per_second")
                if before is not None and reported.at > before:
                    values[f"{amount}_per_second"] = of / (reported.at - before)
        return replace(reported, values=values)

    def _end(self) -> None:
        """Ends it and everything it started, first with SIGTERM, which its launcher may pass on."""
        if self.process.poll() is not None:
            return
        processes: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = family(self.process.pid)
        with builds_released(processes):
            self._signal(signal.SIGTERM)
            end = time.monotonic() + (0.0 if self.out_of_memory else TERM_S)
            while time.monotonic() < end and self.process.poll() is None:
                try:
                    self._read_output()
                except _Over:
                    break
            self._signal(signal.SIGKILL)
            self.process.wait()
        self.stopped = True

    def _signal(self, number: int) -> None:
        """Sends a signal to the command's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def _held_mib(pid: int) -> dict[int, float]:
    """Returns the resident memory of a process and its live descendants, MiB, by process id."""
    held = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in family(pid):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                held[each.pid] = each.memory_info().rss / 2**20
    return held
