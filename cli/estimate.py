"""`redline estimate`: the predicted best configurations, without a device."""

import json
import shlex
import shutil
from typing import TYPE_CHECKING, Any

import click

from ..base.errors import UsageError
from ..base.reading import path_of
from ..base.writing import as_data, write_atomic
from ..models.request import ModelRequest, SpaceRequest
from .options import TRAINERS, command_line, options_of, request_of, values_of

if TYPE_CHECKING:
    from rich.live import Live

    from ..estimator.document import EstimateDocument
    from ..results import Trial
    from ..runners.memory_timeline import MemoryTimeline

EXAMPLES = """\b
Examples:
  redline estimate llama2-7b --hardware h100 --devices 64 --global-batch 1024
  redline estimate llama3-8b --hardware h100 --devices 16 -o plan.yaml
  redline estimate llama3-8b --hardware a100-80gb --devices 32 --global-batch 256 --fix tp=8 --explain
  redline estimate llama3-8b --hardware h100 --devices 64 --framework megatron
  redline estimate llama3-8b --hardware h100 --devices 8 --config tp=4,zero=1,micro_batch=2,precision=bf16
  redline estimate --layers 80 --hidden 8192 --heads 64 --kv-heads 8 --intermediate 28672 --vocabulary 128256 \\
                   --hardware h200-141gb --devices 512 --global-batch 2048 --layerwise
  redline estimate llama3-8b --hardware h100 --devices 16 --fix zero=3 --trace-memory
  redline estimate gpt2-tiny --trials-from runs/gpt2-tiny      this machine, corrected by the trials of a run
"""
SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "positions")
"""Options of shape numbers."""
NOTHING_FITS = 3
"""Exit code if no configuration is predicted to fit."""


def _shape_options(command: Any) -> Any:
    helps = {
        "layers": "Shape numbers instead of MODEL: repeated blocks.",
        "hidden": "Elements of the residual stream.",
        "heads": "Query heads.",
        "kv_heads": "Key and value heads.  [default: --heads]",
        "head_dim": "Elements of a head.  [default: hidden / heads]",
        "intermediate": "Inner size of the feed-forward network.  [default: 4 * hidden]",
        "vocabulary": "Rows of the embedding.",
        "positions": "Learned positions.  [default: 0, rotary]",
    }
    for name in reversed(SHAPE):
        command = click.option(f"--{name.replace('_', '-')}", type=int, metavar="N", help=helps[name])(command)
    return command


