"""`redline report`: a run as an HTML page."""

from typing import TYPE_CHECKING

import click

from ..base.errors import StudyError

if TYPE_CHECKING:
    from ..runners.memory_timeline import MemoryTimeline


@click.command(
    epilog="""\b
Examples:
  redline report runs/gpt2
  redline report runs/gpt2 -o gpt2.html
  redline report runs/gpt2 --trace-memory
  redline report measured-elsewhere.csv
""",
)
@click.argument("run")
@click.option("-o", "--out", "output", metavar="FILE", help="The page to write.  [default: RUN/report.html]")
@click.option("--trace-memory", is_flag=True, help="Add the winner's memory over a step, tensor by tensor.")
def report(run: str, output: str | None, trace_memory: bool) -> None:
    """Write a self-contained HTML page of the run in folder RUN, also while it runs, or of a table of trials (CSV).

    The page works offline and can be printed. It is made from trials.csv and the files beside it; a table from
    elsewhere needs only the columns trial, status and throughput.
    """
    from ..views.report import write_report

    memory = _traced(run).to_dict() if trace_memory else None
    click.echo(f"wrote {write_report(run, output, memory_trace=memory)}")


def _traced(run: str) -> "MemoryTimeline":
    """Traces the rank of the winner that used the most memory; rank 0 if no rank was measured.

    Raises:
        StudyError: `run` is not the folder of a run with its run.yaml, or the run is of a command or a callable.
        NothingFound: the run has no winner.
    """
    from ..results import View, summary
    from ..runners.memory_timeline import memory_timeline
    from ..space import Config
    from ..tuner.train.strategy import source_of

    view = View(run, Config)
    if view.document is None:
        raise StudyError(f"--trace-memory needs run.yaml, which says what was trained, but '{run}' does not contain it")
    source = source_of(view)
    trial = summary.best(view.trials())
    assert trial is not None and source.config is not None  # otherwise source_of has raised
    ranks = [each for each in trial.measured.ranks if each.peak_memory_mib is not None]
    return memory_timeline(
        source.workload(),
        source.config,
        rank=max(ranks, key=lambda each: each.peak_memory_mib or 0.0).rank if ranks else 0,
        devices=source.devices or 1,
        kind="cpu" if view.document["asked"]["devices"]["type"] == "cpu" else "cuda",
    )
