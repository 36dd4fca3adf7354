"""`redline check`: predictions for a configuration file or command of another trainer."""

import json
from typing import TYPE_CHECKING

import click

from ..frameworks.reading import BEFORE_SCRIPT
from ..knobs.text import value_text
from . import exit_codes
from .estimate_text import step_time
from .options import TRAINERS, fixes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..estimator.check import Check
    from ..estimator.estimate import Estimate
    from ..estimator.predictor import Faster

SHOWN = 12
"""Settings that a line names at most."""
EXAMPLES = """\b
Examples:
  redline check train.toml --hardware h100-80gb --devices 16
  redline check "torchrun --nproc-per-node 8 run_clm.py --config_name llama3-8b --bf16 ..." --hardware a100-80gb
  redline check ds_config.json --model llama2-7b --seq-len 4096 --fix micro_batch=2 --hardware h100-80gb --devices 8
"""


@click.command(epilog=EXAMPLES)
@click.argument("trainer_input", metavar="FILE|COMMAND")
@click.option("--hardware", required=True, metavar="NAME|FILE", help="A name in the table or a YAML file.")
@click.option("--devices", type=click.IntRange(min=1), metavar="N", help="Devices.  [default: from the file]")
@click.option("--model", metavar="MODEL", help="The model, if the file does not name a known one.")
@click.option("--seq-len", type=click.IntRange(min=1), metavar="N", help="Tokens of a sample.  [default: the file's]")
@click.option(
    "--global-batch", type=click.IntRange(min=1), metavar="N", help="Samples of a step.  [default: the file's]"
)
@click.option("--fix", multiple=True, metavar="KNOB=V", help="A knob that the file leaves to code; repeatable.")
@click.option("--memory-limit", metavar="SIZE", help="Memory of a device, such as 40GiB.  [default: all]")
@click.option(
    "--framework",
    metavar="NAME",
    help=f"Trainer to read it as, if none is recognised, or whose facts are assumed: {', '.join(TRAINERS)}.  [default: its own]",
)
@click.option("--assume", metavar="FACT=V,...", help="Facts of the trainer's software, such as overlap_experts=true.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(
    trainer_input: str,
    hardware: str,
    devices: int | None,
    model: str | None,
    seq_len: int | None,
    global_batch: int | None,
    fix: tuple[str, ...],
    memory_limit: str | None,
    framework: str | None,
    assume: str | None,
    as_json: bool,
) -> int:
    """Predict memory and speed of a configuration of Megatron-LM, DeepSpeed, torchtitan, accelerate and others.

    FILE is its TOML, YAML, JSON or shell script, COMMAND the command line that starts it. Nothing is run. Exit codes:
    0 it fits, 2 bad usage or input, 3 it is predicted not to fit.
    """
    from ..estimator.check import check as checked
    from ..frameworks import read
    from ..frameworks.registry import FRAMEWORKS
    from ..tuner.budget import parse_memory
    from .estimate import config_of

    result = checked(
        read(trainer_input, framework=framework if framework in FRAMEWORKS else None),
        hardware,
        devices=devices,
        model=model,
        seq_len=seq_len,
        global_batch=global_batch,
        knobs=fixes_of(fix),
        memory_limit_mib=parse_memory(memory_limit),
        framework=framework if framework in TRAINERS or framework not in FRAMEWORKS else None,
        assume=config_of(assume) if assume else None,
    )
    click.echo(json.dumps(result.to_dict(), allow_nan=False) if as_json else render(result))
    return exit_codes.FOUND if result.fits else exit_codes.NOTHING_FEASIBLE


def render(result: "Check") -> str:
    """Returns a check as text."""
    estimate, trainer = result.estimate, result.trainer
    margin = (estimate.memory_limit_mib - estimate.peak_memory_mib) / 1024
    verdict = "fits" if result.fits else "does not fit"
    chance = f"{100 * estimate.probability_fits:.0f} % chance to fit"
    if result.without:
        verdict += f" without {_listed(result.without)}"
        chance = "the chance to fit is unknown"
    idle = trainer.unread_off
    lines = [
        f"{result.model} by {trainer.framework} on {trainer.devices} x {result.hardware.name}",
        *(f"{fact.name:<14} {fact.value}  [{fact.source}]" for fact in result.facts),
        *([f"{'not read':<14} {_listed(result.without)}"] if result.without else []),
        *([f"{'not read, off':<14} {_listed(idle)}"] if idle else []),
        "",
        f"memory   {verdict}: {_memory(estimate)} of {estimate.memory_limit_mib / 1024:.1f} GiB ({result.fullest}), "
        f"{abs(margin):.1f} GiB {'left' if margin >= 0 else 'too much'}; {chance}",
        f"step     {step_time(estimate.step_ms)} ({step_time(estimate.step_ms_low)} to {step_time(estimate.step_ms_high)})"
        + (f"; {result.hardware.unmeasured}" if result.hardware.unmeasured else ""),
        f"speed    {estimate.throughput:,.0f} {estimate.unit}, MFU {100 * estimate.mfu:.1f} % "
        f"({100 * estimate.mfu * estimate.step_ms / estimate.step_ms_high:.1f} to "
        f"{100 * estimate.mfu * estimate.step_ms / estimate.step_ms_low:.1f} %)",
        f"bound by {estimate.binds}",
        *(f"         {100 * share:5.1f} %  {name}" for name, share in result.shares.items() if share >= 0.0005),
    ]
    if not result.fits and result.assumed:
        lines += ["", f"assumed  of {result.framework}: {'; '.join(result.assumed)}"]
    for number, faster in enumerate(result.faster, 1):
        lines += ["", *_faster(number, faster)]
    if not result.faster:
        lines += ["", "no faster configuration that fits was found within three changes"]
    if result.findings:
        lines += ["", *(f"note: {finding}" for finding in result.findings)]
    return "\n".join(lines)


def _faster(number: int, faster: "Faster") -> list[str]:
    gain = (
        f"{faster.gain:.2f} times as fast"
        if faster.gain == faster.gain
        else f"{faster.estimate.throughput:,.0f} {faster.estimate.unit}"
    )
    lines = [
        f"{number}  {gain}, {_memory(faster.estimate)}, {100 * faster.estimate.probability_fits:.0f} % chance to fit"
    ]
    places = {change.where for change in faster.changes}
    are_named = len(places) > 1 or any(place.endswith(BEFORE_SCRIPT) for place in places)
    for change in faster.changes:
        previous = f"   (was {value_text(change.old)})" if change.old is not None else ""
        lines.append(f"     {f'{change.where}: ' if are_named else ''}{change.text}{previous}")
    return lines


def _listed(names: "Sequence[str]") -> str:
    """Names of settings, at most `SHOWN` of them."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _memory(estimate: "Estimate") -> str:
    return f"{estimate.peak_memory_mib / 1024:.1f} GiB ({estimate.memory_low / 1024:.1f} to {estimate.memory_high / 1024:.1f})"
