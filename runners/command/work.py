"""A command as the work of a search: parsed before the first trial, started for each trial, and its results compared."""

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import UsageError
from ...base.option import option
from ...frameworks.export_input import PORT
from ...frameworks.launcher import Launcher
from ...frameworks.registry import find_launcher
from ...knobs.strategy import SPLITS
from ...models.flops import flops_of
from ...models.workload import Workload
from ...results import Measurement, Status
from ...space import Space
from ...space.knob import DerivedKnob
from ..runner import LEAST_COMPILE_TIMEOUT_S, Work
from ..trial.function import reported_measurement
from ..trial.job import Job, Outcome, RankOutcome
from .command import HIDDEN, Command
from .comparison import EXACT, RequestedTraining, TrainingComparison
from .files import TrialFile, read_files
from .objective import PREFERRED, Requirement, smaller_is_better
from .reading import lines_for
from .run import RunTerms
from .template import CommandLine, Template
from .trial import CommandReport, CommandTrial

if TYPE_CHECKING:
    from ..runner import CommonFields, TrialRequest, TrialTerms


_HOST_VALUES = {
    "node_rank": ("\ue000", "$NODE_RANK"),
    "master_addr": ("\ue001", "$MASTER_ADDR"),
    "master_port": ("\ue002", f"${{MASTER_PORT:-{PORT}}}"),
}
"""Placeholder characters and shell variables for values that differ between hosts. The characters are of Unicode's private
use area, which no command contains."""
_INTERPRETER = re.compile(r"python[\d.]*|bash|sh|torchrun")
_OTHER_CODE = ("-m", "--module", "-c", "--no-python", "--no_python")
"""Options of interpreters and torchrun that start something else than a script."""
_CONCLUSIVE = (Status.OK, Status.OOM, Status.WRONG)
"""Statuses of a host's report that take precedence over those of other hosts."""


