"""`redline logs`: what happens in a search, or what a trial printed."""

import sys
import time

import click

from .server_options import client_of, reached
from .submit import told

LOOK_S = 1.0
ENDED = ("done", "failed", "cancelled")


@click.command(
    epilog="""\b
Examples:
  redline logs 3f2a9c01d4e7
  redline logs 3f2a9c01d4e7 -f
  redline logs 3f2a9c01d4e7 --trial 4 -f
""",
    short_help="Show what happens in a search on a server, or what a trial printed.",
)
@click.argument("search", metavar="ID")
@click.option("-f", "--follow", is_flag=True, help="Go on until it ends.")
@click.option("--trial", type=click.IntRange(min=0), metavar="N", help="What this trial printed.")
@reached
def logs(server: str, token: str | None, trust: str | None, search: str, follow: bool, trial: int | None) -> None:
    """Show what happened in the search ID so far, or what a trial of it printed."""
    with client_of(server, token, trust) as client:
        run = client.search(search)
        if trial is None:
            for event in run.events() if follow else run.history():
                if line := told(event.kind, event.data):
                    click.echo(f"{time.strftime('%H:%M:%S', time.localtime(event.time))}  {line}")
            return
        seen = 0
        while True:
            over = run.state in ENDED or not follow
            data = run.log(trial, seen)
            seen += len(data)
            # Control characters of a stranger's program stay out of the terminal.
            text = data.decode("utf-8", "replace")
            click.echo("".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text), nl=False)
            sys.stdout.flush()
            if over:
                return
            time.sleep(LOOK_S)
