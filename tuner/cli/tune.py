"""`redline tune`: find the fastest configuration."""

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import click

from ...errors import UsageError
from .options import fixes_of, target_of, values_of, workload_options

EXAMPLES = """\b
Examples:
  redline tune gpt2-tiny
  redline tune gpt2 --seq-len 1024 --global-batch 64 --trials 30 --out runs/gpt2
  redline tune gpt2-tiny --memory-limit 1GiB --set micro_batch=4,8,16 --fix precision=fp32
  redline tune llama-tiny --devices 2 --global-batch 16
  redline tune llama2-7b --lora r=16 --seq-len 2048
  redline tune path/to/config.json --time 30m --sampler hebo
  redline tune --workload train.py:workload --runner local
  redline tune gpt2 --out runs/gpt2 --resume
  redline tune gpt2-tiny --log-to tensorboard
  redline tune gpt2 --memory-limit 4GiB --layerwise
  redline tune llama2-7b --runner simulate --hardware h100-80gb --devices 1024 --global-batch 2048 --trials 40
"""


@click.command(epilog=EXAMPLES, short_help="Find the fastest configuration of a model.")
@workload_options
@click.option("--trials", type=int, metavar="N", help="Trials in all.  [default: 16, or no limit with --time or --device-hours]")
@click.option("--time", "duration", metavar="TIME", help="Wall time to the winner, such as 90s, 30m or 1h30m.")
@click.option("--device-hours", type=float, metavar="H", help="Device time of all trials, hours.")
@click.option(
    "--patience",
    type=click.IntRange(min=0),
    metavar="N",
    help="Stop once N further trials are unlikely to bring another 1 %; 0 never stops early.  [default: 5, 0 for grid]",
)
@click.option(
    "--sampler", default="bayes", show_default=True, help="Who proposes: bayes, random, grid, tpe, gp or hebo."
)
@click.option("--warm-start", multiple=True, metavar="RUN", help="An earlier run to learn from; repeatable.")
@click.option("--headroom", type=float, default=0.05, show_default=True, help="Share of memory that is to stay free.")
@click.option("--layerwise", is_flag=True, help="Refine the winner block by block, and try that beside it.")
@click.option(
    "--runner", default="ray", show_default=True, help="Who runs the trials: ray, local without Ray, or simulate."
)
@click.option("--hardware", metavar="NAME|FILE", help="What is simulated, or what this machine is for the estimate.")
@click.option("--memory-limit", metavar="SIZE", help="Memory of a device, such as 8GiB.  [default: what it has]")
@click.option(
    "--trial-timeout",
    default="5m",
    show_default=True,
    metavar="TIME",
    help="Deadline of one trial, compilation apart.",
)
@click.option("--measure-time", default="3s", show_default=True, metavar="TIME", help="For measuring one candidate.")
@click.option("--concurrency", type=int, metavar="N", help="Trials at once.  [default: what the devices allow]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of weights, data, proposals.")
@click.option("--out", metavar="DIR", help="Folder for the results.  [default: runs/MODEL, or MODEL-2, ...]")
@click.option("--resume", is_flag=True, help="Go on with the run in --out.")
@click.option("--storage", metavar="URL", help="An Optuna storage for the ledger, instead of a file in --out.")
@click.option("--ray-address", metavar="ADDRESS", help="A Ray cluster to join.  [default: RAY_ADDRESS, or a local one]")
@click.option(
    "--log-to", multiple=True, metavar="TRACKER", help="Log each trial to mlflow, tensorboard or wandb; repeatable."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def tune(
    model: str | None,
    workload: str | None,
    space_file: str | None,
    overrides: tuple[str, ...],
    fixed: tuple[str, ...],
    duration: str | None,
    out: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Find the configuration that trains MODEL fastest on the devices at hand.

    MODEL is a name (`redline models`), a folder or config.json of a Hugging Face model, or a hub id.
    Weights are not needed. Every candidate is built and trained for some steps in fresh processes.

    Exit codes: 0 found, 2 bad usage or input, 3 nothing feasible, 130 interrupted (what was found is kept).
    """
    target = target_of(model, workload)
    if options["resume"] and out is None:
        raise UsageError("--resume needs --out, the folder of the run to go on with")
    override, fix = values_of(overrides, "--set"), fixes_of(fixed)
    from ..tuning import tune as search
    from .main import EXIT_FOUND, EXIT_INTERRUPTED, EXIT_NOTHING_FEASIBLE
    from .outcome import print_result
    from .progress import listener_for

    out = out or _fresh_folder(target)
    listener = listener_for(sys.stderr if as_json else sys.stdout, silent=as_json)
    _end_in_order()
    with listener:
        result = search(target, space_file, time=duration, out=out, override=override, fix=fix, listener=listener, **options)
    if as_json:
        click.echo(json.dumps(result.to_dict(), allow_nan=False))
    else:
        print_result(result)
    if result.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FOUND if result.best is not None else EXIT_NOTHING_FEASIBLE


def _fresh_folder(target: str) -> str:
    name = Path(target.split(":")[0]).stem if ".py:" in target else Path(target).name.removesuffix(".json")
    path, number = Path("runs", name), 1
    while path.exists():
        number += 1
        path = Path("runs", f"{name}-{number}")
    return str(path)


def _end_in_order() -> None:
    """Has a request to end and a terminal that went away end the search as Ctrl-C does, with what was found."""
    terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # what is printed from now on would fail
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in terminals:
                os.dup2(nowhere, stream)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, interrupt)
