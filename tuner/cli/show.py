"""`redline show`: a run, in the terminal."""

import click


@click.command(
    epilog="\b\nExamples:\n  redline show runs/gpt2\n  redline show runs/gpt2 --top 5\n",
    short_help="Show a run: its winner and its trials.",
)
@click.argument("run")
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="Trials shown.")
def show(run: str, top: int) -> None:
    """Show the winner, the counts by status and the best trials of the run in folder RUN, also while it runs."""
    from rich.console import Console

    from ...results import View
    from ...results.show import render

    render(View(run), Console(highlight=False), top=top)
