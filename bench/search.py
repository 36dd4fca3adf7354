"""How many dry runs each search method needs: `python bench/search.py --surfaces DIR --samplers bayes,tpe,...`.

Replays recorded tables (see `redline.runners.replay`): a dry run looks a row up. For each sampler and table:
the fraction of the table's best after 5, 10, 20 and 30 dry runs, the share of the first 10 and of all that
failed, dry runs to 99 %, and seconds a proposal; then a summary over the tables, with 95 % confidence
intervals (bootstrap over tables). Samplers are redline's by name, `bayes+PRIOR` for one guided by a prior
(`estimate`, or `reversed`, `random`), and peers through their own libraries:

    optuna-tpe, optuna-gp   Optuna's samplers as they come, failures violating a constraint
    hebo-atorch             HEBO's suggest/observe as ATorch calls it: a failure is a throughput of 0
    batch-search            the largest micro-batch that fits, by doubling, for one layout after the other

A peer's suggestion that is no row, or was tried, is replaced by the nearest row left: that favours them.
A table of which every row failed is reported apart: whether the search ended in "nothing feasible", and when.
"""

import argparse
import contextlib
import csv
import hashlib
import io
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from redline.results import Trial
from redline.runners.replay import Surface, read_folder
from redline.space import Config
from redline.tuner.samplers import make_sampler, sampler_names
from redline.tuner.samplers.candidates import remaining
from redline.tuner.samplers.encoding import Encoding

CHECKPOINTS = (5, 10, 20, 30)
Ask = Callable[[list[Trial]], Config | None]


def peer_random(surface: Surface, seed: int) -> Ask:
    rng = np.random.default_rng(seed)
    order = [list(surface.rows)[i] for i in rng.permutation(len(surface.rows))]
    return lambda done: order[len(done)] if len(done) < len(order) else None


