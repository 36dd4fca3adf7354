"""`redline scale`: tuning for increasing numbers of devices."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..base.errors import UsageError
from ..results.columns import fold, speed
from ..tuner.request.options import SECTIONS, Request
from . import exit_codes, words
from .options import options_of, request_of
from .tune import end_in_order, run_folder

if TYPE_CHECKING:
    from ..tuner.scaling import Scaling

EXAMPLES = """\b
Examples:
  redline scale gpt2-tiny --devices 1,2
  redline scale llama-tiny --devices 1,2,4 --weak --global-batch 8
"""

HELP = {"out": "Folder for the results.  [default: runs/scale-MODEL, or scale-MODEL-2, ...]"}


@click.command(epilog=EXAMPLES)
@options_of(*SECTIONS, without=("devices",), help=HELP)
@click.option("--devices", metavar="N,...", default="pow2", show_default=True, help="Counts: 1,2,4 or pow2:64.")
@click.option("--weak", is_flag=True, help="The global batch grows with the devices.  [default: it is constant]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def scale(
    devices: str,
    weak: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Tune MODEL for one number of devices after the other, and show speed-up, efficiency and memory.

    The table has the winner and the default configuration of each count. Exit codes: see `redline tune`.
    """
    request_values = request_of(options)
    if request_values["resume"] and request_values["out"] is None:
        raise UsageError("--resume needs --out, the folder to continue")
    # In a second, before slow imports.
    Request(**{**request_values, "out": None, "resume": False, "log_to": ()}).check_values()
    from ..tuner.scaling import scale as scaled
    from .progress import ProgressListener, listener_for
    from .streams import outlive_reader

    request_values["out"] = request_values["out"] or run_folder(f"scale-{Path(request_values['target']).name}")
    outlive_reader()
    stream = sys.stderr if as_json else sys.stdout

    def listening(count: int) -> ProgressListener:
        if not as_json:
            Console(highlight=False).print(Text(f"\n{count} device{'s' if count > 1 else ''}", style="bold"))
        return listener_for(stream, silent=as_json)

    end_in_order()
    scaling = scaled(**request_values, devices=devices, weak=weak, listening=listening)
    if as_json:
        click.echo(json.dumps(scaling.to_dict(), allow_nan=False))
    else:
        show(scaling, Path(request_values["out"]))
    if scaling.interrupted:
        return exit_codes.INTERRUPTED
    return exit_codes.FOUND if scaling.measured else exit_codes.NOTHING_FEASIBLE


def show(scaling: "Scaling", folder: Path) -> None:
    """Prints a line for each number of devices, as wide as the terminal, and the paths of the files."""
    console = Console(highlight=False)
    if not console.is_terminal:  # a pipe or a file has no width
        console.width = max(console.width, 160)
    unit = next((point.unit for point in scaling.points if point.unit), "throughput")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("devices", "batch", unit, "speed-up", "efficiency", "memory", "default"):
        table.add_column(name, justify="right", overflow="fold")
    for row in scaling.to_dict()["points"]:
        table.add_row(*map(fold, _cells(row)))
    console.print()
    console.print(table)
    for point in scaling.points:
        if point.why:
            plural = "s" if point.devices > 1 else ""
            console.print(Text(fold(f"{point.devices} device{plural}: {point.why}"), style="yellow"), soft_wrap=True)
    console.print()
    console.print(Text(f"wrote    {folder}: scale.csv, and a run for each count"), soft_wrap=True)


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    forms: dict[str, Callable[[Any], str]] = {
        "devices": "{:,}".format,
        "global_batch": "{:,}".format,
        "throughput": lambda throughput: speed(throughput, ""),
        "speed_up": "{:.2f}x".format,
        "efficiency": lambda share: f"{100 * share:.0f} %",
        "peak_memory_mib": words.memory,
        "default_throughput": lambda throughput: speed(throughput, ""),
    }
    yield from ("" if row[name] is None else form(row[name]) for name, form in forms.items())
