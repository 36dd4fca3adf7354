"""A configuration in the words of the frameworks people train with: one target a file."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.errors import UsageError, unknown
from ..results import summary
from ..results.columns import fold
from ..results.measurement import Trial
from . import accelerate, comments, configuration, deepspeed, lightning, megatron, script, torchtitan, trainer
from .launch import LAUNCHES, Job
from .setup import ending
from .target import SUFFIXES, Export, Target

_TARGETS: tuple[Target, ...] = (
    accelerate.TARGET,
    trainer.TARGET,
    deepspeed.TARGET,
    lightning.TARGET,
    torchtitan.TARGET,
    megatron.TARGET,
    script.TARGET,
    configuration.YAML,
    configuration.JSON,
    configuration.ENV,
)


def export_targets() -> dict[str, Target]:
    """Every target by its name."""
    return {target.name: target for target in _TARGETS}


def render(
    target: str,
    trial: Trial,
    document: Mapping[str, Any] | None = None,
    *,
    form: str | None = None,
    launch: str | None = None,
    file: str | None = None,
) -> Export:
    """A trial's configuration as a file of a target.

    Args:
        target: one of `export_targets()`.
        trial: whose configuration; one that did not run to its end is named as such.
        document: the contents of run.yaml (`View.document`); None where only trials.csv is there.
        form: one of the target's forms; None for its first.
        launch: one of `LAUNCHES`, for what starts a training with the target's file in place of that file.
        file: what the file will be called; None for a name of the target's own.

    Raises:
        UsageError: there is no such target, form or launch, or the configuration cannot be written for it.
    """
    known = export_targets()
    if target not in known:
        raise UsageError(unknown("export target", target, known))
    chosen = known[target]
    if launch is not None:
        return _launched(chosen, launch, trial, document, file)
    form = form or next(iter(chosen.forms))
    if form not in chosen.forms:
        raise UsageError(f"{target}: {unknown('form', form, chosen.forms)}")
    setup = chosen.setup(trial, document)
    chosen.forms[form](setup, "")  # the first pass finds what has to be stated, the second states it
    notes, use = setup.finish(), comments.used(chosen, setup, file or chosen.file(form))
    said = [*comments.head(chosen, setup), *use]
    if notes:
        said += [
            "Not carried over, or to be known:",
            *(line for note in notes for line in comments.wrapped(note)),
        ]
    return Export(
        target=target,
        form=form,
        text=chosen.forms[form](chosen.setup(trial, document), "\n".join(said) + "\n"),
        notes=(*setup.marks(), *notes),
        use=use,
        devices=setup.devices,
        comments_inside=form not in chosen.silent,
    )


def _launched(target: Target, name: str, trial: Trial, document: Mapping[str, Any] | None, file: str | None) -> Export:
    """What starts a training with a target's file, which `render` writes.

    Raises:
        UsageError: there is no such launch, or the target starts nothing.
    """
    if name not in LAUNCHES:
        raise UsageError(unknown("launch", name, LAUNCHES))
    if target.start is None:
        names = ", ".join(each.name for each in _TARGETS if each.start is not None)
        raise UsageError(f"{target.name} starts nothing, so that it has no launch; targets that have one are {names}")
    launch = LAUNCHES[name]
    setup = target.setup(trial, document)
    beside = target.file(next(iter(target.forms)))
    job = Job(
        setup=setup,
        line=target.start(setup, launch.folder + beside),
        name=beside,
        text=render(target.name, trial, document, file=launch.folder + beside).text,
    )
    use = (f"Use: {fold(launch.use(job, shlex.quote(file or f'launch{SUFFIXES[launch.form]}')))}",)
    said = [*comments.head(target, setup), *use]
    if not launch.folder:
        said.append(f"Beside it: {beside}, written by redline export RUN --to {target.name} -o {beside}")
    if launch.needs:
        said.append(f"Needs {launch.needs}")
    return Export(
        target=target.name,
        form=launch.form,
        text=launch.body(job, "\n".join(said) + "\n"),
        notes=setup.marks(),
        use=use,
        devices=setup.devices,
        comments_inside=True,
    )


def form_of(target: str, file: str) -> str | None:
    """The form of a target that a file's name asks for by its suffix; None where it asks for none."""
    forms = export_targets()[target].forms if target in export_targets() else {}
    return next((form for form in forms if file.lower().endswith(SUFFIXES[form])), None)


def chosen_trial(trials: Sequence[Trial], number: int | None, *, force: bool = False) -> Trial:
    """The trial of that number, or the winner.

    Args:
        trials: of the run.
        number: of the trial; None for the winner.
        force: whether a trial that did not run to its end will do.

    Raises:
        UsageError: there is none, or it did not run to its end.
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
    if not found.ok and not force:
        raise UsageError(f"{ending(found)}; --force exports it nevertheless")
    return found