def peer_optuna(surface: Surface, seed: int, kind: str) -> Ask:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    encoding = Encoding(surface.space)
    space: dict[str, Any] = {}
    for name, size, ordered in zip(encoding.names, encoding.sizes, encoding.ordered):
        int_ = optuna.distributions.IntDistribution(0, int(size) - 1)
        space[name] = int_ if ordered else optuna.distributions.CategoricalDistribution(range(int(size)))

    def constraints(trial: Any) -> tuple[float]:
        return (trial.user_attrs["failed"],)

    cls = {"tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler}[kind]
    study = optuna.create_study(sampler=cls(seed=seed, constraints_func=constraints), direction="maximize")
    rng = np.random.default_rng(seed)

    def ask(done: list[Trial]) -> Config | None:
        if done:
            last = done[-1]
            code = encoding.encode(last.config)
            worked = [t.measurement.throughput for t in done if t.ok]
            value = last.measurement.throughput if last.ok else (min(worked) if worked else 0.0)
            study.add_trial(
                optuna.trial.create_trial(
                    params=dict(zip(encoding.names, code.tolist())),
                    distributions=space,
                    value=value,
                    user_attrs={"failed": -1.0 if last.ok else 1.0},
                    system_attrs={"constraints": (-1.0 if last.ok else 1.0,)},
                )
            )
        left = remaining(encoding, done, rng, sample=1)
        if not len(left):
            return None
        params = study.ask(space).params
        return left.closest(np.array([params[name] for name in encoding.names], dtype=np.int32), rng)

    return ask


def peer_hebo(surface: Surface, seed: int) -> Ask:
    import pandas as pd
    import torch

    with contextlib.redirect_stdout(io.StringIO()):
        from hebo.design_space.design_space import DesignSpace
        from hebo.optimizers.hebo import HEBO
    encoding = Encoding(surface.space)
    parameters = []
    for name, size, ordered in zip(encoding.names, encoding.sizes, encoding.ordered):
        if ordered:
            parameters.append({"name": name, "type": "int", "lb": 0, "ub": int(size) - 1})
        else:
            parameters.append({"name": name, "type": "cat", "categories": [str(i) for i in range(size)]})
    np.random.seed(seed)
    torch.manual_seed(seed)
    optimizer = HEBO(DesignSpace().parse(parameters), scramble_seed=seed)
    rng = np.random.default_rng(seed)

    def frame(code: np.ndarray) -> Any:
        values = {n: int(v) if o else str(v) for n, v, o in zip(encoding.names, code, encoding.ordered)}
        return pd.DataFrame([values])

    def ask(done: list[Trial]) -> Config | None:
        with contextlib.redirect_stdout(io.StringIO()):
            if done:
                last = done[-1]
                value = -last.measurement.throughput if last.ok else 0.0
                optimizer.observe(frame(encoding.encode(last.config)), np.array([[value]]))
            left = remaining(encoding, done, rng, sample=1)
            if not len(left):
                return None
            suggested = optimizer.suggest(n_suggestions=1).iloc[0]
        return left.closest(np.array([int(suggested[name]) for name in encoding.names], dtype=np.int32), rng)

    return ask


def peer_batch_search(surface: Surface, seed: int) -> Ask:
    """DeepSpeed's and Slapo's way: per layout, the micro-batch doubles until it fails or slows down."""
    rng = np.random.default_rng(seed)
    layouts: dict[tuple, list[Config]] = {}
    for config in surface.rows:
        fixed = {k: v for k, v in config.items() if k not in ("micro_batch", "grad_accum", "dp")}
        layouts.setdefault(tuple(fixed.values()), []).append(config)
    groups = [sorted(group, key=lambda c: c.get("micro_batch", 0)) for group in layouts.values()]
    queue = [groups[i] for i in rng.permutation(len(groups))]
    skipped: list[Config] = []

    def ask(done: list[Trial]) -> Config | None:
        if done and queue:
            last, group = done[-1], queue[0]
            previous = [t for t in done[:-1] if t.config in groups_of[id(group)]]
            slower = (
                bool(previous)
                and last.ok
                and previous[-1].ok
                and (last.measurement.throughput < previous[-1].measurement.throughput)
            )
            if not last.ok or slower:
                skipped.extend(queue.pop(0))
        while queue and not queue[0]:
            queue.pop(0)
        if queue:
            return queue[0].pop(0)
        return skipped.pop(0) if skipped else None

    groups_of = {id(group): set(group) for group in queue}
    return ask


def ours(surface: Surface, seed: int, name: str) -> Ask:
    name, _, prior = name.partition("+")
    options = {"prior": make_prior(surface, prior, seed), "warn": lambda message: None} if prior else {}
    sampler = make_sampler(name, surface.space, seed=seed, **options)
    return lambda done: next(iter(sampler.propose(done, 1)), None)


def make_prior(surface: Surface, kind: str, seed: int) -> Any:
    """The prior of that kind: the estimate from the table's YAML, the same reversed, or noise."""
    if kind == "random":
        rng = np.random.default_rng(seed)
        noise = {config: float(np.exp(rng.normal())) for config in surface.rows}
        return noise.__getitem__
    prior = estimator_of(surface)
    if kind == "reversed":
        return lambda config: 1e12 / prior(config).throughput
    if kind != "estimate":
        raise SystemExit(f"a prior must be estimate, reversed or random, but got '{kind}'")
    return prior


def estimator_of(surface: Surface) -> Any:
    """redline's estimator for the model, training and hardware that the table's YAML states."""
    from estimator import load  # bench/estimator.py reads the YAML

    return load(surface.path).estimator


PEERS: dict[str, Callable[[Surface, int], Ask]] = {
    "optuna-tpe": lambda surface, seed: peer_optuna(surface, seed, "tpe"),
    "optuna-gp": lambda surface, seed: peer_optuna(surface, seed, "gp"),
    "hebo-atorch": peer_hebo,
    "batch-search": peer_batch_search,
}


def replay(surface: Surface, name: str, seed: int, trials: int) -> dict[str, Any]:
    """One search: throughput (0 where it failed) and failure of each dry run, seconds a proposal."""
    ask = PEERS[name](surface, seed) if name in PEERS else ours(surface, seed, name)
    done: list[Trial] = []
    seconds = 0.0
    while len(done) < trials:
        started = time.perf_counter()
        config = ask(done)
        seconds += time.perf_counter() - started
        if config is None:
            break
        done.append(Trial(number=len(done), config=config, measurement=surface.rows[config]))
    return {
        "values": [t.measurement.throughput if t.ok else 0.0 for t in done],
        "seconds": seconds / max(len(done), 1),
    }


def measures(run: dict[str, Any], best: float) -> dict[str, float]:
    """The figures of one search."""
    values = np.array(run["values"])
    so_far = np.maximum.accumulate(values) / best
    out = {f"after_{n}": float(so_far[min(n, len(so_far)) - 1]) for n in CHECKPOINTS}
    out["failed_10"] = float((values[:10] == 0).mean())
    out["failed"] = float((values == 0).mean())
    reached = np.flatnonzero(so_far >= 0.99)
    out["to_99"] = float(reached[0] + 1) if len(reached) else math.inf
    out["seconds"] = run["seconds"]
    return out


def interval(rows: np.ndarray) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval, by bootstrap over the rows (one a table)."""
    rng = np.random.default_rng(0)
    means = rng.choice(rows, size=(2000, len(rows))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(rows.mean()), float(high - low) / 2


def cached(folder: Path | None, surface: Surface, name: str, seed: int, trials: int) -> dict[str, Any]:
    """The search, read from `folder` where a peer made it before on the same table."""
    if folder is None or name not in PEERS:
        return replay(surface, name, seed, trials)
    rows = sorted((c.id, m.throughput or 0.0) for c, m in surface.rows.items())
    key = hashlib.sha256(json.dumps([rows, name, seed, trials]).encode()).hexdigest()[:20]
    path = folder / f"{name}-{surface.name}-{seed}-{key}.json"
    if path.is_file():
        return json.loads(path.read_text())
    run = replay(surface, name, seed, trials)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run))
    return run


def plot(path: Path, curves: dict[str, np.ndarray]) -> None:
    """Mean fraction of the best over dry runs, one line a sampler, as an HTML page."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for name, curve in curves.items():
        figure.add_scatter(x=list(range(1, len(curve) + 1)), y=curve.tolist(), name=name, mode="lines")
    figure.update_layout(
        xaxis_title="dry runs", yaxis_title="mean fraction of the best", yaxis_range=[0, 1.01]
    )
    figure.write_html(path, include_plotlyjs=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--surfaces", required=True, type=Path, help="folder of tables")
    parser.add_argument(
        "--only", default="", help="tables whose name contains this, or one of these, by comma"
    )
    parser.add_argument("--samplers", default="bayes,random,optuna-tpe,optuna-gp,hebo-atorch,batch-search")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--trials", type=int, default=max(CHECKPOINTS))
    parser.add_argument(
        "--peer-cache", type=Path, help="folder in which peers' searches are kept between runs"
    )
    parser.add_argument("--out", type=Path, help="folder for search.csv and search.html")
    arguments = parser.parse_args()
    wanted = [part for part in arguments.only.split(",") if part]
    surfaces = [s for s in read_folder(arguments.surfaces) if not wanted or any(w in s.name for w in wanted)]
    records, curves, summary = [], {}, []
    for name in arguments.samplers.split(","):
        if name not in PEERS and name.partition("+")[0] not in sampler_names():
            raise SystemExit(f"unknown sampler '{name}': {', '.join([*sampler_names(), *PEERS])}")
        per_table, lines = [], []
        for surface in surfaces:
            if surface.best is None:
                continue
            runs = []
            for seed in range(arguments.seeds):
                try:
                    run = cached(arguments.peer_cache, surface, name, seed, arguments.trials)
                except LookupError as error:
                    print(f"{name} on {surface.name}: {error}", file=sys.stderr)
                    break
                figures = measures(run, surface.best)
                records.append({"sampler": name, "surface": surface.name, "seed": seed, **figures})
                runs.append(figures)
                values = np.array(run["values"] + [0.0] * (arguments.trials - len(run["values"])))
                lines.append(np.maximum.accumulate(values) / surface.best)
            if runs:
                per_table.append({key: float(np.mean([run[key] for run in runs])) for key in runs[0]})
                per_table[-1]["to_99"] = float(np.median([run["to_99"] for run in runs]))
                line = "  ".join(f"{per_table[-1][f'after_{n}']:6.1%}" for n in CHECKPOINTS)
                print(
                    f"{name:<16}{surface.name:<30}{line}  failed {per_table[-1]['failed_10']:.0%}/"
                    f"{per_table[-1]['failed']:.0%}  99 % at {per_table[-1]['to_99']:g}",
                    flush=True,
                )
        if not per_table:
            continue
        curves[name] = np.mean(lines, axis=0)
        line = f"{name:<20}"
        for key in (*(f"after_{n}" for n in CHECKPOINTS), "failed_10", "failed"):
            mean, half = interval(np.array([each[key] for each in per_table]))
            line += f"{f'{100 * mean:.1f} ± {100 * half:.1f}':>14}"
        worst = min(each["after_10"] for each in per_table)
        middle = float(np.median([each["to_99"] for each in per_table]))
        seconds = np.mean([each["seconds"] for each in per_table])
        summary.append(line + f"{worst:>10.1%}{middle:>8g}{seconds:>9.3f}")
    header = "".join(
        f"{text:>14}" for text in (*(f"after {n}" for n in CHECKPOINTS), "failed in 10", "failed")
    )
    print(f"\n{'% (mean, 95 %)':<20}{header}{'worst@10':>10}{'to 99 %':>8}{'s/ask':>9}")
    print("\n".join(summary))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        with (arguments.out / "search.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
        plot(arguments.out / "search.html", curves)
        print(f"wrote {arguments.out / 'search.csv'} and {arguments.out / 'search.html'}")


if __name__ == "__main__":
    main()
