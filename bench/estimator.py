"""Accuracy of the estimator against measured clusters, and its speed.

    python bench/estimator.py --surfaces DIR [--calibrate K] [--seeds N] [--only NAME] [--conventions]
    python bench/estimator.py --tables DIR [--source NAME] [--rows] [--conventions]
    python bench/estimator.py --tables DIR [--surfaces DIR] --leave-out
    python bench/estimator.py --tables DIR [--source NAME] --check [--most N]
    python bench/estimator.py --surfaces DIR --scaling [--calibrate K] [--seeds N]
    python bench/estimator.py --speed [--preset NAME]

DIR contains tables of measured configurations, a CSV each (`tp, pp, dp, zero, micro_batch, grad_accum, gpus,
global_batch, status, tokens_per_second, step_ms, peak_memory_gib`), and for each a YAML with the shape of the model,
the training setup and the hardware. Nothing else is read: values that the YAML lacks are inferred from the framework
it names, by the rules of `tables/surfaces.py`, and printed with `--conventions`.

--tables DIR is a folder of public tables as published, with a folder for each source: each file is read by its form
(`bench/tables/`), and one line is printed for each source, over all its models and devices, and another for its rows with
expert parallelism.

Columns: median and mean absolute percentage error and bias (median of predicted / measured - 1) of step time and of
peak memory, Spearman's rank correlation of throughput with the order of preference (the predicted throughput less the
risk of stalls and retries), area under the ROC curve of fits against failures (trials
without a number, including crashes), and the share of measurements inside the 80 % intervals. With `--calibrate K`
also after K random measurements of the table, mean over seeds, on the other measurements.

`--leave-out` fits the few free constants anew to all sources of --tables and --surfaces (one source for each trainer)
except one, and states the error on that source, beside that of the package's constants and of those fitted to all.

`--check` asks `redline check` about the recipes of --tables, N of each source: each as its framework's file would state
it, its model traced. It prints the share called unfit among runs that ran, and called fit among those that failed.

`--scaling` corrects the estimate of each model by K runs (16 by default) on the fewest devices of its tables, and predicts the
tables of more devices: efficiency of the fastest run relative to that of the fewest devices, and the errors of all runs.

`--speed` measures the time of `Estimator.table` on 100,000 configurations of a space for 512 devices, and of the first
answer for a preset in a new process with an empty cache, including imports and tracing.
"""

import argparse
import itertools
import math
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from redline.base.errors import RedlineError, UsageError
from redline.estimator import Estimator, TrainingSetup
from redline.estimator.estimate import Z80
from redline.results import Measurement, Status, Trial
from tables import checking, read_tables, refitting, scaling
from tables.judging import auc, judge
from tables.surfaces import Measured, load


def evaluate(surface: Measured, estimator: Estimator, without: np.ndarray | None = None) -> dict[str, float]:
    """Returns the columns of the report for one table, without the rows in `without`."""
    keep = np.ones(len(surface.table), bool)
    if without is not None:
        keep[without] = False
    made = estimator.table(surface.configs)
    ok = surface.ok & keep & np.isfinite(made.step_ms)
    out: dict[str, float] = {"rows": float(ok.sum())}
    ratio = made.step_ms[ok] / surface.step_ms[ok]
    out |= _errors("time", ratio, made.log_throughput_std[ok])
    measured_ms = surface.step_ms[ok]
    out["time_cover"] = float(np.mean((made.step_ms_low[ok] <= measured_ms) & (measured_ms <= made.step_ms_high[ok])))
    out["spearman"] = _spearman(made.preference[ok], surface.table["throughput"].to_numpy()[ok])
    if "peak_memory_gib" in surface.table:
        measured = surface.table["peak_memory_gib"].to_numpy(float) * 1024
        known = ok & np.isfinite(measured)
        # These runs succeeded, so they stayed below the limit.
        peak = np.minimum(made.peak_memory_mib, made.memory_limit_mib)
        out |= _errors("memory", peak[known] / measured[known], made.log_memory_std[known])
    failed = ~surface.ok & keep
    if failed.any() and ok.any():
        out["auc"] = auc(-made.probability_fits[ok], -made.probability_fits[failed])
        out["auc_runs"] = auc(-made.probability_runs[ok], -made.probability_runs[failed])
    return out