@click.command(epilog=EXAMPLES, short_help="Predict the best configurations of a model on any hardware.")
@options_of(ModelRequest, SpaceRequest)
@click.option("--hardware", metavar="NAME|FILE", help="A name in the table or a YAML file.  [default: this machine]")
@_shape_options
@click.option("--gated/--not-gated", default=True, help="With shape numbers: a gated feed-forward network or not.")
@click.option("--tied", is_flag=True, help="With shape numbers: the head shares the matrix of the embedding.")
@click.option("--config", "config", metavar="KNOB=V,...", help="Predict this configuration only.")
@click.option("--top", type=click.IntRange(min=1), metavar="N", default=1, help="Show the N best plans.  [default: 1]")
@click.option(
    "-o", "--out", "output", metavar="FILE", help="Write the plans, for `redline tune`, `export` and `train`."
)
@click.option("--memory-limit", metavar="SIZE", help="Memory of a device, such as 40GiB.  [default: all]")
@click.option(
    "--framework", metavar="NAME", default="redline", help=f"Trainer: {', '.join(TRAINERS)}.  [default: redline]"
)
@click.option("--trials-from", "trials_from", metavar="RUN", help="Correct the predictions by a run's trials.")
@click.option("--layerwise", is_flag=True, help="Refine the winner: choose checkpointing for each block.")
@click.option("--explain", is_flag=True, help="Show the parts of memory and time.")
@click.option(
    "--trace-memory", is_flag=True, help="Trace the first plan's allocations: memory over a step, largest tensors."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def estimate(
    ctx: click.Context,
    hardware: str | None,
    config: str | None,
    top: int,
    output: str | None,
    memory_limit: str | None,
    framework: str,
    trials_from: str | None,
    layerwise: bool,
    explain: bool,
    trace_memory: bool,
    as_json: bool,
    gated: bool,
    tied: bool,
    **options: Any,
) -> int:
    """Predict the fastest configurations of MODEL that fit on any hardware.

    Nothing is run: the model is traced without memory or arithmetic; its operations and the hardware's data give
    memory and time. Exit codes: 0 found, 2 bad usage or input, 3 nothing is predicted to fit.
    """
    from ..base.collection import without_collection
    from ..estimator.document import estimate_document, plan_file, with_fewer_devices
    from ..estimator.request import estimate_request
    from ..tuner.budget import parse_memory
    from ..tuner.first_trial import first_trial
    from . import estimate_text

    again = command_line(ctx)
    sizes = {name: options.pop(name) for name in SHAPE}
    shape = _shape(options, sizes, gated, tied)
    given = request_of(options, shape)
    single = config_of(config) if config else None
    if output is not None and single is not None:
        raise UsageError(
            "--out writes the plans of a space, but --config selects one configuration: use only one of them"
        )
    if trace_memory:
        _check_traced(shape, framework)
    limit_mib = parse_memory(memory_limit)
    trials = None if trials_from is None else _trials_of(trials_from)
    width = max(60, shutil.get_terminal_size((100, 30)).columns)
    with _Status() as status, without_collection():
        status.update("reading the model")
        request = estimate_request(hardware=hardware, memory_limit_mib=limit_mib, framework=framework, **given)
        document = estimate_document(
            request,
            config=single,
            top=top,
            trials=trials,
            layerwise=layerwise,
            untuned=lambda space, estimator: first_trial(space, estimator).config,
            say=status.update,
        )
        if not as_json:
            status.clear()  # otherwise the text starts after it
            click.echo("\n".join(estimate_text.head(document, width)))
        status.update("looking for plans on fewer devices")
        more = {**given, "global_batch": request.global_batch or given["global_batch"]}
        document = with_fewer_devices(
            document,
            lambda devices: estimate_request(
                hardware=hardware,
                memory_limit_mib=limit_mib,
                framework=framework,
                like=request,
                **{**more, "devices": devices},
            ),
            trials,
        )
    if output is not None and document.ranked:
        _write(output, plan_file(document, again))
    timeline = None
    if trace_memory and document.ranked:
        with _Status() as status:
            status.update("tracing the allocations of a rank")
            timeline = _timeline(document, given)
    if as_json:
        traced = {} if timeline is None else {"memory_trace": timeline.to_dict()}
        click.echo(json.dumps({**document.to_dict(), **traced}, allow_nan=False))
    else:
        then = () if single is not None else _then(again, output, tunable=shape is None)
        click.echo("\n".join(estimate_text.body(document, explain=explain, width=width, then=then, timeline=timeline)))
    return 0 if document.ranked else NOTHING_FITS


def _check_traced(shape: Any, framework: str) -> None:
    """Raises UsageError if the allocations of the request cannot be traced."""
    if shape is not None:
        raise UsageError("--trace-memory runs a model's code, which shape numbers do not have: name a model")
    if framework != "redline":
        raise UsageError(f"--trace-memory traces redline's own training, not that of {framework}")


def _timeline(document: "EstimateDocument", given: dict[str, Any]) -> "MemoryTimeline":
    """Traces the fullest rank of the first plan."""
    from ..estimator.survey import device_of
    from ..models.request import TrainingRequest, resolve
    from ..runners.memory_timeline import memory_timeline
    from ..training.world import World

    request = document.request
    config = document.ranked[0].config
    asked = TrainingRequest(given["target"], **{name: value for name, value in given.items() if name != "target"})
    workload = resolve(asked, device_of(request.hardware), request.devices).workload
    world = World.of(config, 0, request.devices)
    kind = "cpu" if request.hardware.kind == "cpu" else "cuda"
    rank = document.fullest.rank * world.replicas * world.tp
    return memory_timeline(workload, config, rank=rank, devices=request.devices, kind=kind)


class _Status:
    """A line on standard error with the current step; no output if that is not a terminal.

    No thread redraws it: variants are traced in forked processes, and forking is unsafe beside threads.
    """

    def __enter__(self) -> "_Status":
        from rich.console import Console

        self._console = Console(stderr=True)
        self._live: Live | None = None
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def update(self, doing: str) -> None:
        """Shows another text."""
        from rich.live import Live

        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._live.update(f"{doing} ...", refresh=True)

    def clear(self) -> None:
        """Removes the line."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _then(again: str, output: str | None, *, tunable: bool) -> list[str]:
    """Returns the commands that use the plans."""
    written = output or "plan.yaml"
    file = shlex.quote(written)
    tune = f"redline tune {file}" if tunable else None
    export = f"redline export {file} --to torchtitan"
    width = max(len(each) for each in (tune or "", export)) + 3
    lines = [] if output else [f"{again} -o {file}"]
    if tune:
        lines.append(f"{tune:<{width}}on real devices: measures these plans first")
    lines.append(f"{export:<{width}}or --list")
    return lines


def _write(output: str, document: dict[str, Any]) -> None:
    """Writes a plan.

    Raises:
        UsageError: it cannot be written.
    """
    import yaml

    text = "# Predicted by redline estimate; nothing was run.\n" + yaml.safe_dump(as_data(document), sort_keys=False)
    path = path_of(output)
    if not path.parent.is_dir():
        raise UsageError(f"cannot write '{output}': there is no folder '{path.parent}'")
    try:
        write_atomic(path, text.encode(), durable=False)
    except OSError as error:
        raise UsageError(f"cannot write '{output}': {error.strerror or error}") from error


def _shape(options: dict[str, Any], sizes: dict[str, int | None], gated: bool, tied: bool) -> Any:
    """Returns the shape given in place of a model; None if a model is given."""
    given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    if not given:
        return None
    if model := options["target"] or options["workload"]:
        raise UsageError(f"give either a model or shape numbers, but got '{model}' and --{next(iter(given))}")
    missing = [name for name in ("layers", "hidden", "heads", "vocabulary") if name not in given]
    if missing:
        raise UsageError(f"shape numbers need --{', --'.join(missing)} as well")
    from ..estimator import Shape

    name = f"{given['layers']} x {given['hidden']}"
    return Shape(name=name, gated=gated, tied=tied, **given)


def config_of(text: str) -> dict[str, Any]:
    """Returns `k=v,...` as a mapping. The value of a knob that names blocks may contain commas.

    >>> config_of("micro_batch=8,strategy=0-3:tp1,ckpt 4-7:-,tp=2")
    {'micro_batch': 8, 'strategy': '0-3:tp1,ckpt 4-7:-', 'tp': 2}

    Raises:
        UsageError: it is malformed.
    """
    from ..knobs.strategy import BLOCK_KNOBS

    pairs: list[str] = []
    for part in (each.strip() for each in text.split(",")):
        if "=" not in part and pairs and pairs[-1].partition("=")[0] in BLOCK_KNOBS:
            pairs[-1] += f",{part}"
        else:
            pairs.append(part)
    return {name: many[0] for name, many in values_of(tuple(pairs), "--config").items()}


def _trials_of(run: str) -> "list[Trial]":
    """Returns the trials of a run that correct the predictions.

    Raises:
        UsageError: none of them is finished.
    """
    from ..results import View
    from ..space import Config

    trials = View(run, make_config=Config).trials()
    if all(trial.pending for trial in trials):
        raise UsageError(f"--trials-from {run}: no trial of it is finished, so there is nothing to learn from")
    return trials
