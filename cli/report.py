"""`redline report`: a run as one HTML page."""

import click


@click.command(
    epilog="""\b
Examples:
  redline report runs/gpt2
  redline report runs/gpt2 -o gpt2.html
  redline report measured-elsewhere.csv
""",
    short_help="Make one HTML page of a run.",
)
@click.argument("run")
@click.option("-o", "--out", "output", metavar="FILE", help="The page to write.  [default: RUN/report.html]")
def report(run: str, output: str | None) -> None:
    """Make one self-contained HTML page of the run in folder RUN, also while it runs, or of a table of trials (CSV).

    It opens offline and prints. It is made from trials.csv and what lies beside it; of a table from elsewhere only
    the columns trial, status and throughput must be there."""
    from ..views.report import write_report

    click.echo(f"wrote {write_report(run, output)}")