def _errors(name: str, ratio: np.ndarray, std: np.ndarray) -> dict[str, float]:
    if not len(ratio):
        return {}
    return {
        f"{name}_median": float(np.median(np.abs(ratio - 1))),
        f"{name}_mean": float(np.mean(np.abs(ratio - 1))),
        f"{name}_bias": float(np.median(ratio) - 1),
        f"{name}_cover": float(np.mean(np.abs(np.log(ratio)) <= Z80 * std)),
    }


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
    if len(a) < 3:
        return math.nan
    return float(np.corrcoef(pd.Series(a).rank(), pd.Series(b).rank())[0, 1])


def calibrated(surface: Measured, count: int, seed: int) -> dict[str, float]:
    """Returns the columns as `evaluate` does, after calibration with `count` random successes, which are left out."""
    chosen = np.random.default_rng(seed).permutation(np.flatnonzero(surface.ok))[:count]
    rows = surface.configs.to_dict("records")
    trials = []
    for number, at in enumerate(chosen):
        row = surface.table.iloc[at]
        memory = row.get("peak_memory_gib")
        measurement = Measurement(
            status=Status.OK,
            step_ms=float(row["step_ms"]),
            peak_memory_mib=None if memory is None or math.isnan(memory) else float(memory) * 1024,
        )
        trials.append(Trial(number=number, config=rows[at], measurement=measurement))
    return evaluate(surface, surface.estimator.calibrate(trials), chosen)


COLUMNS = (
    "rows", "memory_median", "memory_mean", "memory_bias", "memory_cover", "auc", "auc_runs",
    "time_median", "time_mean", "time_bias", "time_cover", "spearman",
)  # fmt: skip


PUBLIC = (
    "rows", "left", "time_rows", "time_median", "time_mean", "time_bias", "time_cover", "tau", "memory_rows",
    "memory_median", "memory_mean", "memory_bias", "memory_cover", "unfit", "failed", "auc",
)  # fmt: skip


def show(title: str, rows: Mapping[str, Mapping[str, float]], columns: Sequence[str] = COLUMNS) -> None:
    print(f"\n{title}")
    print(f"{'table':34}" + "".join(f"{name.replace('memory', 'mem'):>12}" for name in columns))
    for name, row in rows.items():
        cells = []
        for column in columns:
            value = row.get(column, math.nan)
            if math.isnan(value):
                cells.append("-")
            elif column in ("rows", "left", "time_rows", "memory_rows", "failed", "ran"):
                cells.append(f"{value:.0f}")
            elif column == "seconds":
                cells.append(f"{value:.2f} s")
            elif column in ("auc", "auc_runs", "spearman", "tau"):
                cells.append(f"{value:.3f}")
            else:
                cells.append(f"{100 * value:.1f} %")
        print(f"{name:34}" + "".join(f"{cell:>12}" for cell in cells))


