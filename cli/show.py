"""`redline show`: a run in the terminal or as data."""

import click

from ..base.option import either
from ..results.listing import FORMATS
from .options import names_of

EXAMPLES = """\b
Examples:
  redline show runs/gpt2
  redline show runs/gpt2 --top 5 --status ok --sort peak_memory_mib
  redline show runs/gpt2 --columns trial,throughput,micro_batch --format markdown
  redline show runs/gpt2 --status oom,crash --format csv
"""


@click.command(epilog=EXAMPLES)
@click.argument("run")
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="Trials shown.  [default: 20; all as data]")
@click.option("--status", metavar="A,B,...", help="Only trials of these statuses: ok, oom, timeout, ..., pending.")
@click.option("--sort", default="", metavar="NAME", help="Sort by a column; -COLUMN downwards.  [default: speed]")
@click.option("--columns", metavar="A,B,...", help="Columns of trials.csv or knobs.  [default: those that differ]")
@click.option("--storage", metavar="URL", help="Storage of the trials, if not in RUN (tune --storage).")
@click.option("--format", "form", default="table", show_default=True, help=f"{either(FORMATS)}.")
def show(
    run: str,
    top: int | None,
    status: str | None,
    sort: str,
    columns: str | None,
    storage: str | None,
    form: str,
) -> None:
    """Show the winner, the counts by status and the best trials of the run in folder RUN, also while it runs."""
    from ..base.errors import UsageError, unknown
    from ..results import View, listing
    from ..results.columns import fold, header

    if form not in listing.FORMATS:
        raise UsageError(unknown("format", form, listing.FORMATS))
    selection = listing.Selection(
        top=top if top is not None or form != "table" else 20,
        statuses=names_of(status, "--status"),
        sort=sort,
        columns=names_of(columns, "--columns"),
    )
    view = View(run, storage=storage)
    if form == "table":
        from rich.console import Console

        from ..views.show import render

        render(view, Console(highlight=False), selection=selection)
        return
    trials = view.trials()
    selected, _ = listing.select(trials, selection)
    names = listing.chosen_columns(trials, selection.columns or header(listing.knob_names(trials)))
    click.echo(listing.write(selected, names, form), nl=False)
    for problem in view.problems:
        click.echo(f"note: {fold(problem)}", err=True)
