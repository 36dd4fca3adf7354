"""What the process of a trial does with a command: starts it, reads along, and ends it once its speed is known."""

import contextlib
import json
import math
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil

from ...reporting import FILE
from ...results import Measurement, Status
from .. import failure
from ..load import Watch, family_s, foreign_cores
from ..memory import GpuMemory
from ..process import family
from ..shortage import Shortage
from ..timing import Clock, Timing, TimingPlan, measure, median_interval
from .events import Events, of_events
from .files import Rendered
from .objective import BESIDE, STEP_TIMES, Objective, Requirement, chosen, usable
from .reading import Appended, Lines, Told, near_misses
from .template import CommandLine, ShellLine

if TYPE_CHECKING:
    from ..rank import RankContext

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
RANKS_APART = 4
"""Steps by which ranks that each show a bar may be apart; a bar that falls back to less than half begins anew."""
SILENT_S = 10.0
"""How long a host that has told nothing waits for another to do so once its command has ended, s."""
PORTS = 3
"""How often a command is started that finds its port taken."""
_PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE", re.IGNORECASE)
_ERROR = re.compile(
    r"^(?:\[[^\]]*\]:?\s*)*(?P<text>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b.*|.*\berror: \S.*)$"
)
# What launchers and other ranks make of a rank's failure.
_ECHO = re.compile(
    rf"ChildFailedError|SignalException|CalledProcessError|ProcessExitedException|{failure.PEER_LOST}", re.IGNORECASE
)
_KILLED = re.compile(r"SIGKILL|\bKilled\b|exitcode\s*:?\s*-9\b|exit(?:ed)? with (?:code|status) 137\b")


@dataclass(frozen=True, kw_only=True)
class CommandTrial:
    """One trial of a command. Called in a process of its own, below which everything is ended afterwards."""

    command: CommandLine | ShellLine
    """What is started."""
    environment: tuple[tuple[str, Any], ...]
    """Templates of variables that are set for it."""
    files: tuple[Rendered, ...]
    """What is written beforehand."""
    values: Mapping[str, Any]
    """Of the knobs, and what the trial gives."""
    takes_port: bool
    """Whether the port is given to it."""
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
    """Of each of its processes."""
    on_gpus: bool
    """Whether its memory is that of GPUs."""

    def __call__(self, context: "RankContext") -> Measurement:
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        context.phase("the command")
        if context.world_size > 1:
            return self._on_one_of(context)
        for attempt in range(PORTS):
            run = _Run(self, {**self.values, "master_port": _free_port()})
            measured = run.measured()
            if not self._port_taken(run, measured) or attempt == PORTS - 1:
                break
            print(f"redline: the port {run.values['master_port']} is taken; started again on another", flush=True)
        return measured

    def _on_one_of(self, context: "RankContext") -> Measurement:
        """Its part on one of several hosts.

        Raises:
            RuntimeError: the port is taken; whoever started it on all hosts tries another.
        """
        where = urlsplit(context.init_method)
        hosts = {
            "hosts": context.world_size,
            "node_rank": context.rank,
            "devices_per_host": self.values["devices"] // context.world_size,
            "master_addr": where.hostname,
            "master_port": where.port,
        }
        run = _Run(self, {**self.values, **hosts})
        measured = run.measured()
        if self._port_taken(run, measured):
            raise RuntimeError(f"EADDRINUSE: the port {where.port} is taken")
        if run.silent:
            # Of most trainings one host tells something, which ends this one.
            time.sleep(SILENT_S)
        return measured

    def _port_taken(self, run: "_Run", measured: Measurement) -> bool:
        """Whether another port may help: some say that one is taken, take another themselves and go on."""
        return measured.status is Status.CRASH and run.port_taken and self.takes_port


class _Over(Exception):
    """The command has ended, or need not go on."""


