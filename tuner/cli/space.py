"""`redline space`: what may vary."""

import json
from typing import Any

import click

from ...models.request import ModelRequest, SpaceRequest, TrainingRequest
from .options import options_of, request_of

EXAMPLES = """\b
Examples:
  redline space gpt2-tiny
  redline space gpt2 --devices 8 --global-batch 64 --fix precision=bf16
  redline space gpt2-tiny -o space.yaml      then edit it, and: redline tune gpt2-tiny --space space.yaml
"""


@click.command(epilog=EXAMPLES, short_help="Show what may vary for a model on the devices at hand.")
@options_of(ModelRequest, SpaceRequest)
@click.option("-o", "--output", metavar="FILE", help="Write the space as YAML, for --space.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def space(output: str | None, as_json: bool, **options: Any) -> None:
    """Show the knobs of MODEL on the devices at hand, their constraints, and how many configurations are valid."""
    from ...device import DESCRIBED, liger_obstacle
    from ...models.kernels import kernels_obstacle
    from ...models.parallel import no_hsdp
    from ...models.spaces import lossy_beyond, without_float8
    from ..task import resolve_task

    task = resolve_task(TrainingRequest(**request_of(options)))
    if output:
        task.space.to_yaml(output)
    if as_json:
        described = task.space.to_dict(describe_callables=True)
        valid = len(task.space) if task.space.enumerable else None
        default = task.space.default().to_dict()
        click.echo(json.dumps({**described, "valid": valid, "default": default, "notes": list(task.notes)}))
        return
    click.echo(task.space.describe())
    click.echo(f"\ndefault: {' '.join(f'{k}={v}' for k, v in task.space.default().items())}")
    if left := lossy_beyond(task.space) if task.workload is not None else ():
        click.echo(f"\nlossy, and so left out: {', '.join(left)} (see --allow lossy)")
    if task.workload is not None and task.workload.space is None:
        knob = task.space.by_name.get("precision")
        if knob is not None and "fp8" not in (*knob.values, *(knob.others or ())):
            if why := without_float8(task.workload, task.device):
                click.echo(f"\nwithout fp8: {why}")
    if "kernels" not in task.space.by_name and task.workload is not None and task.workload.space is None:
        why = kernels_obstacle(task.workload).removeprefix("kernels: ")
        click.echo(f"\nwithout kernels: {why}")
    elif task.device.type == "cuda" and DESCRIBED not in task.device.features:
        if "kernels" in task.space.by_name and (why := liger_obstacle("cuda")):
            click.echo(f"\nkernels are the loss alone, not modules: {why}")
    if "zero" in task.space.by_name and "hsdp" not in task.space.by_name and task.workload.space is None:
        click.echo(f"\nwithout hsdp: {no_hsdp(task.devices, task.device)}")
    for note in task.notes:
        click.echo(f"note: {note}")
    if output:
        click.echo(f"wrote {output}")
