"""`redline show`: a run, or several side by side, in the terminal or as data."""

from collections.abc import Sequence

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
  redline show runs/gpt2 runs/gpt2-2
"""


@click.command(epilog=EXAMPLES)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="Trials shown.  [default: 20; all as data]")
@click.option("--status", metavar="A,B,...", help="Only trials of these statuses: ok, oom, timeout, ..., pending.")
@click.option("--sort", default="", metavar="NAME", help="Sort by a column; -COLUMN downwards.  [default: speed]")
@click.option("--columns", metavar="A,B,...", help="Columns of trials.csv or knobs.  [default: those that differ]")
@click.option("--storage", metavar="URL", help="Storage of the trials, if not in RUN (tune --storage).")
@click.option("--format", "form", default="table", show_default=True, help=f"{either(FORMATS)}.")
def show(
    runs: tuple[str, ...],
    top: int | None,
    status: str | None,
    sort: str,
    columns: str | None,
    storage: str | None,
    form: str,
) -> None:
    """Show the winner, the counts by status and the best trials of the run in folder RUN, also while it runs.

    Several runs are compared: the knobs and numbers of their winners, relative to the first run. The significance of a
    difference follows from the recorded spread, within measurements and among repeated ones.
    """
    from ..base.errors import UsageError, unknown
    from ..results import View, listing
    from ..results.columns import fold, header

    if form not in listing.FORMATS:
        raise UsageError(unknown("format", form, listing.FORMATS))
    if len(runs) > 1:
        if top or status or sort or columns or storage:
            raise UsageError(
                "--top, --status, --sort, --columns and --storage are for one run, and several are compared"
            )
        compare(runs, form)
        return
    selection = listing.Selection(
        top=top if top is not None or form != "table" else 20,
        statuses=names_of(status, "--status"),
        sort=sort,
        columns=names_of(columns, "--columns"),
    )
    view = View(runs[0], storage=storage)
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


def compare(runs: Sequence[str], form: str) -> None:
    """Prints the winners of runs side by side."""
    from ..results import View, listing
    from ..results.columns import fold
    from ..views.compare import compare as side_by_side

    comparison = side_by_side([View(run) for run in runs])
    names = ["", *(side.name for side in comparison.sides)]
    if form == "json":
        click.echo(comparison.to_json(), nl=False)
        return
    if form != "table":
        click.echo(listing.write_rows(names, comparison.rows(), form), nl=False)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for side in comparison.sides:
        table.add_column(Text(fold(side.name)), justify="right", overflow="fold")
    for section in (comparison.knobs, comparison.numbers):
        for name, cells in section:
            style = "bold" if section is comparison.knobs and len(set(cells)) > 1 else ""
            table.add_row(Text(fold(name), style=style), *(Text(fold(cell), style=style) for cell in cells))
        table.add_section()
    console.print(table)
    for side, difference in zip(comparison.sides[1:], comparison.differences):
        if difference is not None:
            console.print(
                Text(fold(f"{side.name} against {comparison.sides[0].name}: {difference.words}")), soft_wrap=True
            )
    for note in comparison.notes:
        console.print(Text(fold(f"note: {note}")), soft_wrap=True)