class Commands(Work):
    """Runs of a command, each in fresh processes.

    Args:
        command: as requested.
        space: with the command's knobs.
        devices: of one trial.
        global_batch: samples per step, if given.
        command_batch: samples per step that the command gives itself.
        command_knobs: values of knobs that the command trains with as it is. A configuration with these values is the
            user's command itself, without options for them.
        ranks: devices that were requested explicitly, each of which should have a rank.
        workload: the model that it trains, if known, whose FLOPs give the MFU.

    Raises:
        UsageError: a placeholder is unknown, a knob is not used, or a file to render does not exist.
    """

    imports = ("redline.runners.host.supervisor", "redline.runners.command.run", "cloudpickle")

    def __init__(
        self,
        command: Command,
        space: Space,
        *,
        devices: int,
        global_batch: int | None = None,
        command_batch: int | None = None,
        command_knobs: Mapping[str, Any] | None = None,
        ranks: int | None = None,
        workload: Workload | None = None,
    ) -> None:
        self._ranks, self._workload = ranks, workload
        self.requested = command
        """The command as requested."""
        self._space, self._devices, self._global_batch = space, devices, global_batch
        knobs = space.by_name
        if command.samples is None and global_batch is None and command_batch is not None:
            command = replace(command, samples=str(command_batch))
        unshortened = as_is = command
        self._added: tuple[str, ...] = ()
        """Knobs that are passed as options of the launcher."""
        self._command_knobs = command_knobs or {}
        self.notes: tuple[str, ...] = ()
        """Notes for the user on how trials differ from the command."""
        if command.launcher is not None:
            launcher = find_launcher(command.launcher)
            unshortened, as_is = launcher.with_knobs(command, knobs, short=False), launcher.with_knobs(command, {})
            command = replace(launcher.with_knobs(command, knobs), samples=self._samples_of(launcher, command))
            self._added = launcher.added(self.requested, knobs)
            if command_knobs is not None:
                self._command_knobs = {**{name: values[0] for name, values in launcher.knobs.items()}, **command_knobs}
            self.notes = tuple(filter(None, [launcher.short_note(self.requested)]))
        self._line = CommandLine.read(command.command, knobs)
        self._as_is = CommandLine.read(as_is.command, knobs)
        """The user's command without options for knobs, with those that shorten its run."""
        self._unshortened = CommandLine.read(unshortened.command, knobs)
        """The command with options for knobs, without those that shorten its run."""
        self._environment = tuple(_variable(variable, knobs) for variable in command.env)
        self._files = read_files(command.render, knobs)
        self._samples = Template.read(command.samples, knobs, "samples") if command.samples else None
        self._lines = lines_for(command.metric)
        self._objective = self._lines.objective
        self._smaller = smaller_is_better(self._objective, command.direction)
        self._requirements = tuple(Requirement.read(bound) for bound in command.require)
        self._comparison = TrainingComparison()
        self._remeasured: Counter[str] = Counter()
        """Re-measurements so far, by the name of their log."""
        templates: tuple[CommandLine | TrialFile | Template, ...] = (
            self._line,
            *(value for _, value in self._environment),
            *self._files,
            *filter(None, [self._samples]),
        )
        self.names = frozenset(name for template in templates for name in template.names)
        """The knobs and names of `PLACEHOLDERS` that it uses."""
        self.divisions = tuple(expression for template in templates for expression in template.divisions)
        """Its expressions that may have no value for some configurations, as after a division by zero."""
        if "global_batch" in self.names and global_batch is None:
            raise UsageError(f"the command uses {{global_batch}}: set it with {option('global_batch')}")
        if global_batch is not None and not self.names & {"global_batch", "grad_accum"} and self._samples is None:
            raise UsageError(
                f"the command has no placeholder for the global batch, {global_batch}: add {{grad_accum}} or "
                "{global_batch} to it"
            )
        self._check_used()

    def _samples_of(self, launcher: Launcher, command: Command) -> str | None:
        """Returns the samples per step as requested, or as given by the launcher's option.

        Raises:
            UsageError: the launcher needs a number that is not given.
        """
        if command.samples is not None or self._global_batch is not None:
            return command.samples
        samples = launcher.samples(command)
        # With a fixed total the micro-batch does not change the samples of a step, so that they cannot be derived from it.
        if samples is None and launcher.own_total and "micro_batch" in self._space.by_name:
            raise UsageError(
                f"{option('launcher')} {launcher.name} has a fixed number of samples per step, whatever the micro-batch: set it "
                f"with {option('global_batch')}, or with {launcher.total} in the command"
            )
        return samples

    def _check_used(self) -> None:
        """Refuses a knob that nothing depends on."""
        used = set(self.names)
        for knob in reversed(list(self._space.by_name.values())):  # a derived knob before those that it depends on
            if isinstance(knob, DerivedKnob) and knob.name in used:
                used.update(knob.rule.names)
        for knob in self._space.knobs:
            if not knob.derived and knob.name not in used:
                raise UsageError(
                    f"the knob '{knob.name}' is not used by the command, its env or render; write "
                    f"{{{knob.name}}} where its value belongs, or remove it from the space"
                )

    def check_program(self) -> None:
        """Checks that the program and the script that it is started with exist.

        Raises:
            UsageError: one does not exist.
        """
        if self._line.words[0].names:
            return
        program = self._line.words[0].text(self.trial_values(0, Path()))
        if shutil.which(program) is None:
            raise UsageError(f"the command is not found: there is no program '{program}'")
        script = self._script(Path(program).name)
        if script is not None and not os.path.exists(script):
            raise UsageError(f"the command is not found: there is no file '{script}' in the current folder")

    def _script(self, program: str) -> str | None:
        """Returns the script that an interpreter or torchrun is started with; None if there is none or it varies."""
        if not _INTERPRETER.fullmatch(program):
            return None
        for word in self._line.words[1:]:
            word_text = "" if word.names else word.text({})
            if word_text in _OTHER_CODE:
                return None
            if word_text.endswith((".py", ".sh")) and not word_text.startswith("-"):
                return word_text
            if program != "torchrun" and not word_text.startswith("-"):
                return None  # the value of an option, or a script with another ending
        return None

    def trial_values(self, number: int, folder: Path) -> dict[str, Any]:
        """Returns the values of `PLACEHOLDERS` on one host; with several, those that are the same on each."""
        return {
            "trial": number,
            "trial_dir": str(folder),
            "devices": self._devices,
            "global_batch": self._global_batch,
            "devices_per_host": self._devices,
            "hosts": 1,
            "node_rank": 0,
            "master_addr": "127.0.0.1",
            "master_port": PORT,
        }

    def values(self, config: Mapping[str, Any], number: int, folder: Path) -> dict[str, Any]:
        """Returns the values for templates. A knob that a configuration lacks has its default."""
        absent = {knob.name: knob.default for knob in self._space.knobs if not knob.derived}
        return {**absent, **config, **self.trial_values(number, folder)}

    def rendered(self, config: Mapping[str, Any], number: int, folder: Path) -> str:
        """Returns the command of a trial, as for a shell."""
        values = self.values(config, number, folder)
        return self._shown(self._line_of(values), values)

    def _line_of(self, values: Mapping[str, Any]) -> CommandLine:
        """Returns the command of a trial: the user's own, if all knobs that would be options have the command's values."""
        if not self._added or self.requested.render:
            return self._line
        unchanged = all(
            name in self._command_knobs and self._command_knobs[name] == values[name] for name in self._added
        )
        return self._as_is if unchanged else self._line

    def training_command(self, config: Mapping[str, Any], number: int, folder: Path, *, hosts: int) -> str:
        """Returns the command for training: without the options that shorten it, and with the shell variables of
        `redline export` for values that differ between hosts.
        """
        values = {**self.values(config, number, folder), "hosts": hosts, "devices_per_host": self._devices // hosts}
        if hosts == 1:
            return self._shown(self._unshortened, values)
        shown = self._shown(self._unshortened, values | {name: mark for name, (mark, _) in _HOST_VALUES.items()})
        for mark, variable in _HOST_VALUES.values():
            # shlex has quoted a word with a mark: the quotes are closed and opened again around the variable.
            shown = shown.replace(mark, f"'\"{variable}\"'")
        return shown.replace("''\"", '"').replace("\"''", '"')

    def write_files(self, config: Mapping[str, Any], number: int, folder: Path) -> None:
        """Writes the files that the command reads from `{trial_dir}`.

        Raises:
            OSError: they cannot be written.
        """
        if self._files:
            folder.mkdir(parents=True, exist_ok=True)
        for file in self._files:
            file.write(folder, self.values(config, number, folder))

    def _shown(self, line: CommandLine, values: Mapping[str, Any]) -> str:
        hides = self.requested.hides_env
        variables = [(name, HIDDEN if hides else template.text(values)) for name, template in self._environment]
        return line.shown(values, variables)

    def job(self, request: "TrialRequest", terms: "TrialTerms") -> Job:
        import cloudpickle

        if request.log is None:
            folder = Path(tempfile.mkdtemp(prefix="redline-trial-"))
        else:
            folder = self._folder_of(request.log)
        values = self.values(request.config, request.number, folder)
        run = RunTerms(
            command=self._line_of(values),
            environment=self._environment,
            files=self._files,
            values=values,
            folder=str(folder),
            cwd=os.getcwd(),
            lines=self._lines,
            objective=self._objective,
            smaller=self._smaller,
            samples_per_step=self._samples_per_step(values),
            to_the_end=self._objective is not None and self._objective not in PREFERRED,
            requirements=self._requirements,
            plan=terms.plan,
            best=request.best_throughput,
            memory_limit_mib=terms.memory_limit_mib,
            on_gpus=terms.device.type == "cuda",
            observe=not self.requested.no_observe,
            micro_batch=values.get("micro_batch"),
            split=prod(values.get(name) or 1 for name in SPLITS),
        )
        timeout_s = request.timeout_s or terms.timeout_s
        return Job(
            program=cloudpickle.dumps(CommandTrial(terms=run, takes_port="master_port" in self.names)),
            one_a_host=True,
            # The limit of GPUs is checked where the command runs.
            memory_limit_mib=None if terms.device.type == "cuda" else terms.memory_limit_mib,
            timeout_s=timeout_s,
            compile_timeout_s=max(timeout_s or 0.0, LEAST_COMPILE_TIMEOUT_S),
            log=str(request.log) if request.log else None,
        )

    def _folder_of(self, log: Path) -> Path:
        """Returns a measurement's folder, without files of an interrupted one.

        Re-measurements of a trial share a log but not a folder: the second one would find the files of the first.
        """
        name = log.stem
        if name.endswith(".again"):
            self._remeasured[name] += 1
            name = f"{name}-{self._remeasured[name]}"
        folder = log.parent.parent.absolute() / "trials" / name
        # Removed here and not by the hosts, which start at different times and may share the folder.
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def measurement(
        self, request: "TrialRequest", terms: "TrialTerms", outcome: Outcome, common: "CommonFields"
    ) -> Measurement:
        combined, losses = _combined(outcome)
        measured = reported_measurement(combined, terms.memory_limit_mib, common)
        if not measured.ok:
            return measured
        values = self.values(request.config, request.number, Path())
        reason = self._comparison.deviation(measured, self._samples_per_step(values), losses, self._requested(values))
        return replace(measured, status=Status.WRONG, reason=reason) if reason else self._with_flops(measured)

    def _with_flops(self, measured: Measurement) -> Measurement:
        """Adds the FLOP/s of the known model, if it trains samples of that model's length."""
        observed, workload = measured.observed, self._workload
        if observed is None or workload is None or not measured.samples_per_second:
            return measured
        tokens = (observed["tokens_per_step"] or 0.0) / observed["samples_per_step"]
        if workload.seq_len is not None and abs(tokens - workload.seq_len) > EXACT * workload.seq_len:
            return measured
        if (flops := flops_of(workload).per_sample) is None:
            return measured
        return replace(measured, tflops_per_device=flops * measured.samples_per_second / observed["ranks"] / 1e12)

    def _requested(self, values: Mapping[str, Any]) -> RequestedTraining:
        """Returns the training that a trial was to run."""
        micro_batch = values.get("micro_batch")
        states_batch = (
            self._samples is not None or self._global_batch is not None or "grad_accum" in self._space.by_name
        )
        return RequestedTraining(
            samples_per_step=self._samples_per_step(values) if states_batch else None,
            micro_batch=None if micro_batch is None else float(micro_batch),
            precision=values.get("precision"),
            ranks=self._ranks,
        )

    def _samples_per_step(self, values: Mapping[str, Any]) -> float | None:
        """Returns the samples per step; None if unknown."""
        if self._samples is not None:
            samples = self._samples.text(values)
            try:
                return float(samples)
            except ValueError:
                raise UsageError(f"samples must be a number, but is '{samples}'") from None
        if "micro_batch" not in self._space.by_name:
            return None
        replicas = values.get("dp") or max(1, self._devices // prod(values.get(name) or 1 for name in SPLITS))
        return float(values["micro_batch"] * values.get("grad_accum", 1) * replicas)


def _combined(outcome: Outcome) -> tuple[Outcome, Mapping[int, float]]:
    """Returns the outcome of a trial by the reports of its hosts, a measurement if one has it, otherwise the cause of the
    failure; and the losses.

    The memory of the processes that read the output does not count: the command's memory is in their reports.
    """
    reports: list[CommandReport] = [rank.report for rank in outcome.ranks if rank.report is not None]
    if not reports:
        ranks = tuple(replace(rank, peak_memory_mib=None, needed_memory_mib=None) for rank in outcome.ranks)
        return replace(outcome, ranks=ranks), {}
    precedence = {status: number for number, status in enumerate(_CONCLUSIVE)}
    decisive = min(reports, key=lambda report: (precedence.get(report.measured.status, len(precedence)), report.echo))
    peaks = [report.measured.peak_memory_mib for report in reports]
    peaks += [rank.peak_memory_mib for rank in outcome.ranks if rank.report is None and rank.secondary]
    measured = replace(
        decisive.measured, peak_memory_mib=max((peak for peak in peaks if peak is not None), default=None)
    )
    return Outcome(status=Status.OK, ranks=(RankOutcome(rank=0, status=Status.OK, report=measured),)), decisive.losses


def _variable(variable: str, knobs: Mapping[str, Any]) -> tuple[str, Template]:
    name, equals, value = variable.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"env must be NAME=VALUE, such as OMP_NUM_THREADS={{threads}}, but got '{variable}'")
    return name, Template.read(value, knobs, f"env {name}")
