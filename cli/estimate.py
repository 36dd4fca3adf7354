"""`redline estimate`: the predicted best configurations, without a device."""

import json
import shlex
import shutil
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import click

from ..base.errors import UsageError
from ..base.option import Option, check_options
from ..base.reading import path_of
from ..base.writing import as_data, write_atomic
from ..models.request import ModelRequest, SpaceRequest
from ..tuner.budget import parse_memory
from . import exit_codes
from .options import TRAINERS, options_of, request_of, values_of
from .words import Status

if TYPE_CHECKING:
    from ..estimator.document import EstimateDocument

EXAMPLES = """\b
Examples:
  redline estimate llama2-7b --hardware h100 --devices 64 --global-batch 1024
  redline estimate llama3-8b --hardware h100 --devices 16 -o plan.yaml
  redline estimate llama3-8b --hardware a100-80gb --devices 32 --global-batch 256 --fix tp=8 --explain
  redline estimate llama3-8b --hardware h100 --devices 64 --framework megatron
  redline estimate llama3-8b --hardware h100 --devices 8 --config tp=4,zero=1,micro_batch=2,precision=bf16
  redline estimate path/to/config.json --hardware h200-141gb --devices 512 --global-batch 2048 --layerwise
"""
HELP = {"devices": "Devices of one trial.  [default: 1 with --hardware, otherwise all present]"}


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    """The hardware of an estimate, and its output."""

    hardware: Annotated[
        str | None, Option("A name in the table or a YAML file.  [default: this machine]", metavar="NAME|FILE")
    ] = None
    config: Annotated[str | None, Option("Predict this configuration only.", metavar="KNOB=V,...")] = None
    top: Annotated[int, Option("Show the N best plans.", type=int, least=1, metavar="N")] = 1
    out: Annotated[str | None, Option("Write the plans, for `redline tune`, `export` and `train`.", metavar="FILE")] = (
        None
    )
    memory_limit: Annotated[
        str | None,
        Option("Memory of a device, such as 40GiB.  [default: all]", check=parse_memory, metavar="SIZE"),
    ] = None
    framework: Annotated[str, Option(f"Trainer: {', '.join(TRAINERS)}.", metavar="NAME")] = "redline"
    assume: Annotated[
        str | None,
        Option(
            "Facts of its software, such as overlap_experts=true; with --framework NAME@VERSION those of a version.",
            metavar="FACT=V,...",
        ),
    ] = None
    layerwise: Annotated[bool, Option("Refine the winner: choose checkpointing for each block.")] = False
    explain: Annotated[bool, Option("Show the parts of memory and time.")] = False


