"""`redline convert`: conversion of a training's checkpoint for other tools."""

from typing import Any

import click

from ..trainer.convert import ConvertRequest
from .options import options_for

EXAMPLES = """\b
Examples:
  redline convert train/llama out/llama --to hf
  redline convert train/llama out/llama --to hf --dtype bfloat16
  redline convert train/llama-lora out/adapters --to peft
"""


@click.command(epilog=EXAMPLES)
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
