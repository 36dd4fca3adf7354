"""`redline report` and `redline dashboard`: pages of runs."""

import click


@click.command(
    epilog="""\b
Examples:
  redline report runs/gpt2
  redline report runs/gpt2 -o gpt2.html
""",
)
@click.argument("run")
@click.option("-o", "--out", "output", metavar="FILE", help="The page to write.  [default: RUN/report.html]")
@click.option("--storage", metavar="URL", help="Storage of the trials, if not in RUN (tune --storage).")
def report(run: str, output: str | None, storage: str | None) -> None:
    """Write a self-contained HTML page of the run in folder RUN, also while it runs.

    The page works offline and can be printed.
    """
    from ..views.report import write_report

    click.echo(f"wrote {write_report(run, output, storage=storage)}")


@click.command(
    epilog="""\b
Examples:
  redline dashboard runs
  redline dashboard runs --port 9000
  redline dashboard runs --host 0.0.0.0       prints an address with a token
""",
)
@click.argument("folder", metavar="DIR")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on; any but this machine's own needs a token.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8420,
    show_default=True,
    metavar="N",
    help="Port; if it is in use, the next free one.",
)
@click.option(
    "--token", metavar="TEXT", help="The token that visitors must send.  [default: generated where one is needed]"
)
def dashboard(folder: str, host: str, port: int, token: str | None) -> None:
    """Serve a web page of all runs found under DIR, running or finished, with live updates until Ctrl-C."""
    from ..views.dashboard import serve

    serve(folder, host=host, port=port, token=token, say=lambda message: click.echo(message))
