"""Renders a configuration as a file of another framework; one target per file."""

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from .. import __version__
from ..base.errors import UsageError, unknown
from ..results import summary
from ..results.columns import fold, number, speed
from ..results.measurement import PLANNED, Trial
from . import accelerate, configuration, deepspeed, lightning, megatron, torchtitan, trainer
from .export_input import SUFFIXES, Export, ExportInput, Target, ending

_WIDTH = 100  # columns of the lines of notes
_TARGETS: tuple[Target, ...] = (
    accelerate.TARGET,
    trainer.TARGET,
    deepspeed.TARGET,
    lightning.TARGET,
    torchtitan.TARGET,
    megatron.TARGET,
    configuration.PYTHON,
    configuration.YAML,
    configuration.JSON,
    configuration.ENV,
)


def export_targets() -> dict[str, Target]:
    """All targets by name."""
    return {target.name: target for target in _TARGETS}


def render(
    target: str,
    trial: Trial,
    document: Mapping[str, Any] | None = None,
    *,
    form: str | None = None,
    file: str | None = None,
) -> Export:
    """Renders a trial's configuration as a file of a target.

    Args:
        target: one of `export_targets()`.
        trial: trial with the configuration; a note marks one that did not finish.
        document: contents of run.yaml (`View.document`); None if there is only trials.csv.
        form: one of the target's forms; None for its first.
        file: name of the file; None for the target's default.

    Raises:
        UsageError: the target or form is unknown, or the target cannot express the configuration.
    """
    targets = export_targets()
    if target not in targets:
        raise UsageError(unknown("export target", target, targets))
    chosen = targets[target]
    form = form or next(iter(chosen.forms))
    if form not in chosen.forms:
        raise UsageError(f"{target}: {unknown('form', form, chosen.forms)}")
    setup = chosen.setup(trial, document)
    chosen.forms[form](setup, "")  # the first pass collects the notes, the second writes them
    notes, use = setup.finish(), _instructions(chosen, setup, file or chosen.file(form))
    comments = [*_head(chosen, setup), *use]
    if notes:
        comments += ["You must set these yourself:", *(line for note in notes for line in _wrapped(note))]
    return Export(
        target=target,
        form=form,
        text=chosen.forms[form](chosen.setup(trial, document), "\n".join(comments) + "\n"),
        notes=(*setup.marks(), *notes),
        use=use,
        devices=setup.devices,
        comments_inside=form not in chosen.silent,
    )


def suited_target(config: Mapping[str, Any], framework: str = "", model_class: str = "") -> str:
    """A target that runs a configuration of a class of transformers on all its devices: that of a framework if it has one, or
    else a common one."""
    targets = export_targets()
    names = [name for name in (framework, "accelerate", "torchtitan", "megatron", "python") if name in targets]
    able = [name for name in names if not model_class or model_class.endswith(targets[name].trains)]
    return next(name for name in able if targets[name].runs_whole(config))


def form_of(target: str, file: str) -> str | None:
    """Form of a target that a file's suffix selects; None if it selects none."""
    forms = export_targets()[target].forms if target in export_targets() else {}
    return next((form for form in forms if file.lower().endswith(SUFFIXES[form])), None)


def chosen_trial(trials: Sequence[Trial], number: int | None, *, force: bool = False) -> Trial:
    """Returns the trial of that number, or the winner.

    Args:
        trials: trials of the run.
        number: number of the trial; None for the winner.
        force: accept a trial that did not finish.

    Raises:
        UsageError: there is none, or it did not finish.
    """
    if number is None:
        winner = summary.best(trials)
        if winner is None:
            raise UsageError(
                f"there is no winner to export: {summary.why_nothing(trials)}. "
                "A single trial can be exported by --trial N"
            )
        return winner
    trial = next((trial for trial in trials if trial.number == number), None)
    if trial is None:
        listing = f"0 to {trials[-1].number}" if trials else "none"
        raise UsageError(f"there is no trial {number}; the run has {listing}")
    if not trial.ok and not force:
        raise UsageError(f"{ending(trial)}; --force exports it nevertheless")
    return trial


def _head(target: Target, setup: ExportInput) -> list[str]:
    """Origin of the configuration, warnings about its use, and its devices."""
    trial, measured = setup.trial, setup.trial.measurement
    which = "the fastest plan" if trial.sampler == PLANNED else f"trial {trial.number}"
    origin = f"{setup.model or 'a model'}, {which}{', predicted' if setup.simulated else ', emulated' if setup.emulated else ''}"
    if trial.ok:
        origin += f": {speed(trial.throughput, trial.measured.unit)}"
    if measured is not None and measured.peak_memory_mib is not None:
        origin += f", peak memory {number(measured.peak_memory_mib, 5)} MiB"
    lines = [f"Written by redline {__version__} for {target.name}: {fold(origin)}"]
    if setup.missing:
        lines.insert(0, f"This file does not carry {fold(', '.join(setup.missing))}")
    lines += (line for mark in setup.marks() for line in _wrapped(mark))
    if target.checked is not None:
        lines.append(f"Checked against {' '.join(target.checked)}")
    if setup.command:
        lines.append("The settings that were tuned, for the command, which keeps all its others")
        return lines
    degrees = {name: getattr(setup, name) for name in ("tp", "sp", "cp", "pp", "dp")}
    lacks = {name: name not in target.sequences and degrees[name] > 1 for name in ("sp", "cp")}
    lacks["pp"] = not target.pipelines and setup.pp > 1
    features = {"sp": "sequences cut over ranks", "cp": "ring attention", "pp": "pipeline"}
    runs = " x ".join(
        f"{name} {size}"
        for name, size in degrees.items()
        if not lacks.get(name) and (name not in ("sp", "cp") or size > 1)
    )
    if setup.processes < setup.devices:
        reason = " and no ".join(features[name] for name, lacking in lacks.items() if lacking)
        lines.append(f"On {setup.processes} of {setup.devices} devices, since {target.name} has no {reason}: {runs}")
    elif setup.devices > 1:
        lines.append(f"On {setup.devices} devices: {runs}")
    return lines


def _instructions(target: Target, setup: ExportInput, file: str) -> tuple[str, ...]:
    """Instructions to use a file of that name, and to start a training with it."""
    if setup.command:
        return (f"Use: add these settings to the command that was tuned: {fold(setup.command)}",)
    lines = [f"Use: {fold(target.use(file))}"] if target.use is not None else []
    if target.start is not None:
        line = fold(target.start(setup, shlex.quote(file)))
        if setup.hosts.count == 1:
            lines.append(f"Start: {line}")
        else:
            lines += [f"Start on each of {_hosts(setup, line)}:", f"  {line}"]
        if setup.per_host is None and setup.processes > 1:
            lines.append("  for one host, as how many devices a host has is not known")
    return tuple(lines)


def _hosts(setup: ExportInput, line: str) -> str:
    rank_note = ", NODE_RANK its own number from 0" if "$NODE_RANK" in line else ""
    return f"{setup.hosts}, MASTER_ADDR being the first one's name{rank_note}"


def _wrapped(sentence: str) -> list[str]:
    """Formats a sentence as an item of a list."""
    return textwrap.wrap(f"- {fold(sentence)}", _WIDTH, subsequent_indent="  ")
