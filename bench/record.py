"""Measures every configuration of a space into a table: `python bench/record.py MODEL --out bench/surfaces/NAME.csv`.

The table is the input of `bench/tables/recorded.py` and `bench/search.py`: one row for each configuration, its knobs,
`status` (`ok`, `oom`, `crash`, `timeout`, `wrong`) with `reason`, `tokens_per_second` (`samples_per_second` for
images), `step_ms` and its spread, `peak_memory_gib`, and `seconds_total`, the cost of the trial. A knob that does not
apply to a configuration (`zero` on one replica) has its default. A YAML beside the table has the facts: the shape of
the model, the training, the hardware, the versions, and the command.

Configurations are measured in an order drawn from `--seed`, so that an unfinished table is a fair sample. A call that
is ended (or whose `--time` is up) loses at most one row: the same command continues it.
"""

import argparse
import csv
import os
import shlex
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from common import parser
from redline.base.device import usable_cores
from redline.base.errors import RedlineError, UsageError
from redline.cli.options import fixes_of, values_of
from redline.estimator.measuring import measure
from redline.models import flops_of
from redline.models.request import TrainingRequest
from redline.results import Measurement
from redline.results.environment import versions
from redline.results.probe import Probe
from redline.runners import LocalRunner, Runner, TimingPlan, TrialRequest, TrialTerms
from redline.space import Config, Space
from redline.tuner.budget import Stopwatch, parse_duration, parse_memory
from redline.tuner.request.target import Task, resolve_task

MEASURED = ("status", "reason", "step_ms", "step_ms_spread", "peak_memory_gib", "seconds_total")
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
    found = measure().to_hardware()
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

    def has(self, config: Config) -> bool:
        return self.key(config) in self.rows

    def add(self, config: Config, measurement: Measurement) -> None:
        """Adds a row and writes the table."""
        peak = measurement.peak_memory_mib
        self.rows[self.key(config)] = {
            **dict(zip(self.columns, self.key(config))),
            "status": str(measurement.status),
            "reason": measurement.reason,
            "step_ms": _text(measurement.step_ms, 2),
            "step_ms_spread": _text(measurement.step_ms_spread, 2),
            "peak_memory_gib": _text(None if peak is None else peak / 1024, 5),
            "seconds_total": _text(measurement.seconds_total, 2),
            self.objective: _text(getattr(measurement, self.objective), 1),
        }
        partial = self.path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows[key] for key in sorted(self.rows, key=self.order.__getitem__))
        os.replace(partial, self.path)


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def reference_of(runner: Runner, space: Space) -> Probe | None:
    """Returns the reference of all trials: the default configuration, at the largest micro-batch that fits."""
    default = space.default()
    fixed = {name: default[name] for name in default if name not in ("micro_batch", "grad_accum")}
    alike = [config for config in space if all(config.get(name) == value for name, value in fixed.items())]
    alike = [each for each in alike if each.get("micro_batch", 0) <= default.get("micro_batch", 0)]
    for config in sorted(alike, key=lambda each: -each.get("micro_batch", 0)):
        measurement = runner.run(TrialRequest(config=config, number=0))
        if measurement.ok and measurement.probe is not None:
            return measurement.probe
    print("no reference: the default configuration does not run, so nothing is compared")
    return None


def terms_of(task: Task, arguments: argparse.Namespace) -> TrialTerms:
    """Returns the terms of every trial."""
    threads = arguments.threads or max(1, usable_cores() // task.devices)
    return TrialTerms(
        device=task.device,
        devices=task.devices,
        memory_limit_mib=parse_memory(arguments.memory_limit),
        timeout_s=parse_duration(arguments.trial_timeout, "trial timeout"),
        threads=threads if task.device.type == "cpu" else None,
        plan=TimingPlan(
            warmup_min_steps=1,
            warmup_max_steps=4,
            steady_within=0.1,
            seconds=parse_duration(arguments.measure_time, "measure time"),
        ),
        seed=arguments.seed,
    )


def write_facts(path: Path, facts: dict[str, Any], terms: TrialTerms) -> None:
    """Measures the machine and writes the YAML beside the table, if there is none.

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
        return
    if (numbers := numbers_of(terms)) is not None:
        facts["hardware"]["numbers"] = numbers
    path.write_text(yaml.safe_dump({"name": path.stem, **facts}, sort_keys=False, width=110))


def main(words: list[str]) -> None:
    options = parser(__doc__)
    options.add_argument("model", help="a preset, or FILE.py:NAME")
    options.add_argument("--out", type=Path, required=True, help="the table, a CSV")
    options.add_argument("--devices", type=int, default=1, help="ranks of a trial")
    options.add_argument("--threads", type=int, help="CPU threads of a rank (default: the cores, shared)")
    options.add_argument("--seq-len", type=int)
    options.add_argument("--global-batch", type=int)
    options.add_argument("--memory-limit", help="of a rank, as in 300MiB")
    options.add_argument("--set", dest="overrides", action="append", default=[], metavar="KNOB=A,B")
    options.add_argument("--fix", dest="fixed", action="append", default=[], metavar="KNOB=V")
    options.add_argument("--measure-time", default="1s", help="of each configuration (never fewer than 3 steps)")
    options.add_argument("--trial-timeout", default="60s")
    options.add_argument("--seed", type=int, default=0, help="of weights, data, and the order")
    options.add_argument("--time", help="stop after this time, for example 6m; the same command continues")
    arguments = options.parse_args(words)
    watch = Stopwatch(parse_duration(arguments.time))
    task = resolve_task(
        TrainingRequest(
            arguments.model,
            devices=arguments.devices,
            seq_len=arguments.seq_len,
            global_batch=arguments.global_batch,
            override=values_of(tuple(arguments.overrides), "--set"),
            fix=fixes_of(tuple(arguments.fixed)),
        )
    )
    configs = list(task.space)
    objective = "tokens_per_second" if task.workload.seq_len else "samples_per_second"
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    table = Table(arguments.out, task.space, objective)
    order = np.random.default_rng(arguments.seed).permutation(len(configs))
    left = [configs[index] for index in order if not table.has(configs[index])]
    print(f"{len(configs)} configurations, {len(table.rows)} of them recorded")
    if not left:
        return
    at = words.index("--time") if "--time" in words else len(words)
    terms = terms_of(task, arguments)
    flops_of(task.workload).per_sample  # counted once, here
    with LocalRunner(task.workload, terms) as runner:
        runner.wait_ready()
        write_facts(arguments.out.with_suffix(".yaml"), facts_of(task, terms, [*words[:at], *words[at + 2 :]]), terms)
        reference = reference_of(runner, task.space)
        for number, config in enumerate(left):
            if watch.left <= 0:
                break
            measurement = runner.run(TrialRequest(config=config, number=number, reference=reference))
            table.add(config, measurement)
            outcome = _text(getattr(measurement, objective), 0) or measurement.reason[:60]
            print(f"{len(table.rows):5d}  {measurement.status:<8}{outcome:<62}{config}", flush=True)
    print(f"{len(table.rows)} of {len(configs)} configurations are in {arguments.out}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RedlineError as error:
        raise SystemExit(f"record: {error}") from None
