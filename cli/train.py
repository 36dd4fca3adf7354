"""`redline train` and `redline convert`: training with the winner of a run on real data, and its checkpoints for other tools."""

import json
import os
import sys
from typing import Any

import click
from click.core import ParameterSource

from ..base.errors import UsageError
from ..trainer.convert import ConvertRequest
from ..trainer.request import SECTIONS, TrainRequest, read_settings
from . import exit_codes
from .options import file_fields, fixes_of, options_for

EXAMPLES = f"""\b
Examples:
  redline train runs/gpt2 --data corpus.txt --tokenizer path/to/tokenizer --steps 1000
  redline train runs/llama --data corpus.jsonl --from path/to/hf-checkpoint --lora r=16
  redline train llama-tiny --devices 2 --data corpus.txt --out train/llama
  redline train train/llama --resume --devices 4
  redline train runs/gpt2 --data tokens.parquet --held-out 0.01 --eval-every 100 --lr 3e-4 --settings train.yaml
  redline train runs/gpt2 --data corpus.txt --log-to tensorboard

\b
Settings, in a YAML file such as `warmup: 100`, besides options of the same names:
{file_fields(*SECTIONS)}
"""


@click.command(epilog=EXAMPLES)
@click.argument("source")
@options_for(*SECTIONS)
@click.option(
    "--settings", metavar="FILE", help="YAML with further settings, listed below; options replace its values."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def train(as_json: bool, settings: str | None, **options: Any) -> int:
    """Train with the winner of the run in SOURCE on real data, from the start or from a checkpoint.

    SOURCE is the folder of a run, its best.yaml, the name of a model (a configuration is then predicted), or with
    --resume the folder of a training. The order of samples, the learning rate and the loss depend only on the seed and
    the step: a training resumed on other devices, in another configuration, continues as without the interruption.

    Exit codes: 0 trained, 1 the ranks failed or the last step could not be saved, 2 bad usage or input, 3 nothing
    fits, 130 ended early, with a checkpoint.
    """
    from .tune import end_in_order

    context = click.get_current_context()
    set_here = tuple(name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE)
    options["fix"] = fixes_of(options["fix"]) or None
    from_file = {} if settings is None else read_settings(settings)
    options |= {name: value for name, value in from_file.items() if name not in set_here}
    request = TrainRequest(**options, stated=(*set_here, *from_file))
    from ..trainer.driver import train as start
    from .streams import outlive_reader
    from .train_progress import listener_for

    end_in_order()
    outlive_reader()
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys() and os.environ["WORLD_SIZE"] != "1":
        raise UsageError(
            "redline train starts its ranks itself: leave the launcher out; --runner ray starts them on several hosts, and "
            "torchrun starts the script that `redline export --to python` writes"
        )
    trained = start(request, listener_for(sys.stderr if as_json else sys.stdout, silent=as_json))
    measured = trained.measurement
    if as_json:
        document = {
            "folder": str(trained.folder),
            "step": trained.step,
            "stopped": trained.stopped,
            "strategies": [strategy.to_dict() for strategy in trained.strategies],
            "measurement": None if measured is None else measured.to_dict(),
            "predicted": trained.predicted,
        }
        click.echo(json.dumps(document, allow_nan=False))
    else:
        _print(trained)
    return exit_codes.INTERRUPTED if trained.stopped else exit_codes.FOUND


def _print(trained: Any) -> None:
    """Prints the result and the next command."""
    from ..results.columns import speed

    measured = trained.measurement
    outcome = "ended early" if trained.stopped else "trained"
    checkpoint = (
        f"the latest checkpoint in {trained.folder / 'checkpoints'}" if trained.step else "before the first checkpoint"
    )
    click.echo(f"{outcome}: {trained.step} step{'s'[: trained.step != 1]}, {checkpoint}")
    if measured is not None and measured.throughput is not None:
        than = ""
        if trained.predicted:
            percent = 100 * measured.throughput / trained.predicted - 100
            than = f", {abs(percent):.1f} % {'above' if percent > 0 else 'below'} the dry run"
        click.echo(f"{speed(measured.throughput, measured.unit)}{than}")
    if trained.stopped:
        click.echo(f"{'resume ' if trained.step else 'restart'}  redline train {trained.folder} --resume")
    elif trained.exports_to is not None:
        click.echo(f"export   redline convert {trained.folder} OUT --to {trained.exports_to}")


CONVERT_EXAMPLES = """\b
Examples:
  redline convert train/llama out/llama --to hf
  redline convert train/llama out/llama --to hf --dtype bfloat16
  redline convert train/llama-lora out/adapters --to peft
"""


@click.command(epilog=CONVERT_EXAMPLES)
@click.argument("folder")
@click.argument("out")
@options_for(ConvertRequest)
def convert(folder: str, out: str, **options: Any) -> None:
    """Write the latest checkpoint of the training in FOLDER to OUT, for other tools.

    `hf` is a folder that transformers' from_pretrained loads, and that torchtitan and Megatron-Bridge read; `peft`
    contains only the adapters.
    """
    from ..trainer.convert import convert as write

    conversion = write(folder, out, ConvertRequest(**options))
    rounded = (
        f", stored in {conversion.rounded_to}, the precision of --from (--dtype float32 keeps all digits)"
        if conversion.rounded_to
        else ""
    )
    click.echo(f"wrote {out}: step {conversion.checkpoint.step} of {folder}, for {options['to']}{rounded}")
