"""`redline compare`: comparison of runs."""

import click

from ..base.option import either
from ..results.listing import FORMATS

EXAMPLES = """\b
Examples:
  redline compare runs/gpt2 runs/gpt2-2
  redline compare runs/a runs/b runs/c --format markdown
"""


@click.command(epilog=EXAMPLES)
@click.argument("runs", nargs=-1, required=True)
@click.option("--format", "form", default="table", show_default=True, help=f"{either(FORMATS)}.")
def compare(runs: tuple[str, ...], form: str) -> None:
    """Compare the winners of the runs in folders RUNS: their knobs and numbers, relative to the first run.

    The significance of a difference follows from the recorded spread, within measurements and among repeated ones.
    """
    from ..base.errors import UsageError, unknown
    from ..results import View, listing
    from ..results.columns import fold
    from ..views.compare import compare as side_by_side

    if form not in listing.FORMATS:
        raise UsageError(unknown("format", form, listing.FORMATS))
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
    for part in (comparison.knobs, comparison.numbers):
        for name, cells in part:
            style = "bold" if part is comparison.knobs and len(set(cells)) > 1 else ""
            table.add_row(Text(fold(name), style=style), *(Text(fold(each), style=style) for each in cells))
        table.add_section()
    console.print(table)
    for side, each in zip(comparison.sides[1:], comparison.differences):
        if each is not None:
            console.print(Text(fold(f"{side.name} against {comparison.sides[0].name}: {each.words}")), soft_wrap=True)
    for note in comparison.notes:
        console.print(Text(fold(f"note: {note}")), soft_wrap=True)
