"""`redline show`: a run in the terminal."""

import click

from .options import names_of

EXAMPLES = """\b
Examples:
  redline show runs/gpt2
  redline show runs/gpt2 --top 5 --status ok
"""


@click.command(epilog=EXAMPLES)
@click.argument("run")
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="Trials shown.")
@click.option("--status", metavar="A,B,...", help="Only trials of these statuses: ok, oom, timeout, ..., pending.")
@click.option("--storage", metavar="URL", help="Storage of the trials, if not in RUN (tune --storage).")
def show(run: str, top: int, status: str | None, storage: str | None) -> None:
    """Show the winner, the counts by status and the best trials of the run in folder RUN, also while it runs."""
    from rich.console import Console

    from ..results import View
    from ..views.show import render

    statuses = names_of(status, "--status")
    render(View(run, storage=storage), Console(highlight=False), top=top, statuses=statuses)
