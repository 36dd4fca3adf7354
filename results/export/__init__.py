"""A configuration in the words of the frameworks people train with: one target a file."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import UsageError, unknown
from .. import summary
from ..columns import fold, number, speed
from ..measurement import Trial
from . import accelerate, deepspeed, megatron, plain, script, torchtitan, trainer
from .setup import Setup
from .target import SUFFIXES, Export, Target

_TARGETS: tuple[Target, ...] = (
    accelerate.TARGET,
    trainer.TARGET,
    deepspeed.TARGET,
    torchtitan.TARGET,
    megatron.TARGET,
    script.TARGET,
    plain.YAML,
    plain.JSON,
    plain.ENV,
)
_WIDTH = 100


def export_targets() -> dict[str, Target]:
    """Every target by its name."""
    return {target.name: target for target in _TARGETS}


def render(
    target: str,
    trial: Trial,
    document: Mapping[str, Any] | None = None,
    *,
    form: str | None = None,
) -> Export:
    """A trial's configuration as a file of a target.

    Args:
        target: one of `export_targets()`.
        trial: whose configuration.
        document: the contents of run.yaml (`View.document`); None where only trials.csv is there.
        form: one of the target's forms; None for its first.

    Raises:
        UsageError: there is no such target or form, or the configuration cannot be written for it.
    """
    known = export_targets()
    if target not in known:
        raise UsageError(unknown("export target", target, known))
    forms = known[target].forms
    chosen = form or next(iter(forms))
    if chosen not in forms:
        raise UsageError(f"{target}: {unknown('form', chosen, forms)}")
    setup = Setup(trial, document, target)
    forms[chosen](setup, "")  # the first pass finds what has to be stated, the second states it
    notes = setup.finish()
    comment = _comment(known[target], chosen, setup, notes)
    text = forms[chosen](Setup(trial, document, target), comment)
    inside = chosen not in known[target].silent
    return Export(
        target=target, form=chosen, text=text, notes=notes, devices=setup.devices, comments_inside=inside
    )


def form_of(target: str, file: str) -> str | None:
    """The form of a target that a file's name asks for by its suffix; None where it asks for none."""
    forms = export_targets()[target].forms if target in export_targets() else {}
    return next((form for form in forms if file.lower().endswith(SUFFIXES[form])), None)


def chosen_trial(trials: Sequence[Trial], number: int | None) -> Trial:
    """The trial of that number, or the winner.

    Raises:
        UsageError: there is none.
    """
    if number is None:
        winner = summary.best(trials)
        if winner is None:
            raise UsageError(
                f"there is no winner to export: {summary.why_nothing(trials)} "
                "A single trial can be exported by --trial N"
            )
        return winner
    found = next((trial for trial in trials if trial.number == number), None)
    if found is None:
        listing = f"0 to {trials[-1].number}" if trials else "none"
        raise UsageError(f"there is no trial {number}; the run has {listing}")
    return found


def _comment(target: Target, form: str, setup: Setup, notes: tuple[str, ...]) -> str:
    measured = setup.trial.measurement
    what = f"{setup.model or 'a model'}, trial {setup.trial.number}"
    if setup.trial.ok:
        what += f": {speed(measured.throughput, measured.unit)}"
    if measured is not None and measured.peak_memory_mib is not None:
        what += f", peak memory {number(measured.peak_memory_mib, 5)} MiB"
    lines = [f"Written by redline for {target.name}: {fold(what)}"]
    if setup.devices > 1:
        lines.append(f"On {setup.devices} devices: tp {setup.tp} x pp {setup.pp} x dp {setup.dp}")
    lines.append(f"Use: {target.use.format(file='FILE' + SUFFIXES[form], devices=setup.devices)}")
    if notes:
        lines.append("Not carried over, or to be known:")
        for note in notes:
            lines += textwrap.wrap(f"- {fold(note)}", _WIDTH, subsequent_indent="  ")
    return "\n".join(lines) + "\n"
