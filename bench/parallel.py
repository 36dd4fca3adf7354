"""The gain of tuning over several devices over usual starting points, measured in the same run.

    python bench/parallel.py                               # llama-tiny and bert-tiny on two CPU ranks
    python bench/parallel.py --models llama-tiny --trials 12 --runner local
    python bench/parallel.py --devices 8 --surface         # with GPUs: gpt2, bert-large, llama3.2-1b

First redline tunes the model. Then every side trains it in turn on the same global batch: plain data parallelism with
micro-batch 1, transformers.Trainer with DDP and with FSDP2 as accelerate configures it, both with the Trainer's
micro-batch of 8, redline's default configuration (the same as the Trainer's), and the winner. If transformers has a
plan for the model, layers sharded over all devices by DTensor are compared with redline's own sharding (`tp`). Each
turn is a fresh set of processes; steps are timed alike, and the slowest rank counts. Baselines run in float32 on a CPU
and in bf16 on GPUs, where users would enable it.

A table is printed for each model, and saved as `bench/results/parallel-MODEL-DEVICES.md` with the command, the
hardware and the versions. With `--surface` the whole grid of the space is measured first (bench/record.py), including
failures and memory, into a CSV beside it; the search is then also compared with the best of the grid.
"""

import argparse
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import parallel_sides as sides
from redline.base.device import Device, detect, usable_cores
from redline.estimator.measuring import table_entry
from redline.models import flops_of
from redline.results.environment import host, versions
from tables import read_surface

HERE = Path(__file__).resolve().parent
CPU_MODELS = ("llama-tiny", "bert-tiny")
GPU_MODELS = ("gpt2", "bert-large", "llama3.2-1b")

BUSY = 1.3
"""Largest difference between the turns of a side on a quiet machine."""