@dataclass
class _Run(Clock):
    """A command that runs; as a clock it tells what its steps cost."""

    trial: CommandTrial
    values: Mapping[str, Any]
    """Of the knobs, and what the trial gives here."""
    costs: list[float] = field(default_factory=list)
    """Of each value of the objective, in the order they were told."""
    told: dict[str, float] = field(default_factory=dict)
    """The last value of each metric."""
    seen: list[str] = field(default_factory=list)
    """Metrics in the order they were first told."""
    objective: Objective | None = None
    out_of_memory: str = ""
    port_taken: bool = False
    peak_mib: float = 0.0
    _oom_until: float = math.inf
    _said: float = 0.0
    """When it printed last."""
    _foreign: float | None = None
    """Cores that others kept busy meanwhile."""
    _stopped: bool = False
    """Whether it was ended, rather than ended by itself."""
    silent: bool = False
    """Whether it has ended well, and told nothing."""

    def __post_init__(self) -> None:
        folder = Path(self.trial.folder)
        self.report = folder / "report.jsonl"
        self.report.unlink(missing_ok=True)
        self._appended: list[Appended | Events] = [Appended(self.report)]
        if self.trial.grows is not None:
            path, names = Path(self.trial.cwd, self.trial.grows), self.trial.lines.names
            kind = Events if of_events(path) else Appended
            self._appended.append(kind(path, names))
        self._tail: deque[str] = deque(maxlen=SHOWN_LINES)
        self._last_step: tuple[float, float] | None = None
        self._reported_at: float | None = None
        self._look = 0.0
        self._pids: set[int] = set()
        self._error = ""
        self._shortage = Shortage(self.trial.memory_limit_mib)
        self._gpus = GpuMemory() if self.trial.on_gpus else None
        self._load: Watch | None = None
        """Of the machine, since the objective was told first."""

    # -- a clock -------------------------------------------------------------------------------------------------

    def mark(self) -> int:
        return len(self.costs)

    def read(self, marks: Sequence[int]) -> list[float]:
        return [self.costs[at - 1] for at in marks[1:]]

    # -- running -------------------------------------------------------------------------------------------------

    def measured(self) -> Measurement:
        """Starts it, and what came of it once it has ended."""
        timing = None
        try:
            self._start()
        except OSError as error:
            self._shortage.close()
            return Measurement(status=Status.CRASH, reason=f"the command cannot be started: {error.strerror or error}")
        try:
            with selectors.DefaultSelector() as selector:
                assert self.process.stdout is not None
                os.set_blocking(self.process.stdout.fileno(), False)
                selector.register(self.process.stdout, selectors.EVENT_READ)
                self._selector = selector
                timing = self._timed()
                if self._load is not None:
                    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and its processor time with it
                        self._foreign = foreign_cores([self._load.load()])
                self._end()
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self._shortage.close()
        return self._outcome(timing)

    def _start(self) -> None:
        trial = self.trial
        for each in trial.files:
            each.write(Path(trial.folder), self.values)
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            FILE: str(self.report),
            **{name: template.text(self.values) for name, template in trial.environment},
        }
        if isinstance(trial.command, ShellLine):
            words = ["/bin/sh", "-c", trial.command.text(self.values)]
        else:
            words = [each.text(self.values) for each in trial.command.words]
            environment |= {name: template.text(self.values) for name, template in trial.command.environment}
        print("redline:", json.dumps(words), flush=True)
        self.process = subprocess.Popen(
            words,
            cwd=trial.cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _timed(self) -> Timing | None:
        """Follows it until its speed is known; None where it ended before."""
        trial = self.trial
        try:
            self._step()
            if trial.to_the_end:
                while True:
                    self._step()
            best = None
            if trial.best is not None and self.objective is not None:
                best = self.objective.cost_of(trial.best)
            return measure(self._step, self, trial.plan, best_step_ms=best)
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
        for line in self.trial.lines.feed(data):
            self._heard(line, now)
        self._said = now if data else self._said
        # Something that it left in the background may go on talking.
        over = ended and not data and (not self._selector.get_map() or now >= self._said + LINGER_S)
        if over:
            for line in self.trial.lines.last():
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
        self._tail.append(line)
        if not self.out_of_memory and failure.line_says_oom(line):
            self.out_of_memory, self._oom_until = line.strip(), now + WORDS_S
        elif self.out_of_memory and failure.requested_in(line) and not failure.requested_in(self.out_of_memory):
            self.out_of_memory = line.strip()
        if _PORT_TAKEN.search(line):
            self.port_taken = True
        if (match := _ERROR.match(line)) and not _ECHO.search(line):
            self._error = match["text"]
        values = self.trial.lines.read(line)
        if values:
            self._take(Told(values, now))

    def _take(self, told: Told) -> None:
        """Numbers that were told: the objective's become costs."""
        self.seen += [name for name in told.values if name not in self.seen]
        if self.objective is None:
            name = chosen(self.trial.wanted, self.seen)
            if name is not None:
                self.objective = Objective(name=name, smaller=self.trial.smaller, work=self.trial.work)
        self.told.update(told.values)
        if self.objective is None or (value := told.values.get(self.objective.name)) is None:
            return
        if self.objective.name == "step":
            before = self._last_step
            again = before is not None and value < before[0] / 2 and before[0] > RANKS_APART
            if before is not None and value <= before[0] and not again:
                return  # a bar is drawn more than once a step, and by every rank
            self._last_step = (value, told.at)
            if before is None or again:
                return
            value = (told.at - before[1]) / (value - before[0]) * 1e3
        if usable(value):
            self.costs.append(self.objective.cost(value))
            if self._load is None and self.process.poll() is None:
                self._load = Watch(lambda: family_s(self.process.pid))

    def _watch(self, now: float, *, ended: bool) -> None:
        """Looks at what does not come by the pipe: files that grow, and memory."""
        for each in self._appended:
            for told in each.read(now, ended=ended):
                self._take(self._with_rates(told) if each.path == self.report else told)
        held = _held_mib(self.process.pid)
        self.peak_mib = max(self.peak_mib, *held.values(), self._gpus.held_mib(held) if self._gpus else 0.0, 0.0)
        self._pids.update(held)
        self._shortage.look(list(held))

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
            self._stopped = True

    def _signal(self, number: int) -> None:
        """To the command's whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    # -- what came of it -----------------------------------------------------------------------------------------

    def _outcome(self, timing: Timing | None) -> Measurement:
        code = self.process.returncode
        peak = self.peak_mib or None
        if self.out_of_memory:
            needed = failure.requested_in(self.out_of_memory)
            return Measurement(
                status=Status.OOM,
                reason=failure.shortened(self.out_of_memory),
                peak_memory_mib=(peak or 0.0) + needed if needed is not None else None,
            )
        if timing is None and code != 0 and not self._stopped:
            return self._crashed(code)
        if timing is None and not self.costs:
            return self._silent()
        if (loss := self.told.get("loss")) is not None and not math.isfinite(loss):
            return Measurement(
                status=Status.WRONG, reason=f"the loss it told is {loss}", peak_memory_mib=peak, loss=loss
            )
        for each in self.trial.requirements:
            if broken := each.broken(self.told):
                others = self._told_beside(each.rule.names)
                return Measurement(
                    status=Status.WRONG, reason="; ".join(filter(None, [broken, others])), peak_memory_mib=peak
                )
        assert self.objective is not None
        cost, spread, note = self._cost(timing)
        throughput, unit = self.objective.throughput(cost), self.objective.unit
        timed = self.objective.name in STEP_TIMES
        beside = self._told_beside((self.objective.name,))
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
            foreign_cores=self._foreign,
        )

    def _told_beside(self, without: Collection[str]) -> str:
        """What was asked for by name or is required, as it was told last."""
        asked = [*self.trial.lines.asked, *(name for each in self.trial.requirements for name in each.rule.names)]
        shown = [name for name in dict.fromkeys(asked) if name in self.told and name not in (*BESIDE, *without)]
        return ", ".join(f"{name} = {self.told[name]:g}" for name in shown)

    def _cost(self, timing: Timing | None) -> tuple[float, float | None, str]:
        """What counts of all costs, how sure that is, and what is to be said of it."""
        if timing is not None:
            return timing.step_ms, timing.spread_ms, timing.stopped_early
        if self.trial.to_the_end or len(self.costs) == 1:
            return self.costs[-1], None, ""
        # It ended before it was steady: without the first, which holds what happens once.
        median, half = median_interval(self.costs[1:])
        return median, half, f"ended after {len(self.costs)} values"

    def _crashed(self, code: int) -> Measurement:
        said = " ".join(self._tail)
        how = f"the command was {failure.ended(code)}" if code < 0 else f"the command exited with code {code}"
        if code in (-signal.SIGKILL, 137) or _KILLED.search(said):
            for pid in sorted(self._pids):
                if short := self._shortage.evidence(pid):
                    return Measurement(status=Status.OOM, reason=f"{how}: {short}")
        return Measurement(
            status=Status.CRASH, reason=failure.shortened(f"{how}: {self._error}" if self._error else how)
        )

    def _silent(self) -> Measurement:
        """It ended well, and nothing that it said was the objective."""
        self.silent = True
        wanted = [self.trial.wanted] if self.trial.wanted else []
        missing = f"'{self.trial.wanted}'" if wanted else "a throughput, a step's time or its number"
        lines = list(self._tail)
        near = near_misses(lines, wanted)
        print(f"redline: nothing in what the command said was {missing}; its last lines:", file=sys.stderr)
        for line in lines:
            print(f"    {line}", file=sys.stderr)
        hint = f"; did you mean what is in '{failure.shortened(near[-1].strip(), 120)}'?" if near else ""
        seen = f"; it told {', '.join(self.seen)}" if self.seen else ""
        return Measurement(status=Status.CRASH, reason=f"the command ended without telling {missing}{seen}{hint}")


def _held_mib(pid: int) -> dict[int, float]:
    """Resident memory of a process and of all that descend from it, MiB; of those alive."""
    held = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in family(pid):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                held[each.pid] = each.memory_info().rss / 2**20
    return held


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
