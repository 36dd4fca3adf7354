"""`redline report`: a run as an HTML page."""

import click


@click.command(
    epilog="""\b
Examples:
  redline report runs/gpt2
  redline report runs/gpt2 -o gpt2.html
  redline report measured-elsewhere.csv
""",
)
@click.argument("run")
@click.option("-o", "--out", "output", metavar="FILE", help="The page to write.  [default: RUN/report.html]")
def report(run: str, output: str | None) -> None:
    """Write a self-contained HTML page of the run in folder RUN, also while it runs, or of a table of trials (CSV).

    The page works offline and can be printed. It is made from trials.csv and the files beside it; a table from
    elsewhere needs only the columns trial, status and throughput.
    """
    from ..views.report import write_report

    click.echo(f"wrote {write_report(run, output)}")
