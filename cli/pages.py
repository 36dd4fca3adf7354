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
""",
)
@click.argument("folder", metavar="DIR")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8420,
    show_default=True,
    metavar="N",
    help="Port; if it is in use, the next free one.",
)
def dashboard(folder: str, port: int) -> None:
    """Serve a web page of all runs found under DIR, running or finished, to this machine, with live updates until Ctrl-C."""
    from ..views.dashboard import serve

    serve(folder, port=port, say=lambda message: click.echo(message))
