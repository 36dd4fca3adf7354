"""Measures every configuration of a space into a table: `python bench/record.py MODEL --out bench/surfaces/NAME.csv`.

The table is the input of `bench/tables/recorded.py` and `bench/search.py`: one row for each configuration, its knobs,
`status` (`ok`, `oom`, `crash`, `timeout`, `wrong`) with `reason`, `tokens_per_second` (`samples_per_second` for
images), `step_ms` and its spread, `peak_memory_gib`, and `seconds_total`, the cost of the trial. A knob that does not
apply to a configuration (`zero` on one replica) has its default. `--passes N` measures successful configurations N
times, spread over the recording, and keeps the fastest (`measured` counts them): other load on the machine only adds
time. A YAML beside the table has the facts: the shape of the model, the training, the hardware, the versions, and the
command.

Configurations are measured in an order drawn from `--seed`, so that an unfinished table is a fair sample. A call that
is ended (or whose `--time` is up) loses at most one row: the same command continues it.
"""

import argparse
import contextlib
import csv
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from redline.base.device import usable_cores
from redline.base.errors import RedlineError, UsageError
from redline.cli.options import fixes_of, values_of
from redline.estimator.measuring import measure
from redline.models import flops_of
from redline.models.request import TrainingRequest
from redline.results.environment import versions
from redline.runners import LocalRunner, Reference, Runner, TimingPlan, TrialRequest, TrialTerms
from redline.space import Config, Space
from redline.tuner.budget import Stopwatch, parse_duration, parse_memory
from redline.tuner.request.target import Task, resolve_task

MEASURED = ("status", "reason", "step_ms", "step_ms_spread", "peak_memory_gib", "seconds_total", "measured")
# Names of the numbers of a shape in a transformers configuration, by the column of the facts.
SHAPE = {
    "num_layers": ("num_hidden_layers", "num_layers", "n_layer"),
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "num_attention_heads": ("num_attention_heads", "num_heads", "n_head"),
    "num_key_value_heads": ("num_key_value_heads", "num_attention_heads", "num_heads", "n_head"),
    "intermediate_size": ("intermediate_size", "d_ff", "n_inner"),
    "vocab_size": ("vocab_size",),
    "tie_word_embeddings": ("tie_word_embeddings",),
}


def knobs_of(space: Space, config: Config) -> dict[str, Any]:
    """Returns a value for every knob of the space; the default of one that does not apply."""
    return {knob.name: config.get(knob.name, knob.default) for knob in space.knobs}


def facts_of(task: Task, terms: TrialTerms, arguments: list[str]) -> dict[str, Any]:
    """Returns the contents of the YAML beside the table."""
    workload = task.workload
    assert workload is not None
    model: dict[str, Any] = {"name": workload.name}
    configuration = getattr(workload.model, "configuration", None)
    if configuration is not None:
        found = configuration()
        model["family"] = found.model_type
        for word, names in SHAPE.items():
            values = [getattr(found, name, None) for name in names]
            value = next((each for each in values if each is not None), None)
            if word == "intermediate_size" and value is None:
                value = 4 * model["hidden_size"]
            if value is not None:
                model[word] = value
    model["seq_len"] = workload.seq_len
    knobs = task.space.by_name
    precision = knobs["precision"].values if "precision" in knobs else ()
    hardware: dict[str, Any] = {
        "device": "cpu" if terms.device.type == "cpu" else terms.device.name,
        "name": terms.device.name,
        "gpus": terms.devices,
        "gpus_per_node": terms.devices,
        "threads_per_rank": terms.threads,
        "memory_limit_mib": terms.memory_limit_mib,
    }
    return {
        "source": "redline's own, measured by bench/record.py",
        "recorded": date.today().isoformat(),
        "command": shlex.join(["python", "bench/record.py", *arguments]),
        "versions": versions(),
        "objective": "tokens_per_second" if workload.seq_len else "samples_per_second",
        "model": model,
        "training": {
            "precision": precision[0] if len(precision) == 1 else "knob",
            "optimizer": "adamw",
            "master_weights": "as the precision says: fp32 but for bf16_pure",
            "global_batch_sequences": workload.global_batch,
            "checkpointing": "knob" if "checkpoint_ratio" in knobs else "none",
            "seed": terms.seed,
        },
        "hardware": {key: value for key, value in hardware.items() if value is not None},
    }


