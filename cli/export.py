"""`redline export`: the winner or any trial of a run as a file of a training framework."""

from collections.abc import Mapping
from typing import Any

import click

EXAMPLES = """\b
Examples:
  redline export runs/gpt2 --to accelerate -o accelerate.yaml
  redline export runs/gpt2 --to trainer -o args.json
  redline export runs/gpt2 --to python -o train.py
  redline export runs/gpt2 --to env --trial 3
  redline export plan.yaml --to torchtitan                   a plan of `redline estimate -o plan.yaml`
"""


def _targets(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from ..frameworks import export_targets

    for target in export_targets().values():
        click.echo(f"{target.name:<12}{target.about}")
    ctx.exit()


@click.command(epilog=EXAMPLES)
@click.argument("run")
@click.option("--to", "target", required=True, metavar="NAME", help="The framework; --list names them.")
@click.option("-o", "--out", "output", metavar="FILE", help="Where to write.  [default: standard output]")
@click.option("--trial", type=click.IntRange(min=0), metavar="N", help="A single trial.  [default: the winner]")
@click.option("--force", is_flag=True, help="With --trial: even if it did not finish.")
@click.option("--workload", metavar="FILE:NAME", help="The workload of RUN, if its file has moved.")
@click.option("--storage", metavar="URL", help="Storage of the trials, if not in RUN (tune --storage).")
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_targets, help="List the targets.")
def export(
    run: str,
    target: str,
    output: str | None,
    trial: int | None,
    force: bool,
    workload: str | None,
    storage: str | None,
) -> None:
    """Write the winner of the run in folder RUN, or of the plan in file RUN, as a file of another framework.

    Comments in the file state what the framework cannot do and that a run was simulated; if the file format has no
    comments, standard error does.
    """
    from ..base.errors import UsageError
    from ..base.reading import absolute, path_of
    from ..base.writing import write_atomic
    from ..frameworks import chosen_trial, form_of, render
    from ..models.resolve import located
    from ..results import View, best
    from ..results.columns import fold

    if force and trial is None:
        raise UsageError("--force is for a single trial: give --trial N too")
    problems: list[str] = []
    document: Mapping[str, Any] | None
    if best.is_plan(path_of(run)):
        if trial is not None:
            raise UsageError(f"--trial {trial} names a trial of a run, but '{run}' is a file with one configuration")
        plan = best.load(path_of(run))
        chosen, document = plan.trial, plan.document
    else:
        view = View(run, storage=storage)
        chosen, document, problems = chosen_trial(view.trials(), trial, force=force), view.document, view.problems
    if workload is not None:
        request_document = dict((document or {}).get("asked") or {})
        workload_entry = request_document.get("workload") or {}
        spec = located(str(workload_entry.get("spec") or ""), absolute(workload), run)
        request_document["workload"] = {**workload_entry, "spec": spec}
        document = {**(document or {}), "asked": request_document}
    form = form_of(target, output) if output else None
    rendered = render(target, chosen, document, form=form, file=output)
    if output is None:
        click.echo(rendered.text, nl=False)
    else:
        path = path_of(output)
        if not path.parent.is_dir():
            raise UsageError(f"cannot write '{output}': there is no folder '{path.parent}'")
        try:
            write_atomic(path, rendered.text.encode(), durable=False)
        except OSError as error:
            raise UsageError(f"cannot write '{output}': {error.strerror or error}") from error
        click.echo("\n".join((f"wrote {output}", *rendered.use)), err=True)
    for problem in problems:
        click.echo(f"note: {fold(problem)}", err=True)
    if not rendered.comments_inside:
        for note in (*rendered.notes, *(rendered.use if output is None else ())):
            click.echo(f"note: {note}", err=True)
