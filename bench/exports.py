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
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import RESULTS, machine, markdown, parser
from redline.base.device import Device, detect, usable_cores
from redline.models import workload
from redline.results import Status
from redline.runners import LocalRunner, TrialRequest, TrialTerms
from redline.space import Config

FILES = {
    "python": "train.py", "trainer": "trainer.yaml", "accelerate": "accelerate.yaml",
    "deepspeed": "deepspeed.json", "lightning": "lightning.yaml",
}  # fmt: skip
"""The export targets and their file names."""
DRY_RUN = "dry run"
WARM_UP = 2
"""Steps of an export that are not counted; the first one is in no time."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", default=["llama-tiny", "bert-tiny"])
    options.add_argument("--devices", type=int, default=2)
    options.add_argument("--global-batch", type=int, default=16)
    options.add_argument("--trials", type=int, default=12)
    options.add_argument("--fix", action="append", help="a fixed knob; fusion=false and kernels=false if none is given")
    options.add_argument("--turns", type=int, default=3, help="measurements of each side")
    options.add_argument("--steps", type=int, default=16, help="steps of an export in a turn")
    options.add_argument("--out", type=Path, default=RESULTS)
    arguments = options.parse_args()
    device = detect()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            section = compare(name, device, arguments, Path(folder, name))
            print(section, flush=True)
            path = arguments.out / f"exports-{name}-{arguments.devices}x{device.type}.md"
            path.write_text(
                f"# Exports on {arguments.devices} x {device.name}\n\n{section}\n"
                f"Medians of {arguments.turns} turns of {arguments.steps - WARM_UP} steps each.\n\n"
                f"    {shlex.join(['python', *sys.argv])}\n\n{machine('accelerate', 'deepspeed', 'lightning')}\n"
            )
            print(f"wrote {path}")


def compare(name: str, device: Device, arguments: argparse.Namespace, folder: Path) -> str:
    """Tunes a model, exports the winner, measures all sides, and returns the section of the report."""
    import yaml

    folder.mkdir()
    run = str(folder / "run")
    redline = [sys.executable, "-m", "redline.cli"]
    search = ["--devices", str(arguments.devices), "--global-batch", str(arguments.global_batch), "--runner", "local"]
    search += ["--trials", str(arguments.trials), "--out", run]
    for knob in arguments.fix or ("fusion=false", "kernels=false"):
        search += ["--fix", knob]
    subprocess.run([*redline, "tune", name, *search], check=True, stdout=subprocess.DEVNULL)
    config = yaml.safe_load(Path(run, "best.yaml").read_text())["best"]["configuration"]
    print(f"{name}: {config}", flush=True)
    starts = {}
    for target, file in FILES.items():
        export = [*redline, "export", run, "--to", target, "-o", str(folder / file)]
        done = subprocess.run(export, check=True, capture_output=True, text=True)
        (starts[target],) = re.findall(r"^Start: (.*)$", done.stderr, re.MULTILINE)
    trained = workload(name, global_batch=arguments.global_batch)
    threads = max(1, usable_cores() // arguments.devices) if device.type == "cpu" else None
    losses: dict[str, float] = {}
    step_ms: dict[str, list[float]] = defaultdict(list)
    failures: dict[str, str] = {}
    with LocalRunner(trained, TrialTerms(device=device, devices=arguments.devices, threads=threads)) as runner:
        for turn in range(arguments.turns):
            measurement = runner.run(TrialRequest(config=Config(config), number=turn))
            if measurement.status is not Status.OK:
                raise SystemExit(f"the dry run ended as {measurement.status}: {measurement.reason}")
            losses[DRY_RUN] = measurement.loss
            step_ms[DRY_RUN].append(measurement.step_ms)
            for target in FILES:
                try:
                    printed = train(target, starts[target], config, name, arguments, folder)
                except subprocess.CalledProcessError as error:
                    failures[target] = error.stderr.strip().splitlines()[-1][:200]
                    print(f"{error.stdout[-1000:]}\n{error.stderr[-4000:]}\n{target} failed", flush=True)
                    continue
                losses[target] = printed["losses"][0]
                step_ms[target].append(statistics.median(printed["step_ms"][WARM_UP - 1 :]))
    return report(trained, config, losses, step_ms, failures)


def train(
    target: str, start: str, config: dict[str, Any], name: str, arguments: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Runs an export by the command it names; returns the losses and step times (ms) that its training printed.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    more = ["--steps", str(arguments.steps)]
    if target == "python":
        more += ["--log-every", "1"]
    else:
        script = f"{Path(__file__).with_name('export_trainers.py')} {target} {FILES[target]}"
        start = re.sub(r" \S*train\.py\b.*", f" {script}", start)
        more += ["--model", name, "--global-batch", str(arguments.global_batch)]
        more += ["--micro-batch", str(config["micro_batch"]), "--grad-accum", str(config["grad_accum"])]
        more += ["--attention", config["attention"]] if config.get("attention") else []
        more += ["--fused"] if config.get("fused_optimizer") else []
        # The Trainer's file contains these settings itself.
        more += ["--checkpoint"] if config.get("checkpoint_ratio") and target != "trainer" else []
        more += ["--reshard"] if config.get("zero") == 3 and target == "lightning" else []
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-c", f"{start} {shlex.join(more)}"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    if target == "python":
        lines = re.findall(r"loss (\S+)  (\S+) ms", done.stdout)
        return {"losses": [float(loss) for loss, _ in lines], "step_ms": [float(ms) for _, ms in lines[1:]]}
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"losses"'))
    return json.loads(line)


def report(
    trained: Any, config: dict[str, Any], losses: dict[str, float], step_ms: dict[str, list[float]], failures: dict[str, str]
) -> str:  # fmt: skip
    """Returns the section of a model in Markdown."""
    import torch
    from redline.schedule.comparison import allowance, loss_allowance

    tokens = trained.global_batch * trained.seq_len
    with torch.device("meta"):
        half = torch.bfloat16 if str(config.get("precision", "")).startswith("bf16") else None
        allowed = loss_allowance(allowance(trained.build_model(config), tokens, dtype=half), tokens)
    medians = {name: statistics.median(times) for name, times in step_ms.items()}
    rows = []
    for name, median in medians.items():
        apart = abs(losses[name] / losses[DRY_RUN] - 1)
        # The script prints six decimal places.
        equal = "yes" if apart <= allowed + 5e-7 / losses[DRY_RUN] else "**no**"
        turns = ", ".join(f"{ms:.0f}" for ms in step_ms[name])
        rows.append((
            name, f"{losses[name]:.6f}", *(("", "") if name == DRY_RUN else (f"{apart:.1e}", equal)),
            f"{median:.1f} ({turns})", f"{tokens / median * 1e3:,.0f}", f"{medians[DRY_RUN] / median:.2f}",
        ))  # fmt: skip
    rows += [(name, reason, *[""] * 5) for name, reason in failures.items() if name not in medians]
    header = ("side", "first loss", "apart", "equal", "step, ms (turns)", "tokens/s", "of the dry run's")
    winner = ", ".join(f"{knob}={value}" for knob, value in config.items())
    return (
        f"## {trained.name}\n\n{markdown(header, rows)}\n\n"
        f"Winner: {winner}. Equal is within {allowed:.1e} of the loss.\n"
    )


if __name__ == "__main__":
    main()
