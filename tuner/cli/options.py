"""Options that several commands share, and how their values are read."""

from collections.abc import Callable
from typing import Any

import click

from ...errors import UsageError

_GLOBAL_BATCH = "Samples per optimizer step.  [default: the model's usual, or what the devices can share]"
_ALLOW = "lossy: also values that trade accuracy for speed, such as bf16_pure."


def workload_options(command: Callable) -> Callable:
    """MODEL and what describes the workload; `target_of` reads them."""
    options = [
        click.argument("model", required=False),
        click.option("--workload", metavar="FILE:NAME", help="A redline.Workload in a Python file, instead of MODEL."),
        click.option("--devices", type=int, metavar="N", help="Devices of one trial.  [default: all present]"),
        click.option("--seq-len", type=int, metavar="S", help="Sequence length, tokens.  [default: the model's]"),
        click.option("--global-batch", type=int, metavar="B", help=_GLOBAL_BATCH),
        click.option("--data", metavar="FILE", help="Text to train on, instead of random tokens."),
        click.option("--lora", metavar="r=16[,...]", help="Train adapters only: r, alpha, target=a+b, dropout."),
        click.option("--space", "space_file", metavar="FILE", help="A space in YAML, instead of the model's own."),
        click.option("--allow", multiple=True, metavar="WHAT", help=_ALLOW),
        click.option("--set", "overrides", multiple=True, metavar="KNOB=A,B,C", help="The values of a knob."),
        click.option("--fix", "fixed", multiple=True, metavar="KNOB=V", help="A knob that does not vary."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def target_of(model: str | None, workload: str | None) -> str:
    """What to tune, from MODEL or `--workload`.

    Raises:
        UsageError: neither or both are given, or the workload has no name.
    """
    if (model is None) == (workload is None):
        raise UsageError("give either MODEL or --workload FILE:NAME; `redline models` lists the models with a name")
    if workload is not None and ":" not in workload:
        raise UsageError(f"--workload must be FILE:NAME, such as train.py:workload, but got '{workload}'")
    return model if model is not None else workload


def values_of(pairs: tuple[str, ...], option: str) -> dict[str, list[Any]]:
    """`knob=a,b,c` pairs as lists of values, each read as YAML reads a scalar.

    Raises:
        UsageError: a pair is malformed, or a knob is given twice.
    """
    import yaml

    from ...models.families.standard import BLOCK_KNOBS

    values: dict[str, list[Any]] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip()
        # The commas of a knob that names blocks are its own.
        parts = [text.strip()] if name in BLOCK_KNOBS else [part.strip() for part in text.split(",")]
        if not equals or not name or not all(parts):
            example = "micro_batch=4,8" if option == "--set" else "micro_batch=8"
            raise UsageError(f"{option} must look like {example}, but got '{pair}'")
        if name in values:
            raise UsageError(f"{option} names the knob '{name}' twice")
        try:
            values[name] = parts if name in BLOCK_KNOBS else [yaml.safe_load(part) for part in parts]
        except yaml.YAMLError:
            raise UsageError(f"{option} {pair}: the values must be numbers, true, false or words") from None
    return values


def fixes_of(pairs: tuple[str, ...]) -> dict[str, Any]:
    """`knob=v` pairs as a mapping.

    Raises:
        UsageError: a pair is malformed or has several values.
    """
    values = values_of(pairs, "--fix")
    for name, many in values.items():
        if len(many) != 1:
            raise UsageError(f"--fix {name} takes one value, but got {len(many)}; use --set for several")
    return {name: many[0] for name, many in values.items()}


def names_of(text: str | None, option: str) -> tuple[str, ...]:
    """`a,b,c` as names; nothing where the option was not given.

    Raises:
        UsageError: a name is missing.
    """
    if text is None:
        return ()
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise UsageError(f"{option} must look like a,b,c, but got '{text}'")
    return names
