"""A command that runs: started, read along, and ended once its speed is known, with what came of it."""

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
from ..process import family
from ..timing import Clock, Timing, TimingPlan, measure
from .files import Rendered
from .objective import Objective, Requirement, chosen, usable
from .reading import Appended, Events, Lines, StepNumbers, Told, of_events
from .template import CommandLine, ShellLine

LOOK_S = 0.25
"""How often memory and the files that grow are looked at, s."""
WORDS_S = 0.5
"""After a line that says memory ran out: how long others may say by how much, s."""
LINGER_S = 1.0
"""After a command has ended: how long what it left in the background may be silent, s."""
TERM_S = 2.0
"""How long a command has to end by itself once it is asked to, s."""
SHOWN_LINES = 40
"""Last lines that are shown where nothing was found in them."""
MOST_LOSSES = 1000
"""Losses that are kept."""
_PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE", re.IGNORECASE)
_ERROR = re.compile(
    r"^(?:\[[^\]]*\]:?\s*)*(?P<text>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b.*|.*\berror: \S.*)$"
)
# What launchers and other ranks make of a rank's failure.
_ECHO = re.compile(
    rf"ChildFailedError|SignalException|CalledProcessError|ProcessExitedException|{failure.PEER_LOST}", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class RunTerms:
    """What is started for a trial, and how it is read."""

    command: CommandLine | ShellLine
    """What is started."""
    environment: tuple[tuple[str, Any], ...]
    """Templates of variables that are set for it."""
    files: tuple[Rendered, ...]
    """What is written beforehand."""
    values: Mapping[str, Any]
    """Of the knobs, and what the trial gives."""
    folder: str
    """Of the trial."""
    cwd: str
    """Where it is started."""
    lines: Lines
    """Reads what it prints."""
    grows: str | None
    """A file that it writes numbers to, or a folder of TensorBoard's event files."""
    wanted: str | None
    """The objective's metric; None for the first known one that is told."""
    smaller: bool
    """Whether less of it is better."""
    work: float | None
    """Samples of a step, where that is known."""
    to_the_end: bool
    """Whether the last value at its end counts, rather than when the value is steady."""
    requirements: tuple[Requirement, ...]
    """Bounds on what it tells."""
    plan: TimingPlan
    """How long and how precisely it is measured."""
    best: float | None
    """Highest throughput so far."""
    memory_limit_mib: float | None
    """Of each of its processes, or of each GPU."""
    on_gpus: bool
    """Whether its memory is that of GPUs."""


class _Over(Exception):
    """The command has ended, or need not go on."""


@dataclass
class Run(Clock):
    """A command that runs; as a clock it tells what its steps cost."""

    terms: RunTerms
    values: Mapping[str, Any]
    """Of the knobs, and what the trial gives here."""
    told_peak: Callable[[float], None] = lambda mib: None
    """Told of its peak memory whenever that rises, MiB."""
    costs: list[float] = field(default_factory=list)
    """Of each value of the objective, in the order they were told."""
    told: dict[str, float] = field(default_factory=dict)
    """The last value of each metric."""
    losses: dict[int, float] = field(default_factory=dict)
    """By the step that was told with them, or in their order."""
    seen: list[str] = field(default_factory=list)
    """Metrics in the order they were first told."""
    objective: Objective | None = None
    """What it is measured by, once that is told."""
    out_of_memory: str = ""
    """What it said when memory ran out."""
    over_limit: bool = False
    """Whether that is because it held more than it may."""
    port_taken: bool = False
    """Whether it said that a port is."""
    peak_mib: float = 0.0
    """Memory of the fullest of its processes, or of the fullest GPU."""
    error: str = ""
    """The last error it printed that is no echo of another."""
    _oom_until: float = math.inf
    _said: float = 0.0
    """When it printed last."""
    foreign: float | None = None
    """Cores that others kept busy meanwhile."""
    stopped: bool = False
    """Whether it was ended, rather than ended by itself."""

    def __post_init__(self) -> None:
        folder = Path(self.terms.folder)
        self.report = folder / "report.jsonl"
        self.report.unlink(missing_ok=True)
        self._appended: list[Appended | Events] = [Appended(self.report)]
        if self.terms.grows is not None:
            path, names = Path(self.terms.cwd, self.terms.grows), self.terms.lines.names
            kind = Events if of_events(path) else Appended
            self._appended.append(kind(path, names))
        self.tail: deque[str] = deque(maxlen=SHOWN_LINES)
        """What it said last."""
        self._steps = StepNumbers()
        self._reported_at: float | None = None
        self._look = 0.0
        self.pids: set[int] = set()
        """All its processes."""
        self.shortage = Shortage(None if self.terms.on_gpus else self.terms.memory_limit_mib)
        self._gpus = GpuMemory() if self.terms.on_gpus else None
        self._load: Watch | None = None
        """Of the machine, since the objective was told first."""

    # -- a clock -------------------------------------------------------------------------------------------------

    def mark(self) -> int:
        return len(self.costs)

    def read(self, marks: Sequence[int]) -> list[float]:
        return [self.costs[at - 1] for at in marks[1:]]

    # -- running -------------------------------------------------------------------------------------------------

    def timed(self) -> Timing | None:
        """Starts it, follows it until its speed is known, and ends it; None where it ended before.

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
                    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and its processor time with it
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
            words = [each.text(self.values) for each in terms.command.words]
            environment |= {name: template.text(self.values) for name, template in terms.command.environment}
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
        """Follows it until its speed is known; None where it ended before."""
        terms = self.terms
        try:
            self._step()
            if terms.to_the_end:
                while True:
                    self._step()
            best = None
            if terms.best is not None and self.objective is not None:
                best = self.objective.cost_of(terms.best)
            return measure(self._step, self, terms.plan, best_step_ms=best)
        except _Over:
            return None

    def _step(self) -> None:
        """Returns when the objective has been told once more."""
        before = len(self.costs)
        while len(self.costs) == before:
            self._turn()

    def _turn(self) -> None:
        """Takes in what it says next."""
        ended = self.process.poll() is not None
        data = self._received(LOOK_S)
        now = time.monotonic()
        for line in self.terms.lines.feed(data):
            self._heard(line, now)
        self._cost(self._steps.step_ms())
        self._said = now if data else self._said
        # Something that it left in the background may go on talking.
        over = ended and not data and (not self._selector.get_map() or now >= self._said + LINGER_S)
        if over:
            for line in self.terms.lines.last():
                self._heard(line, now)
        if over or now >= self._look:
            self._look = now + LOOK_S
            self._watch(now, ended=over)
        if over or (self.out_of_memory and now >= self._oom_until):
            raise _Over

    def _received(self, wait_s: float) -> bytes:
        """What it prints next, which goes to the log; nothing where it says nothing for so long."""
        if not self._selector.get_map():  # it has closed its output, and perhaps goes on
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

    def _heard(self, line: str, now: float) -> None:
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
            self._take(Told(values, now))

    def _take(self, told: Told) -> None:
        """Numbers that were told: the objective's become costs."""
        self.seen += [name for name in told.values if name not in self.seen]
        if self.objective is None:
            name = chosen(self.terms.wanted, self.seen)
            if name is not None:
                self.objective = Objective(name=name, smaller=self.terms.smaller, work=self.terms.work)
        self.told.update(told.values)
        if "loss" in told.values and len(self.losses) < MOST_LOSSES:
            self.losses[int(told.values.get("step", len(self.losses)))] = told.values["loss"]
        if self.objective is None or (value := told.values.get(self.objective.name)) is None:
            return
        if self.objective.name == "step":
            self._cost(self._steps.told(value, told.at))
        else:
            self._cost(value)

    def _cost(self, value: float | None) -> None:
        """Takes a value of the objective, where it is one."""
        if value is None or not usable(value):
            return
        assert self.objective is not None
        self.costs.append(self.objective.cost(value))
        if self._load is None and self.process.poll() is None:
            self._load = Watch(lambda: family_s(self.process.pid))

    def _watch(self, now: float, *, ended: bool) -> None:
        """Looks at what does not come by the pipe: files that grow, and memory."""
        for each in self._appended:
            for told in each.read(now, ended=ended):
                self._take(self._with_rates(told) if each.path == self.report else told)
        held = _held_mib(self.process.pid)
        here = self._gpus.held_mib(held) if self._gpus else max(held.values(), default=0.0)
        if here > self.peak_mib:
            self.peak_mib = here
            self.told_peak(here)
        limit = self.terms.memory_limit_mib
        if self._gpus and limit is not None and here > limit and not self.out_of_memory:
            self.out_of_memory, self._oom_until = (
                f"{here:,.0f} MiB of a GPU are held, and {limit:,.0f} MiB is the limit",
                now,
            )
            self.over_limit = True
        self.pids.update(held)
        self.shortage.look(list(held))

    def _with_rates(self, told: Told) -> Told:
        """A report with the rates that its amounts come to since the one before."""
        values, before = dict(told.values), self._reported_at
        self._reported_at = told.at
        for amount in ("tokens", "samples"):
            if amount in values:
                of = values.pop(amount)
                if f"{amount}_per_second" not in self.seen:  # the first says what is to come
                    self.seen.append(f"{amount}_per_second")
                if before is not None and told.at > before:
                    values[f"{amount}_per_second"] = of / (told.at - before)
        return replace(told, values=values)

    def _end(self) -> None:
        """Has it end, and everything it started: at first by a request, which its launcher may pass on."""
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            end = time.monotonic() + (0.0 if self.out_of_memory else TERM_S)
            while time.monotonic() < end and self.process.poll() is None:
                try:
                    self._turn()
                except _Over:
                    break
            self._signal(signal.SIGKILL)
            self.process.wait()
            self.stopped = True

    def _signal(self, number: int) -> None:
        """To the command's whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def _held_mib(pid: int) -> dict[int, float]:
    """Resident memory of a process and of all that descend from it, MiB; of those alive."""
    held = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in family(pid):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                held[each.pid] = each.memory_info().rss / 2**20
    return held