@dataclass
class Row:
    """Measurements of one side."""

    name: str
    program: sides.Side
    step_ms: list[float] = field(default_factory=list)
    """Median step time of each turn."""
    memory_mib: float = 0.0
    failed: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", help=f"default: {', '.join(CPU_MODELS)}; on GPUs {', '.join(GPU_MODELS)}"
    )
    parser.add_argument("--devices", type=int, help="default: 2 CPU ranks, or all GPUs")
    parser.add_argument("--global-batch", type=int, help="default: 16 on a CPU, the model's on GPUs")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--runner", default="ray", choices=("ray", "local"))
    parser.add_argument("--turns", type=int, default=3, help="measurements of each side")
    parser.add_argument("--steps", type=int, default=8, help="steps measured in a turn")
    parser.add_argument("--surface", action="store_true", help="measure the whole grid first, into a CSV")
    parser.add_argument(
        "--surface-time", default="2h", help="for the grid of one model; an unfinished one is continued"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    device = detect()
    on_cpu = device.type == "cpu"
    devices = options.devices or (2 if on_cpu else device.count)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models or (CPU_MODELS if on_cpu else GPU_MODELS):
        compare(name, device, devices, options)


def compare(name: str, device: Device, devices: int, options: argparse.Namespace) -> None:
    """Tunes one model, measures all sides, and prints and saves the table."""
    import redline as rl
    from redline.models import workload

    on_cpu = device.type == "cpu"
    batch = options.global_batch or (16 if on_cpu else None)
    load = workload(name, seq_len=options.seq_len, global_batch=batch)
    stem = f"parallel-{load.name}-{devices}x{_slug(device)}"
    best_of_grid = surface(load, devices, options, stem) if options.surface else None
    print(f"{load.name}: {options.trials} trials on {devices} x {device.name} ...", flush=True)
    result = rl.tune(load, devices=devices, trials=options.trials, runner=options.runner)
    if result.best is None:
        raise SystemExit(f"{load.name}: nothing feasible: {result.why}")
    rows = measure(load, device, devices, result, options)
    text = report(load, device, devices, result, rows, best_of_grid, options)
    print(text, flush=True)
    path = options.out / f"{stem}.md"
    path.write_text(text)
    print(f"wrote {path}\n", flush=True)


def measure(load: Any, device: Device, devices: int, result: Any, options: argparse.Namespace) -> list[Row]:
    """Measures every side `turns` times, in turns."""
    import cloudpickle
    from redline.results import Status
    from redline.runners.host.client import COMMON_IMPORTS, HostAgent
    from redline.runners.trial.job import Job, Rendezvous

    share = load.global_batch // devices
    usual = max(size for size in range(1, min(8, share) + 1) if share % size == 0)
    common = {"workload": load, "steps": options.steps, "precision": "fp32" if device.type == "cpu" else "bf16"}
    rows = [
        Row("DDP, micro-batch 1", sides.PlainDDP(micro_batch=1, **common)),
        Row(f"transformers.Trainer, DDP, micro-batch {usual}", sides.TransformersTrainer(micro_batch=usual, **common)),
        Row(f"FSDP2 as by accelerate, micro-batch {usual}", sides.FSDP2(micro_batch=usual, **common)),
    ]
    if result.default is not None:
        rows.append(Row("redline, default configuration", sides.Redline(config=result.default.config, **common)))
    rows += cut_layers(load, devices, result, usual * devices, common)
    rows.append(Row("redline, tuned", sides.Redline(config=result.best.config, **common)))
    threads = max(1, usable_cores() // devices) if device.type == "cpu" else None
    with tempfile.TemporaryDirectory() as folder:
        agent = HostAgent([*COMMON_IMPORTS, *load.imports, *sides.IMPORTS])
        try:
            for _ in range(options.turns):
                for row in (each for each in rows if not each.failed):
                    log = Path(folder, "log")
                    job = Job(
                        program=cloudpickle.dumps(row.program),
                        ranks=devices,
                        rendezvous=Rendezvous(world_size=devices),
                        device_type=device.type,
                        threads=threads,
                        timeout_s=600,
                        log=str(log),
                    )
                    outcome = agent.run(job)
                    if outcome.status is not Status.OK:
                        row.failed = f"{outcome.status}: {outcome.reason}"
                        print(f"{log.read_text()[-2000:]}\n{row.name}: {row.failed}", flush=True)
                        continue
                    row.step_ms.append(max(statistics.median(each.report) for each in outcome.ranks))
                    row.memory_mib = max(row.memory_mib, *(each.peak_memory_mib or 0 for each in outcome.ranks))
        finally:
            agent.close()
    return rows


def cut_layers(load: Any, devices: int, result: Any, micro_batch: int, common: dict[str, Any]) -> list[Row]:
    """Returns tensor parallelism over all devices, by DTensor and by redline; empty if the model has no plan."""
    from redline.space import Config

    if result.default is None or not getattr(load.build_model({}), "tp_plan", None):
        return []
    plain = dict(result.default.config, tp=devices, pp=1, dp=1, zero=0, sequence_parallel=False, checkpoint_ratio=0.0)
    plain.update(micro_batch=micro_batch, grad_accum=load.global_batch // micro_batch, precision=common["precision"])
    return [
        Row(
            f"tp={devices} by DTensor, micro-batch {micro_batch}",
            sides.TensorParallel(micro_batch=micro_batch, **common),
        ),
        Row(f"tp={devices} by redline, the same", sides.Redline(config=Config(plain), **common)),
    ]


def report(
    load: Any, device: Device, devices: int, result: Any, rows: list[Row], best_of_grid: float | None,
    options: argparse.Namespace,
) -> str:  # fmt: skip
    """Returns the table with its command, hardware and versions, in Markdown."""
    tuned = statistics.median(rows[-1].step_ms) if rows[-1].step_ms else float("nan")
    per_step = load.global_batch * (load.seq_len or 1)
    header = f"| {'side':<42} | step, ms (turns) | {load.unit} | peak, MiB a rank | MFU | tuned is faster by |"
    lines = [f"# {load.name} on {devices} x {device.name}", "", header, "|---|---|---|---|---|---|"]
    for row in rows:
        if not row.step_ms:
            lines.append(f"| {row.name:<42} | {row.failed} | | | | |")
            continue
        step = statistics.median(row.step_ms)
        turns = ", ".join(f"{each:.0f}" for each in row.step_ms)
        mfu = _mfu(load, device, devices, row.program, step)
        lines.append(
            f"| {row.name:<42} | {step:.1f} ({turns}) | {per_step / step * 1e3:,.0f} | {row.memory_mib:,.0f} | "
            f"{'' if mfu is None else f'{mfu:.1%}'} | {step / tuned:.2f}x |"
        )
    winner = ", ".join(f"{name}={value}" for name, value in result.best.config.items())
    statuses = ", ".join(f"{count} {status}" for status, count in result.to_dict()["trials"].items())
    lines += ["", f"Winner of {len(result.all_trials)} trials ({statuses}): {winner}."]
    if best_of_grid is not None:
        lines.append(
            f"The winner has {result.best.measurement.throughput / best_of_grid:.1%} of the grid's best throughput."
        )
    apart = max((max(row.step_ms) / min(row.step_ms) for row in rows if row.step_ms), default=1.0)
    if apart > BUSY:
        lines.append(
            f"\nTurns of one side differ by up to {apart:.1f} times: the machine had other load, so that "
            "smaller ratios are not significant."
        )
    where = host()
    lines += [
        "",
        f"Median of {options.turns} turns of {options.steps} steps; global batch {load.global_batch}"
        + (f", {load.seq_len} tokens a sample." if load.seq_len else "."),
        "",
        f"    {shlex.join(['python', *sys.argv])}",
        "",
        f"{where['system']}, {where['cores']} cores, {where['memory_mib']:,} MiB. "
        + ", ".join(f"{name} {version}" for name, version in _versions().items())
        + ".",
        "",
    ]
    return "\n".join(lines)


def surface(load: Any, devices: int, options: argparse.Namespace, stem: str) -> float | None:
    """Measures the whole grid and returns its best throughput."""
    table = options.out / f"{stem}.csv"
    command = [sys.executable, str(HERE / "record.py"), load.name, "--devices", str(devices), "--out", str(table)]
    command += ["--global-batch", str(load.global_batch), "--time", options.surface_time]
    if load.seq_len:
        command += ["--seq-len", str(load.seq_len)]
    subprocess.run(command, check=True)
    return read_surface(table).best


def _mfu(load: Any, device: Device, devices: int, program: sides.Side, step_ms: float) -> float | None:
    hardware = table_entry(device)
    if hardware is None or flops_of(load).per_sample is None:
        return None
    precision = program.config["precision"] if isinstance(program, sides.Redline) else program.precision
    return flops_of(load).per_sample * load.global_batch / (step_ms * 1e-3) / (devices * hardware.rate(str(precision)))


def _versions() -> dict[str, str]:
    from importlib import metadata

    return {**versions(), "accelerate": metadata.version("accelerate")}


def _slug(device: Device) -> str:
    return "cpu" if device.type == "cpu" else re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")


if __name__ == "__main__":
    main()