def numbers_of(terms: TrialTerms) -> dict[str, Any] | None:
    """Returns the machine as hardware of the estimator if it is not in its table: the measured share of a rank."""
    if terms.device.type != "cpu":
        return None
    found = measure(short=True).to_hardware()
    share = min(1.0, usable_cores() / terms.devices)
    data = asdict(found) | {
        "tflops": {name: round(rate * share, 5) for name, rate in found.tflops.items()},
        "memory_gb_per_s": round(found.memory_gb_per_s * share, 3),
        "sources": dict(found.sources),
    }
    if terms.memory_limit_mib is not None:
        data["memory_gib"] = terms.memory_limit_mib / 1024
    return data


class Table:
    """The CSV: read if it exists, and replaced as a whole after every row, so that it is never incomplete."""

    def __init__(self, path: Path, space: Space, objective: str) -> None:
        self.path = path
        self.space = space
        self.columns = [*(knob.name for knob in space.knobs), "status", "reason", objective, *MEASURED[2:]]
        self.objective = objective
        self.order = {self.key(config): at for at, config in enumerate(space)}
        self.rows: dict[tuple[str, ...], dict[str, str]] = {}
        if path.is_file():
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                if reader.fieldnames != self.columns:
                    raise UsageError(
                        f"'{path}' has the columns {reader.fieldnames}, but this space's table has {self.columns}; "
                        "give the command that started it, or another --out"
                    )
                for row in reader:
                    self.rows[tuple(row[knob.name] for knob in space.knobs)] = row
        if unknown_keys := [key for key in self.rows if key not in self.order]:
            raise UsageError(f"'{path}' has a row that is not in this space: {unknown_keys[0]}; give another --out")

    def key(self, config: Config) -> tuple[str, ...]:
        return tuple(str(value) for value in knobs_of(self.space, config).values())

    def done(self, config: Config, passes: int) -> bool:
        """Returns True if it was measured so often; a failed configuration does not run again."""
        row = self.rows.get(self.key(config))
        return row is not None and (row["status"] != "ok" or int(row["measured"]) >= passes)

    def add(self, config: Config, measurement: Any) -> None:
        """Adds a row and writes the table."""
        peak = measurement.peak_memory_mib
        values = {
            "status": str(measurement.status),
            "reason": measurement.reason,
            "step_ms": _text(measurement.step_ms, 2),
            "step_ms_spread": _text(measurement.step_ms_spread, 2),
            "peak_memory_gib": _text(None if peak is None else peak / 1024, 5),
            "seconds_total": _text(measurement.seconds_total, 2),
            self.objective: _text(getattr(measurement, self.objective), 1),
        }
        key = self.key(config)
        before = self.rows.get(key)
        values["measured"] = str(1 + (0 if before is None else int(before["measured"])))
        if before is not None and measurement.ok and float(before["step_ms"]) <= measurement.step_ms:
            values = {**before, "measured": values["measured"]}
        self.rows[key] = {**dict(zip(self.columns, key)), **values}
        partial = self.path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows[each] for each in sorted(self.rows, key=self.order.__getitem__))
        os.replace(partial, self.path)


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def record(table: Table, runner: Runner, left: list[Config], reference: Reference | None, watch: Stopwatch) -> int:
    """Measures configurations until none is left or the time is up; returns how many were measured."""
    failed: set[Config] = set()
    for done, config in enumerate(left):
        if watch.left <= 0:
            return done
        if config in failed:
            continue
        measurement = runner.run(TrialRequest(config=config, number=done, reference=reference))
        table.add(config, measurement)
        if not measurement.ok:
            failed.add(config)
        outcome = _text(getattr(measurement, table.objective), 0) or measurement.reason[:60]
        print(f"{len(table.rows):5d}  {measurement.status:<8}{outcome:<62}{config}", flush=True)
    return len(left)


def reference_of(runner: Runner, space: Space) -> Reference | None:
    """Returns the reference of all trials: the default configuration, at the largest micro-batch that fits."""
    default = space.default()
    fixed = {name: default[name] for name in default if name not in ("micro_batch", "grad_accum")}
    alike = [config for config in space if all(config.get(name) == value for name, value in fixed.items())]
    alike = [each for each in alike if each.get("micro_batch", 0) <= default.get("micro_batch", 0)]
    for config in sorted(alike, key=lambda each: -each.get("micro_batch", 0)):
        measurement = runner.run(TrialRequest(config=config, number=0))
        if measurement.ok and measurement.probe is not None:
            return Reference(probe=measurement.probe, config_id=config.id)
    print("no reference: the default configuration does not run, so nothing is compared")
    return None


