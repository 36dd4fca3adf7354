"""A command as what a search tries: read before the first trial, started for each, its runs compared."""

import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ...base.errors import UsageError
from ...frameworks.launcher import Launcher
from ...frameworks.registry import find_launcher
from ...results import Measurement, Status
from ...space import Space
from ...space.knob import DerivedKnob
from ..function import measured_by_itself
from ..job import Job, Outcome, RankOutcome
from ..work import Work
from .command import HIDDEN, Command
from .files import read_files
from .objective import PREFERRED, Requirement, objective_of
from .reading import check_installed, lines_for, of_events
from .run import RunTerms
from .template import CommandLine, ShellLine, Template, read_command
from .trial import CommandReport, CommandTrial

if TYPE_CHECKING:
    from ..runner import TrialRequest
    from ..work import Known, TrialTerms


FAR = 0.2
"""By what share of the first run's loss another's may be off at the same steps; beyond that it is another training."""
SCATTERS = 4.0
"""And by how many times what the first run's loss changes from one step to the next."""
LEAST_STEPS = 3
"""How many steps both have to have told a loss of."""


@dataclass
class Comparison:
    """The first run of a search that ended well, and others beside it."""

    unit: str = ""
    """Of its throughput."""
    samples: float | None = None
    """Of its steps."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """That it told, by step."""

    def why_not(self, measured: Measurement, samples: float | None, losses: Mapping[int, float]) -> str:
        """Why a run that ended well does not count; empty where it does. The first is what others are held against.

        Args:
            measured: what it came to.
            samples: of a step, where that is known.
            losses: that it told, by step.
        """
        if not self.unit:
            self.unit, self.samples, self.losses = measured.unit, samples, dict(losses)
        if measured.unit != self.unit:
            return f"it told {measured.unit}, and {self.unit} before: --metric says which counts"
        return _far_off(losses, self.losses) if samples == self.samples else ""


def _far_off(losses: Mapping[int, float], first: Mapping[int, float]) -> str:
    steps = sorted(losses.keys() & first.keys())
    if len(steps) < LEAST_STEPS:
        return ""
    expected = [first[step] for step in steps]
    off = median(losses[step] - first[step] for step in steps)
    scatter = median(abs(after - before) for before, after in pairwise(expected))
    if abs(off) <= max(FAR * median(map(abs, expected)), SCATTERS * scatter):
        return ""
    at = steps[-1]
    return f"its loss is {losses[at]:.4g} at step {at}, where that of the first run was {first[at]:.4g}"


SPLITS = ("tp", "pp", "cp", "sp")
"""Knobs for how many devices share one replica, in each of these ways."""
_TOLD_FIRST = (Status.OK, Status.OOM, Status.WRONG)
"""Of what hosts tell of a trial, what counts before anything else."""


class Commands(Work):
    """Runs of a command, each in fresh processes.

    Args:
        command: as it is asked for.
        space: whose knobs it holds.
        devices: of one trial.
        global_batch: samples of a step, where that is given.
        stated: knobs with one value that another tool's file states, for which the command need not have a place.

    Raises:
        UsageError: a placeholder is filled by nothing, a knob is used nowhere, or a file to be rendered is not there.
    """

    in_turns = False
    imports = ("redline.runners.supervisor", "redline.runners.command.run", "cloudpickle")

    def __init__(
        self,
        command: Command,
        space: Space,
        *,
        devices: int,
        global_batch: int | None = None,
        stated: Collection[str] = (),
    ) -> None:
        self.asked = command
        """As it was asked for."""
        self._space, self._devices, self._global_batch = space, devices, global_batch
        knobs = space.by_name
        whole = command
        if command.launcher is not None:
            launcher = find_launcher(command.launcher)
            whole = launcher.told(command, knobs, short=False)
            command = replace(launcher.told(command, knobs), samples=self._samples_of(launcher, command))
        if command.emulate:
            command = _emulating(command)
        self._line = read_command(command.command, knobs, shell=command.shell)
        self._whole = read_command(whole.command, knobs, shell=command.shell)
        """The command without what makes its run short."""
        self._environment = tuple(_variable(each, knobs) for each in command.env)
        self._files = read_files(command.render, knobs)
        self._samples = Template.read(command.samples, knobs, "--samples") if command.samples else None
        self._grows = Template.read(command.metric_file, knobs, "--metric-file") if command.metric_file else None
        self._lines = lines_for(command.metric)
        self._wanted, self._smaller = objective_of(self._lines.first, command.direction)
        self._requirements = tuple(Requirement.read(each) for each in command.require)
        self._comparison = Comparison()
        places = (self._line, *(value for _, value in self._environment), *self._files, *filter(None, [self._samples]))
        self.names = frozenset(name for each in places for name in each.names)
        """The knobs it mentions, and what of `GIVEN`."""
        if "global_batch" in self.names and global_batch is None:
            raise UsageError("the command takes {global_batch}: say it with --global-batch")
        if global_batch is not None and not self.names & {"global_batch", "grad_accum"} and self._samples is None:
            raise UsageError(
                f"the command does not hear of the global batch, {global_batch}: write {{grad_accum}} or {{global_batch}} into it"
            )
        self.unsaid: tuple[str, ...] = ()
        """Of what is stated, what it has no place for."""
        self._check_used(stated)
        if self._grows is not None:
            self._check_metric_file(self._grows)

    def _samples_of(self, launcher: Launcher, command: Command) -> str | None:
        """Samples of a step as they are asked for, or as the launcher's own option says them.

        Raises:
            UsageError: it has a number of its own that nobody says.
        """
        if command.samples is not None or self._global_batch is not None:
            return command.samples
        said = launcher.samples(command)
        if said is None and launcher.own_total and "micro_batch" in self._space.by_name:
            raise UsageError(
                f"--launcher {launcher.name} takes a step to have as many samples whatever the micro-batch: say how many by "
                f"--global-batch, or by {launcher.total} in the command"
            )
        return said

    def _check_used(self, stated: Collection[str]) -> None:
        """Refuses a knob whose value nothing depends on."""
        used = set(self.names)
        for knob in reversed(list(self._space.by_name.values())):  # each after those it depends on
            if isinstance(knob, DerivedKnob) and knob.name in used:
                used.update(knob.rule.names)
        for knob in self._space.knobs:
            if knob.derived or knob.name in used:
                continue
            if knob.name in stated and len(knob.values) == 1:
                self.unsaid += (knob.name,)
            else:
                raise UsageError(
                    f"the knob '{knob.name}' is used nowhere: neither by the command, nor by --env or --render; write "
                    f"{{{knob.name}}} where its value belongs, or take it out of the space"
                )

    def check_program(self) -> None:
        """Refuses a program that is not there.

        Raises:
            UsageError: so it is.
        """
        if isinstance(self._line, ShellLine) or self._line.words[0].names:
            return
        program = self._line.words[0].text(self.given(0, Path()))
        if shutil.which(program) is None:
            raise UsageError(f"the command is not found: there is no program '{program}'")

    def _check_metric_file(self, grows: Template) -> None:
        """Refuses event files that cannot be read, or of which nobody says what counts."""
        path = Path(grows.text(self.values(self._space.default(), 0, Path("{trial_dir}"))))
        if not of_events(path, look=self.asked.reads_files):
            return
        check_installed()
        if self._lines.first is None:
            raise UsageError(
                "--metric-file is a folder or a file of TensorBoard's; say by --metric which tag counts, such as "
                "--metric train/steps_per_second, or --metric step for the time between its steps"
            )

    def given(self, number: int, folder: Path) -> dict[str, Any]:
        """What a trial gives besides the knobs: on one host, and of several what is the same on each."""
        return {
            "trial": number,
            "trial_dir": str(folder),
            "devices": self._devices,
            "global_batch": self._global_batch,
            "devices_per_host": self._devices,
            "hosts": 1,
            "node_rank": 0,
            "master_addr": "127.0.0.1",
            "master_port": 29500,
        }

    def values(self, config: Mapping[str, Any], number: int, folder: Path) -> dict[str, Any]:
        """What templates are filled with: a knob that a configuration lacks has its default."""
        absent = {knob.name: knob.default for knob in self._space.knobs if not knob.derived}
        return {**absent, **config, **self.given(number, folder)}

    def rendered(self, config: Mapping[str, Any], number: int, folder: Path) -> str:
        """The command of a trial, as it would be written in a shell."""
        return self._shown(self._line, self.values(config, number, folder))

    def whole(self, config: Mapping[str, Any], number: int, folder: Path, *, hosts: int) -> str:
        """The command to train with: not short, and what differs from host to host left in braces."""
        values = {**self.values(config, number, folder), "hosts": hosts, "devices_per_host": self._devices // hosts}
        if hosts > 1:
            values |= {name: f"{{{name}}}" for name in ("node_rank", "master_addr", "master_port")}
        return self._shown(self._whole, values)

    def _shown(self, line: CommandLine | ShellLine, values: Mapping[str, Any]) -> str:
        hides = self.asked.hides_env
        variables = [(name, HIDDEN if hides else each.text(values)) for name, each in self._environment]
        return line.shown(values, variables)

    def job(self, request: "TrialRequest", terms: "TrialTerms") -> Job:
        import cloudpickle

        if request.log is None:
            folder = Path(tempfile.mkdtemp(prefix="redline-trial-"))
        else:
            folder = request.log.parent.parent.absolute() / "trials" / request.log.stem
        values = self.values(request.config, request.number, folder)
        run = RunTerms(
            command=self._line,
            environment=self._environment,
            files=self._files,
            values=values,
            folder=str(folder),
            cwd=os.getcwd(),
            lines=self._lines,
            grows=self._grows.text(values) if self._grows else None,
            wanted=self._wanted,
            smaller=self._smaller,
            work=self._work(values),
            to_the_end=self._wanted is not None and self._wanted not in PREFERRED,
            requirements=self._requirements,
            plan=terms.plan,
            best=request.best_throughput,
            memory_limit_mib=terms.memory_limit_mib,
            on_gpus=terms.device.type == "cuda",
        )
        return Job(
            program=cloudpickle.dumps(CommandTrial(terms=run, takes_port="master_port" in self.names)),
            one_a_host=True,
            # That of GPUs is watched where the command runs.
            memory_limit_mib=None if terms.device.type == "cuda" else terms.memory_limit_mib,
            timeout_s=request.timeout_s or terms.timeout_s,
            log=str(request.log) if request.log else None,
        )

    def measurement(
        self, request: "TrialRequest", terms: "TrialTerms", outcome: Outcome, known: "Known"
    ) -> Measurement:
        whole, losses = _together(outcome)
        measured = measured_by_itself(whole, terms.memory_limit_mib, known)
        if not measured.ok:
            return measured
        samples = self._work(self.values(request.config, request.number, Path()))
        why = self._comparison.why_not(measured, samples, losses)
        return replace(measured, status=Status.WRONG, reason=why) if why else measured

    def _work(self, values: Mapping[str, Any]) -> float | None:
        """Samples of a step."""
        if self._samples is not None:
            text = self._samples.text(values)
            try:
                return float(text)
            except ValueError:
                raise UsageError(f"--samples comes to '{text}', which is no number") from None
        if "micro_batch" not in self._space.by_name:
            return None
        replicas = values.get("dp") or max(1, self._devices // prod(values.get(name) or 1 for name in SPLITS))
        return float(values["micro_batch"] * values.get("grad_accum", 1) * replicas)


def _together(outcome: Outcome) -> tuple[Outcome, Mapping[int, float]]:
    """What the hosts of a trial come to: what one of them has measured, else the cause of its failure; and its losses.

    Of the processes that read along no memory counts: the command's is in what they returned.
    """
    reports: list[CommandReport] = [each.report for each in outcome.ranks if each.report is not None]
    if not reports:
        ranks = tuple(replace(each, peak_memory_mib=None, needed_memory_mib=None) for each in outcome.ranks)
        return replace(outcome, ranks=ranks), {}
    order = {status: number for number, status in enumerate(_TOLD_FIRST)}
    first = min(reports, key=lambda each: (order.get(each.measured.status, len(order)), each.echo))
    peaks = [each.measured.peak_memory_mib for each in reports]
    peaks += [each.peak_memory_mib for each in outcome.ranks if each.report is None and each.secondary]
    whole = replace(first.measured, peak_memory_mib=max((each for each in peaks if each is not None), default=None))
    return Outcome(status=Status.OK, ranks=(RankOutcome(rank=0, status=Status.OK, report=whole),)), first.losses


def _emulating(command: Command) -> Command:
    """A command that runs one rank alone.

    Raises:
        UsageError: no launcher is named, or it has no such mode.
    """
    if command.launcher is None:
        raise UsageError(
            "--emulate needs --launcher: its mode that runs one rank without the others is the framework's"
        )
    if command.shell:
        raise UsageError("--emulate takes torchrun out of the command, which it cannot in a shell: drop --shell")
    return find_launcher(command.launcher).emulating(command)


def _variable(text: str, knobs: Mapping[str, Any]) -> tuple[str, Template]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"--env must be NAME=VALUE, such as OMP_NUM_THREADS={{threads}}, but got '{text}'")
    return name, Template.read(value, knobs, f"--env {name}")
