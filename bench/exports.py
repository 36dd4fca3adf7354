"""Comparison of exports with the dry run: their losses and their speed in each framework, measured in the same run.

    python bench/exports.py                                  # llama-tiny and bert-tiny on two CPU ranks
    python bench/exports.py --models llama-tiny --turns 5

`redline tune` finds the winner, `redline export` writes it for every trainer, and the command in the export starts it
(bench/export_trainers.py is its train.py). The dry run and every export train in turns, each in fresh processes; step
times are medians of the slowest rank, and then the median over turns. The first loss is compared with that of the dry
run by `redline.schedule.comparison`: format, depth and number of tokens limit the rounding difference of two orders of
the same sums.

The table is printed and saved as `bench/results/exports-MODEL-DEVICES.md` with the command, the hardware and the
versions. Blocks are not compiled (`--fix fusion=false`): compiled code draws other dropout masks, so that the first
losses of a model with dropout could not be compared, and most trainers compile a model as a whole or not at all. The
loss keeps all logits (`--fix kernels=false`), as in every trainer but the script: the cost of that is visible with
`--fix kernels=true`.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from redline.base.device import Device, detect, usable_cores
from redline.models import workload
from redline.results.environment import host, versions

HERE = Path(__file__).resolve().parent
FILES = {
    "python": "train.py", "trainer": "trainer.yaml", "accelerate": "accelerate.yaml",
    "deepspeed": "deepspeed.json", "lightning": "lightning.yaml",
}  # fmt: skip
"""The export targets and their file names."""
WARM_UP = 2
"""Steps of an export that are not counted; the first one is in no time."""


@dataclass
class Row:
    """Measurements of one side."""

    name: str
    loss: float = float("nan")
    """Loss of the first step."""
    step_ms: list[float] = field(default_factory=list)
    """Median step time of each turn."""
    failed: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.step_ms) if self.step_ms else float("nan")


def main() -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--models", nargs="+", default=["llama-tiny", "bert-tiny"])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--fix", action="append", help="a fixed knob; fusion=false and kernels=false if none is given")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each side")
    parser.add_argument("--steps", type=int, default=16, help="steps of an export in a turn")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    device = detect()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            part = compare(name, device, options, Path(folder, name))
            print(part, flush=True)
            path = options.out / f"exports-{name}-{options.devices}x{device.type}.md"
            path.write_text(f"# Exports on {options.devices} x {device.name}\n\n{part}{footer(options)}")
            print(f"wrote {path}")


def compare(name: str, device: Device, options: argparse.Namespace, folder: Path) -> str:
    """Tunes a model, exports the winner, measures all sides, and returns the section of the report."""
    import yaml

    folder.mkdir()
    run = str(folder / "run")
    redline = [sys.executable, "-m", "redline.cli"]
    sizes = ["--devices", str(options.devices), "--global-batch", str(options.global_batch)]
    how = ["--runner", "local", "--trials", str(options.trials), "--out", run]
    for held in options.fix or ("fusion=false", "kernels=false"):
        how += ["--fix", held]
    subprocess.run([*redline, "tune", name, *sizes, *how], check=True, stdout=subprocess.DEVNULL)
    config = yaml.safe_load(Path(run, "best.yaml").read_text())["best"]["configuration"]
    print(f"{name}: {config}", flush=True)
    starts = {}
    for target, file in FILES.items():
        done = subprocess.run(
            [*redline, "export", run, "--to", target, "-o", str(folder / file)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        (starts[target],) = re.findall(r"^Start: (.*)$", done.stderr, re.MULTILINE)
    load = workload(name, global_batch=options.global_batch)
    dry = Row("dry run")
    rows = {target: Row(f"`{target}`") for target in FILES}
    with runner(load, device, options) as trials:
        for turn in range(options.turns):
            measured = dry_run(trials, config, turn)
            dry.loss = measured.loss
            dry.step_ms.append(measured.step_ms)
            for target, row in rows.items():
                try:
                    printed = train(target, starts[target], config, name, options, folder)
                except subprocess.CalledProcessError as error:
                    row.failed = error.stderr.strip().splitlines()[-1][:200]
                    print(f"{error.stdout[-1000:]}\n{error.stderr[-4000:]}\n{target} failed", flush=True)
                    continue
                row.loss = printed["losses"][0]
                row.step_ms.append(statistics.median(printed["step_ms"][WARM_UP - 1 :]))
    return report(load, config, dry, list(rows.values()))


def runner(load: Any, device: Device, options: argparse.Namespace) -> Any:
    from redline.runners.place.local import LocalRunner
    from redline.runners.runner import TrialTerms

    threads = max(1, usable_cores() // options.devices) if device.type == "cpu" else None
    return LocalRunner(load, TrialTerms(device=device, devices=options.devices, threads=threads))


def dry_run(trials: Any, config: dict[str, Any], number: int) -> Any:
    from redline.results import Status
    from redline.runners.runner import TrialRequest
    from redline.space import Config

    measured = trials.run(TrialRequest(config=Config(config), number=number))
    if measured.status is not Status.OK:
        raise SystemExit(f"the dry run ended as {measured.status}: {measured.reason}")
    return measured


def train(
    target: str, start: str, config: dict[str, Any], name: str, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Runs an export by the command it names; returns the losses and step times (ms) that its training printed.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    more = ["--steps", str(options.steps)]
    if target == "python":
        more += ["--log-every", "1"]
    else:
        script = f"{HERE / 'export_trainers.py'} {target} {FILES[target]}"
        start = re.sub(r" \S*train\.py\b.*", f" {script}", start)
        more += ["--model", name, "--global-batch", str(options.global_batch)]
        more += ["--micro-batch", str(config["micro_batch"]), "--grad-accum", str(config["grad_accum"])]
        more += ["--attention", config["attention"]] if config.get("attention") else []
        more += ["--fused"] if config.get("fused_optimizer") else []
        # The Trainer's file contains these settings itself.
        more += ["--checkpoint"] if config.get("checkpoint_ratio") and target != "trainer" else []
        more += ["--reshard"] if config.get("zero") == 3 and target == "lightning" else []
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f"{start} {shlex.join(more)}"],
        cwd=folder, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if target == "python":
        lines = re.findall(r"loss (\S+)  (\S+) ms", done.stdout)
        return {"losses": [float(loss) for loss, _ in lines], "step_ms": [float(ms) for _, ms in lines[1:]]}
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"losses"'))
    return json.loads(line)


def report(load: Any, config: dict[str, Any], dry: Row, rows: list[Row]) -> str:
    """Returns the section of a model in Markdown."""
    import torch
    from redline.schedule.comparison import allowance, loss_allowance

    tokens = load.global_batch * load.seq_len
    with torch.device("meta"):
        half = torch.bfloat16 if str(config.get("precision", "")).startswith("bf16") else None
        allowed = loss_allowance(allowance(load.build_model(config), tokens, dtype=half), tokens)
    lines = [
        f"## {load.name}",
        "",
        "| side | first loss | apart | equal | step, ms (turns) | tokens/s | of the dry run's |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (dry, *rows):
        if not row.step_ms:
            lines.append(f"| {row.name} | {row.failed} | | | | | |")
            continue
        apart = abs(row.loss / dry.loss - 1)
        turns = ", ".join(f"{each:.0f}" for each in row.step_ms)
        # The script prints six decimal places.
        equal = "" if row is dry else "yes" if apart <= allowed + 5e-7 / dry.loss else "**no**"
        lines.append(
            f"| {row.name} | {row.loss:.6f} | {'' if row is dry else f'{apart:.1e}'} | {equal} | "
            f"{row.median:.1f} ({turns}) | {tokens / row.median * 1e3:,.0f} | {dry.median / row.median:.2f} |"
        )
    winner = ", ".join(f"{knob}={value}" for knob, value in config.items())
    return "\n".join([*lines, "", f"Winner: {winner}. Equal is within {allowed:.1e} of the loss.", ""])


def footer(options: argparse.Namespace) -> str:
    """Returns the command, hardware and versions."""
    where = host()
    frameworks = ("accelerate", "deepspeed", "lightning")
    known = {**versions(), **{name: metadata.version(name) for name in frameworks}}
    return (
        f"\nMedians of {options.turns} turns of {options.steps - WARM_UP} steps each.\n\n"
        f"    {shlex.join(['python', *sys.argv])}\n\n"
        f"{where['system']}, {where['cores']} cores, {where['memory_mib']:,} MiB. "
        + ", ".join(f"{name} {version}" for name, version in known.items())
        + ".\n"
    )


if __name__ == "__main__":
    main()