@contextlib.contextmanager
def made(task: Task, options: argparse.Namespace) -> Iterator[tuple[TrialTerms, Runner]]:
    """Returns the terms of every trial, and the started runner."""
    limit = parse_memory(options.memory_limit)
    threads = options.threads or max(1, usable_cores() // task.devices)
    terms = TrialTerms(
        device=task.device,
        devices=task.devices,
        memory_limit_mib=limit,
        timeout_s=parse_duration(options.trial_timeout, "trial timeout"),
        threads=threads if task.device.type == "cpu" else None,
        plan=TimingPlan(
            warmup_min_steps=1,
            warmup_max_steps=4,
            steady_within=0.1,
            seconds=parse_duration(options.measure_time, "measure time"),
        ),
        seed=options.seed,
    )
    assert task.workload is not None
    flops_of(task.workload).per_sample  # counted once, here
    with LocalRunner(task.workload, terms) as runner:
        runner.wait_ready()
        yield terms, runner


def write_facts(path: Path, facts: dict[str, Any], terms: TrialTerms, refresh: bool) -> None:
    """Writes the YAML beside the table if there is none or if `anew`; it measures the machine.

    Raises:
        UsageError: there is one, with rows measured on other terms.
    """
    import yaml

    if path.is_file():
        before = yaml.safe_load(path.read_text())
        for part in ("model", "training", "hardware"):
            earlier, now = ({k: v for k, v in each.get(part, {}).items() if k != "numbers"} for each in (before, facts))
            if earlier != now:
                raise UsageError(
                    f"the rows so far were measured with {part} {earlier}, but now it is {now}; "
                    f"give the command in '{path}', or another --out"
                )
        if not refresh:
            return
        facts = facts | {key: before[key] for key in ("recorded", "command", "versions") if key in before}
    if (numbers := numbers_of(terms)) is not None:
        facts["hardware"]["numbers"] = numbers
    path.write_text(yaml.safe_dump({"name": path.stem, **facts}, sort_keys=False, width=110))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a preset, or FILE.py:NAME")
    parser.add_argument("--out", type=Path, required=True, help="the table, a CSV")
    parser.add_argument("--devices", type=int, default=1, help="ranks of a trial")
    parser.add_argument("--threads", type=int, help="CPU threads of a rank (default: the cores, shared)")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--global-batch", type=int)
    parser.add_argument("--memory-limit", help="of a rank, as in 300MiB")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KNOB=A,B")
    parser.add_argument("--fix", dest="fixed", action="append", default=[], metavar="KNOB=V")
    parser.add_argument("--measure-time", default="1s", help="of each configuration (never fewer than 3 steps)")
    parser.add_argument("--trial-timeout", default="60s")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data, and the order")
    parser.add_argument("--passes", type=int, default=1, help="measurements of each successful configuration")
    parser.add_argument("--time", help="stop after this time, for example 6m; the same command continues")
    parser.add_argument(
        "--facts", action="store_true", help="only write the YAML again, with new measurements of the machine"
    )
    parser.add_argument("--count", action="store_true", help="print the number of configurations, and stop")
    options = parser.parse_args(arguments)
    watch = Stopwatch(parse_duration(options.time))
    task = resolve_task(
        TrainingRequest(
            options.model,
            devices=options.devices,
            seq_len=options.seq_len,
            global_batch=options.global_batch,
            override=values_of(tuple(options.overrides), "--set"),
            fix=fixes_of(tuple(options.fixed)),
        )
    )
    points = list(task.space)
    objective = "tokens_per_second" if task.workload.seq_len else "samples_per_second"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    table = Table(options.out, task.space, objective)
    points = [points[at] for at in np.random.default_rng(options.seed).permutation(len(points))]
    left = [config for number in range(1, options.passes + 1) for config in points if not table.done(config, number)]
    print(f"{len(points)} configurations, {len(table.rows)} of them recorded; {len(left)} measurements left")
    if options.count or not (left or options.facts):
        return
    at = arguments.index("--time") if "--time" in arguments else len(arguments)
    asked = arguments[:at] + arguments[at + 2 :]
    with made(task, options) as (terms, runner):
        write_facts(options.out.with_suffix(".yaml"), facts_of(task, terms, asked), terms, refresh=options.facts)
        if options.facts:
            return
        record(table, runner, left, reference_of(runner, task.space), watch)
    print(f"{len(table.rows)} of {len(points)} configurations are in {options.out}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RedlineError as error:
        raise SystemExit(f"record: {error}") from None