def means(rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each column over the tables that have it."""
    out = {}
    for column in COLUMNS:
        values = [row[column] for row in rows.values() if not math.isnan(row.get(column, math.nan))]
        if values:
            out[column] = float(np.mean(values))
    return out


def pooled_auc(surfaces: list[Measured]) -> dict[str, dict[str, float]]:
    """Returns the areas under the curve over all tables of a model together, and a number of failures.

    The areas are those by memory alone, by memory alone without failures for other reasons than memory (see
    `outlived`), and with stalls; the number is that of these failures.
    """
    pools: dict[str, list[Measured]] = {}
    for surface in surfaces:
        if not surface.ok.all():
            pools.setdefault(re.sub(r"-\d+gpu.*$", "", surface.name), []).append(surface)
    out: dict[str, dict[str, float]] = {}
    for model, pool in pools.items():
        ok = np.concatenate([each.ok for each in pool])
        if not ok.any():
            continue
        tables = [each.estimator.table(each.configs) for each in pool]
        fits, runs = (
            -np.concatenate([getattr(table, name) for table in tables])
            for name in ("probability_fits", "probability_runs")
        )
        no_memory = outlived(pd.concat([each.configs for each in pool], ignore_index=True), ok)
        out[model] = {
            "fits": auc(fits[ok], fits[~ok]),
            "fits, cleared": auc(fits[ok], fits[~ok & ~no_memory]),
            "runs": auc(runs[ok], runs[~ok]),
            "failed": float((~ok).sum()),
            "outlived": float(no_memory.sum()),
        }
    return out


def outlived(configs: pd.DataFrame, ok: np.ndarray) -> np.ndarray:
    """Returns the failures that cannot be a lack of memory, as booleans, shape (n,).

    Another run of the same model on the same device succeeded that needs at least as much memory: with the same tp,
    pp, ZeRO stage and other settings, at least the micro-batch, at least as many micro-batches in flight, and states
    sharded over at most as many replicas. This does not depend on predictions.
    """
    tables = configs.reset_index(drop=True)
    same = [name for name in tables if name not in ("dp", "micro_batch", "grad_accum")]

    def numbers(name: str, missing: int) -> np.ndarray:
        return pd.to_numeric(tables.get(name, pd.Series(missing, tables.index))).fillna(missing).to_numpy()

    micro = numbers("micro_batch", 1)
    sharing = np.where(numbers("zero", 0) >= 1, numbers("dp", 1), 1)
    flying = np.minimum(numbers("grad_accum", 1), numbers("pp", 1))
    out = np.zeros(len(tables), bool)
    groups = tables.groupby(same, dropna=False).indices.values() if same else [np.arange(len(tables))]
    for at in groups:
        alive, dead = at[ok[at]], at[~ok[at]]
        more = (
            (micro[alive] >= micro[dead, None])
            & (flying[alive] >= flying[dead, None])
            & (sharing[alive] <= sharing[dead, None])
        )
        out[dead] = more.any(axis=1)
    return out


def many_configs(count: int, devices: int, global_batch: int) -> list[dict[str, Any]]:
    """Returns `count` different valid configurations for a number of devices."""
    axes = {
        "attention": ("sdpa", "eager", "flash_attention_2"),
        "fusion": (False, True),
        "kernels": (False, True),
        "sequence_parallel": (False, True),
        "zero": (0, 1, 2, 3),
        "checkpoint_ratio": tuple(step / 8 for step in range(9)),
        "micro_batch": (1, 2, 4, 8, 16, 32),
        "tp": (1, 2, 4, 8, 16),
        "pp": (1, 2, 4, 8, 16, 32),
    }
    valid = (
        config
        for values in itertools.product(*axes.values())
        if (config := dict(zip(axes, values, strict=True)))["tp"] * config["pp"] <= devices
        and global_batch % (config["micro_batch"] * (devices // (config["tp"] * config["pp"]))) == 0
    )
    found = list(valid)
    random.Random(0).shuffle(found)
    return found[:count]


def speed(preset: str) -> None:
    configs = many_configs(100_000, devices=512, global_batch=4096)
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "intermediate": 11008, "vocabulary": 32000}
    setup = TrainingSetup(devices=512, seq_len=4096, global_batch=4096)
    times, used = [], []
    for _ in range(5):
        estimator = Estimator(shape, "h100-80gb", setup)
        start, busy = time.perf_counter(), time.process_time()
        table = estimator.table(configs)
        times.append(time.perf_counter() - start)
        used.append(time.process_time() - busy)
    good = int(np.isfinite(table.step_ms).sum())
    print(f"table of {len(configs)} configurations for 512 devices ({good} predicted):")
    print(f"  median of {len(times)}: {np.median(times):.2f} s, {np.median(used):.2f} s of them on a core")
    code = (
        "from redline.estimator import Estimator, TrainingSetup\n"
        "setup = TrainingSetup(devices=64, seq_len=2048, global_batch=512)\n"
        f"made = Estimator({preset!r}, 'h100-80gb', setup)\n"
        "print(round(made({'tp': 8, 'micro_batch': 2}).throughput), 'tokens/s')\n"
    )
    with tempfile.TemporaryDirectory() as empty:
        start = time.perf_counter()
        # An empty cache.
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "XDG_CACHE_HOME": empty},
            check=True,
            capture_output=True,
        )
        took = time.perf_counter() - start
    # CPU time; the rest is waiting for a core on a busy machine.
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"first answer for {preset} in a new process: {took:.1f} s, "
        f"{usage.ru_utime + usage.ru_stime:.1f} s of them on a core ({done.stdout.decode().strip()})"
    )


def scaled(surfaces: list[Measured], options: argparse.Namespace) -> None:
    """Prints the predicted and the measured efficiency of each model by number of devices."""
    count = options.calibrate or 16
    print(f"\nafter {count} runs on the fewest devices, mean of {options.seeds} seeds")
    print(
        f"{'model':24}{'devices':>8}{'efficiency':>12}{'predicted':>11}{'80 %':>16}{'time median':>13}{'bias':>9}{'cover':>8}"
    )
    off = []
    for each in scaling.points(surfaces, count, options.seeds):
        off.append(abs(each.predicted - each.measured))
        print(
            f"{each.model:24}{each.devices:>8}{100 * each.measured:>11.0f}%{100 * each.predicted:>10.0f}%"
            f"{f'{100 * each.low:.0f} to {100 * each.high:.0f}%':>16}{100 * each.median:>12.1f}%{100 * each.bias:>8.1f}%"
            f"{100 * each.cover:>7.0f}%"
        )
    if off:
        print(f"mean difference of efficiency {100 * np.mean(off):.1f} points, largest {100 * np.max(off):.1f}")


def leave_out(options: argparse.Namespace) -> None:
    """Prints each source's error of time by constants that it had no part in."""
    sources = read_tables(options.tables, options.source)
    if options.surfaces is not None:
        sources += refitting.by_trainer(options.surfaces)
    found, whole = refitting.leave_out(sources)
    titles = "".join(f"{title:>10}" for title in ("package", "fitted", "held out", "bias", "covered"))
    print(f"\n{'source or device':34}{'rows':>8}{titles}   largest change of a constant, held out")
    for each in found:
        name, scale = max(each.scales.items(), key=lambda item: abs(math.log(item[1] / whole[item[0]])))
        shares = "".join(
            f"{100 * value:8.1f} %" for value in (each.plain, each.together, each.out, each.bias, each.cover)
        )
        print(f"{each.name:34}{each.rows:>8}{shares}   {name} x {scale:.3f} (fitted to all: x {whole[name]:.3f})")
    print("fitted to all, against the package's:", ", ".join(f"{name} x {scale:.3f}" for name, scale in whole.items()))


def checked(options: argparse.Namespace) -> None:
    """Prints what `redline check` says of each source's recipes."""
    columns = (
        "ran",
        "failed",
        "unfit",
        "called fit",
        "time_median",
        "time_bias",
        "memory_median",
        "memory_bias",
        "seconds",
    )
    out = {}
    for source in read_tables(options.tables, options.source):
        found = list(checking.verdicts(source, options.most))
        verdicts = [each for each in found if isinstance(each, checking.Verdict)]
        out[source.name] = checking.summary(verdicts)
        for each in found if options.rows else ():
            if isinstance(each, str):
                print(f"not asked: {each}")
            elif each.found.fits == each.run.failed:
                peak, limit = each.found.estimate.peak_memory_mib / 1024, each.found.estimate.memory_limit_mib / 1024
                print(
                    f"{each.run.where}: {'failed' if each.run.failed else 'ran'}, {peak:.1f} of {limit:.1f} GiB predicted"
                )
    show(f"redline check, at most {options.most} recipes of a source", out, columns)


def reasons(left: Sequence[str]) -> list[str]:
    """Returns a line for each reason why rows are left out, with number and places: `3 rows, adapters: a.csv:2-3; b.csv:7`."""
    places: dict[str, dict[str, list[int]]] = {}
    for text in left:
        where, _, reason = text.partition(": ")
        file, _, line = where.rpartition(":")
        numbered = (file, int(line)) if file and line.isdigit() else (where, 0)
        places.setdefault(reason, {}).setdefault(numbered[0], []).append(numbered[1])
    lines = []
    for reason, files in places.items():
        spans = []
        for file, numbers in files.items():
            runs: list[list[int]] = []
            for number in sorted(numbers):
                if runs and number == runs[-1][1] + 1:
                    runs[-1][1] = number
                else:
                    runs.append([number, number])
            text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
            spans.append(f"{file}:{text}" if numbers != [0] else file)
        count = sum(map(len, files.values()))
        lines.append(f"{count} row{'s' * (count > 1)}, {reason}: {'; '.join(spans)}")
    return lines


def public(options: argparse.Namespace) -> None:
    """Prints a line for each source of a folder of public tables."""
    try:
        sources = read_tables(options.tables, options.source)
    except UsageError as error:
        sys.exit(f"bench/estimator.py: error: {error}")
    out: dict[str, Any] = {}
    after: dict[str, Any] = {}
    for source in sources:
        judged = judge(source)
        out[source.name], after[source.name] = judged.errors(), judged.calibrated(options.calibrate or 5, options.seeds)
        spread = np.array([config.get("ep", 1) > 1 for config in judged.configs], bool)
        if spread.any():
            out[f"{source.name}, ep > 1"] = judged.errors(keep=spread)
        left = reasons([*source.left, *judged.left])
        if options.conventions or left:
            print(source.name)
        if options.conventions:
            print("\n".join(f"  inferred: {each}" for each in source.inferred))
        print("".join(f"  left out: {line}\n" for line in left), end="")
        if options.rows:
            print(judged.rows().to_string(index=False))
        out[source.name]["left"] = len(source.left) + len(judged.left)
    show("uncalibrated", out, PUBLIC)
    show(f"after {options.calibrate or 5} rows of the same source and device, mean of {options.seeds} seeds, on the rest", after,
         PUBLIC)  # fmt: skip
    if not any(row["rows"] for row in out.values()):
        sys.exit(f"bench/estimator.py: error: no row of {options.tables} can be read; --conventions says why")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--surfaces", type=Path, help="folder of CSV and YAML files")
    parser.add_argument("--tables", type=Path, help="folder of public tables, a folder a source")
    parser.add_argument(
        "--source", action="append", default=[], help="of --tables only this; several times for several"
    )
    parser.add_argument(
        "--leave-out", action="store_true", help="of --tables and --surfaces: errors of each source held out"
    )
    parser.add_argument("--check", action="store_true", help="what `redline check` says of recipes of --tables")
    parser.add_argument("--most", type=int, default=40, metavar="N", help="recipes of a source that --check asks about")
    parser.add_argument("--rows", action="store_true", help="of --tables every row too")
    parser.add_argument("--scaling", action="store_true", help="of --surfaces: from the fewest devices to more")
    parser.add_argument("--speed", action="store_true", help="how fast it answers")
    parser.add_argument("--preset", default="llama2-7b", help="whose first answer --speed times")
    parser.add_argument("--calibrate", type=int, default=0, metavar="K", help="also after K random measurements")
    parser.add_argument("--seeds", type=int, default=20, help="repetitions of --calibrate")
    parser.add_argument("--only", default="", help="tables whose name contains this")
    parser.add_argument("--conventions", action="store_true", help="print what was inferred for each table")
    options = parser.parse_args()
    if options.speed:
        speed(options.preset)
    if options.leave_out:
        if options.tables is None:
            parser.error("--leave-out needs --tables DIR")
        leave_out(options)
        return
    if options.check:
        if options.tables is None:
            parser.error("--check needs --tables DIR")
        checked(options)
        return
    if options.tables is not None:
        public(options)
    if options.surfaces is None:
        if not options.speed and options.tables is None:
            parser.error("give --surfaces DIR, --tables DIR or --speed")
        return
    paths = [path for path in sorted(options.surfaces.glob("*.csv")) if options.only in path.name]
    paths = [path for path in paths if path.with_suffix(".yaml").exists()]
    if not paths:
        parser.error(f"no table (a CSV with a YAML beside it) in {options.surfaces}")
    surfaces, unread = [], 0
    for path in paths:
        try:
            surfaces.append(load(path))
        except (RedlineError, KeyError) as error:
            # The figures of the other tables are still useful.
            print(f"{path.stem} is left out: {error}", file=sys.stderr)
            unread += 1
    if options.conventions:
        for surface in surfaces:
            print(f"{surface.name}: {'; '.join(surface.inferred)}")
    if options.scaling:
        scaled(surfaces, options)
        return
    rows: dict[str, Any] = {surface.name: evaluate(surface, surface.estimator) for surface in surfaces}
    show("uncalibrated", {**rows, "mean": means(rows)})
    for model, found in pooled_auc(surfaces).items():
        print(
            f"AUC pooled over {model}: {found['fits']:.4f} by memory alone, {found['runs']:.4f} with stalls; "
            f"by memory alone {found['fits, cleared']:.4f} without {found['outlived']:.0f} of "
            f"{found['failed']:.0f} failures that runs which need at least as much outlived"
        )
    if options.calibrate:
        after: dict[str, Any] = {}
        for surface in surfaces:
            runs = [calibrated(surface, options.calibrate, seed) for seed in range(options.seeds)]
            after[surface.name] = means({str(seed): run for seed, run in enumerate(runs)})
        show(
            f"after {options.calibrate} random measurements, mean of {options.seeds} seeds, on the rest",
            {**after, "mean": means(after)},
        )
    if unread:
        sys.exit(1)


if __name__ == "__main__":
    main()
