"""`redline models` and `redline space`: the predefined models, and the search space of a model."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ..knobs.text import config_text
from ..models.request import ModelRequest, SpaceRequest, TrainingRequest
from .options import options_of, request_of
from .words import Status

if TYPE_CHECKING:
    from ..models import Workload
    from ..tuner.request.target import Task

EXAMPLES = """\b
Examples:
  redline space gpt2-tiny
  redline space gpt2 --devices 8 --global-batch 64 --fix precision=bf16
  redline space gpt2-tiny -o space.yaml      then edit it, and: redline tune gpt2-tiny --space space.yaml
"""


@click.command(epilog=EXAMPLES)
@options_of(ModelRequest, SpaceRequest)
@click.option("-o", "--out", "output", metavar="FILE", help="Write the space as YAML, for --space.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def space(output: str | None, as_json: bool, **options: Any) -> None:
    """Show the knobs of MODEL on the available devices, their constraints, and the number of valid configurations."""
    from ..models.architecture import class_of
    from ..tuner.request.target import resolve_task

    request = TrainingRequest(**request_of(options))
    with Status() as status:
        status.update("reading the model, and tracing it by its shapes")
        task = resolve_task(request)
    if output:
        task.space.to_yaml(output)
    class_name = class_of(task.workload.model) if task.workload is not None else None
    class_entry = {"class": class_name} if class_name else {}
    if as_json:
        described = task.space.to_dict(describe_callables=True)
        valid = len(task.space) if task.space.enumerable else None
        default = task.space.default().to_dict()
        click.echo(
            json.dumps({**described, **class_entry, "valid": valid, "default": default, "notes": list(task.notes)})
        )
        return
    if class_name:
        click.echo(f"{task.name}: {class_name}\n")
    click.echo(task.space.describe())
    click.echo(f"\ndefault: {config_text(task.space.default())}")
    if task.workload is not None and request.given_space is None and task.workload.space is None:
        for line in _left_out(task, task.workload):
            click.echo(f"\n{line}")
    for note in task.notes:
        click.echo(f"note: {note}")
    if output:
        click.echo(f"wrote {output}")


def _left_out(task: "Task", workload: "Workload") -> Iterator[str]:
    """Yields the values and knobs that are not in the space, with the reasons."""
    from ..base.device import DESCRIBED, liger_obstacle
    from ..models.kernels import kernels_obstacle
    from ..models.parallel import no_hsdp
    from ..models.spaces import lossy_beyond, without_float8

    knobs = task.space.by_name
    if lossy_values := lossy_beyond(task.space):
        yield f"left out because they are lossy: {', '.join(lossy_values)} (see --allow lossy)"
    if "kernels" in knobs and task.device.type == "cuda" and DESCRIBED not in task.device.features:
        if reason := liger_obstacle("cuda"):
            yield f"kernels replace only the loss, not modules: {reason}"
    precision = knobs.get("precision")
    if precision is not None and "fp8" not in (*precision.values, *(precision.others or ())):
        if reason := without_float8(workload, task.device):
            yield f"without fp8: {reason}"
    if "kernels" not in knobs and (reason := kernels_obstacle(workload)):
        yield f"without kernels: {reason.removeprefix('kernels: ')}"
    if "ep" in knobs and "capacity_factor" not in knobs:
        yield "without capacity_factor: it is lossy, since experts drop rows; --fix capacity_factor=1.25 sets it"
    if "zero" in knobs and "hsdp" not in knobs:
        yield f"without hsdp: {no_hsdp(task.devices, task.device)}"


@click.command(
    epilog="\b\nExamples:\n  redline models\n  redline models --json\n",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def models(as_json: bool) -> None:
    """List the predefined models with their sizes.

    Other Hugging Face models work too, by their folder, config.json or hub id.
    """
    from ..models.presets import list_presets

    rows = list_presets()
    if as_json:
        click.echo(json.dumps({row["name"]: row for row in rows}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("model", "family", "params", "layers", "hidden", "heads", "vocab", "seq len", "batch"):
        table.add_column(name, justify="left" if name in ("model", "family") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            row["family"],
            _count(row["parameters"]),
            *(
                f"{row[key]:,}" if row[key] else "-"
                for key in ("layers", "hidden", "heads", "vocabulary", "seq_len", "global_batch")
            ),
        )
    console = Console(highlight=False)
    # Lines that are too long wrap: a truncated name cannot be passed to `redline tune`.
    needed = console.measure(table, options=console.options.update(max_width=10**4)).maximum
    console.width = max(console.width, needed)
    console.print(table)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"
