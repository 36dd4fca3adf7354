"""`redline logs`: the events of a search, or the output of a trial."""

import codecs
import sys
import time

import click

from ..service.records import ENDED
from .server_options import client_of, with_server
from .submit import event_text

LOOK_S = 1.0


@click.command(
    epilog="""\b
Examples:
  redline logs 3f2a9c01d4e7
  redline logs 3f2a9c01d4e7 -f
  redline logs 3f2a9c01d4e7 --trial 4 -f
""",
)
@click.argument("search", metavar="ID")
@click.option("-f", "--follow", is_flag=True, help="Continue until it ends.")
@click.option("--trial", type=click.IntRange(min=0), metavar="N", help="Show the output of this trial.")
@with_server
def logs(server: str, token: str | None, trust: str | None, search: str, follow: bool, trial: int | None) -> None:
    """Show the events of the search ID so far, or the output of one of its trials."""
    with client_of(server, token, trust) as client:
        run = client.search(search)
        if trial is None:
            for event in run.events() if follow else run.history():
                if line := event_text(event.kind, event.data):
                    click.echo(f"{time.strftime('%H:%M:%S', time.localtime(event.time))}  {line}")
            return
        # Pieces may end within a character.
        decoder, seen = codecs.getincrementaldecoder("utf-8")("replace"), 0
        while True:
            over = run.state in ENDED or not follow
            data = run.log(trial, seen)
            seen += len(data)
            # Control characters of an untrusted program must not reach the terminal.
            text = decoder.decode(data, final=over).replace("\r\n", "\n").replace("\r", "\n")
            click.echo("".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text), nl=False)
            sys.stdout.flush()
            if over:
                return
            time.sleep(LOOK_S)