@click.command(epilog=EXAMPLES)
@options_of(ModelRequest, SpaceRequest, EstimateOptions, help=HELP)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def estimate(ctx: click.Context, as_json: bool, **options: Any) -> int:
    """Predict the fastest configurations of MODEL that fit on any hardware.

    Nothing is run: the model is traced without memory or arithmetic; its operations and the hardware's data give
    memory and time. Exit codes: 0 found, 2 bad usage or input, 3 nothing is predicted to fit.
    """
    from ..base.collection import without_collection
    from ..estimator.document import estimate_document, plan_file
    from ..estimator.plans import Change, helpful
    from ..estimator.request import estimate_request
    from ..tuner.first_trial import first_trial
    from . import estimate_text

    again = shlex.join(["redline", *ctx.obj])
    estimate_options = EstimateOptions(**{field.name: options.pop(field.name) for field in fields(EstimateOptions)})
    check_options(estimate_options)
    output = estimate_options.out
    request_values = request_of(options)
    fixed_config = config_of(estimate_options.config) if estimate_options.config else None
    if output is not None and fixed_config is not None:
        raise UsageError(
            "--out writes the plans of a space, but --config selects one configuration: use only one of them"
        )
    limit_mib = parse_memory(estimate_options.memory_limit)
    width = max(60, shutil.get_terminal_size((100, 30)).columns)
    with Status() as status, without_collection():
        status.update("reading the model")
        terms: dict[str, Any] = {
            "hardware": estimate_options.hardware,
            "memory_limit_mib": limit_mib,
            "framework": estimate_options.framework,
            "assume": config_of(estimate_options.assume) if estimate_options.assume else None,
        }
        request = estimate_request(**terms, **request_values)
        planned_values = {**request_values, "global_batch": request.global_batch or request_values["global_batch"]}

        def show(document: "EstimateDocument") -> None:
            if not as_json:
                status.clear()  # otherwise the text starts after it
                click.echo("\n".join(estimate_text.head(document, width)))

        document = estimate_document(
            request,
            config=fixed_config,
            top=estimate_options.top,
            layerwise=estimate_options.layerwise,
            untuned=lambda space, estimator: first_trial(space, estimator).config,
            say=status.update,
            show=show,
        )
        advice: list[Change] = []
        if not document.ranked and fixed_config is None:
            status.update("looking for changes that help")
            advice = helpful(
                lambda changes: estimate_request(**terms, **{**planned_values, **changes}),
                request_values,
                devices=request.devices,
                seq_len=request.estimator.training.seq_len,
            )
            status.clear()
    if output is not None and document.ranked:
        _write(output, plan_file(document, again))
    if as_json:
        helps = {"advice": [change.options for change in advice]} if advice else {}
        click.echo(json.dumps({**document.to_dict(), **helps}, allow_nan=False))
    else:
        then: list[str] = []
        if fixed_config is None and document.ranked:
            from ..frameworks.export import suited_target

            class_name = str((request.trains.get("workload") or {}).get("class") or "")
            target = suited_target(document.ranked[0].config, request.framework.name, class_name)
            then = _next_commands(again, output, target)
        lines = estimate_text.body(document, explain=estimate_options.explain, width=width, then=then, advice=advice)
        click.echo("\n".join(lines))
    return exit_codes.FOUND if document.ranked else exit_codes.NOTHING_FEASIBLE


def _next_commands(again: str, output: str | None, target: str) -> list[str]:
    """Returns the commands that use the plans; `target` is the export's."""
    written = output or "plan.yaml"
    file = shlex.quote(written)
    tune, export = f"redline tune {file}", f"redline export {file} --to {target}"
    width = max(len(tune), len(export)) + 3
    return [
        *([] if output else [f"{again} -o {file}"]),
        f"{tune:<{width}}on real devices: measures these plans first",
        f"{export:<{width}}or --list",
    ]


def _write(output: str, document: dict[str, Any]) -> None:
    """Writes a plan.

    Raises:
        UsageError: it cannot be written.
    """
    import yaml

    content = "# Predicted by redline estimate; nothing was run.\n" + yaml.safe_dump(as_data(document), sort_keys=False)
    path = path_of(output)
    if not path.parent.is_dir():
        raise UsageError(f"cannot write '{output}': there is no folder '{path.parent}'")
    try:
        write_atomic(path, content.encode(), durable=False)
    except OSError as error:
        raise UsageError(f"cannot write '{output}': {error.strerror or error}") from error


def config_of(text: str) -> dict[str, Any]:
    """Returns `k=v,...` as a mapping. The value of a knob that names blocks may contain commas.

    >>> config_of("micro_batch=8,strategy=0-3:tp1,ckpt 4-7:-,tp=2")
    {'micro_batch': 8, 'strategy': '0-3:tp1,ckpt 4-7:-', 'tp': 2}

    Raises:
        UsageError: it is malformed.
    """
    from ..knobs.strategy import BLOCK_KNOBS

    pairs: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if "=" not in piece and pairs and pairs[-1].partition("=")[0] in BLOCK_KNOBS:
            pairs[-1] += f",{piece}"
        else:
            pairs.append(piece)
    return {name: values[0] for name, values in values_of(tuple(pairs), "--config").items()}
