"""Dry runs that each search method needs: `python bench/search.py --tables DIR --samplers bayes,tpe,...`.

Replays recorded tables (see `bench/tables/recorded.py`): a dry run looks up a row. For each sampler and table it
reports the fraction of the table's best after 3, 5, 10, 20, 30 and 50 dry runs, the share of failures among the first 10 and
all dry runs, dry runs to 99 %, and seconds of a proposal; then a summary over the tables, with 95 % confidence
intervals (bootstrap over tables). Samplers are redline's by name, `bayes+PRIOR` for one guided by a prior (`estimate`,
or `reversed`, `random`; `default`, which knows the names of knobs but no model, or `default-reversed`,
`default-renamed`, where the names mislead), and peers through their own libraries:

    optuna-tpe, optuna-gp   Optuna's samplers with defaults, failures violate a constraint
    hebo-atorch             HEBO's suggest/observe as ATorch calls it: a failure is a throughput of 0
    smac                    SMAC's forest, log EI and initial design, over the rows (needs pip install smac)
    batch-search            the largest micro-batch that fits, by doubling, for one layout after the other

A peer's suggestion that is not a row, or was tried before, is replaced by the nearest remaining row, which favours
peers. A table whose rows all failed is reported separately: the number of dry runs until the search ended with
"nothing feasible".
"""

import csv
import hashlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import redline as rl
from common import machine, parser
from peers import PEERS, Ask
from redline.estimator import find_hardware
from redline.results import Measurement, Status, Trial
from redline.runners import Runner
from redline.runners.runner import TrialRequest
from redline.tuner.default_prior import CPU, DefaultPrior, default_prior
from redline.tuner.samplers import make_sampler, sampler_names
from redline.tuner.samplers.prior import ShapePrior
from tables import Surface, read_folder

CHECKPOINTS = (3, 5, 10, 20, 30, 50)
COLUMNS = (*(f"after_{n}" for n in CHECKPOINTS), "failed_10", "failed")
Tables = Mapping[str, Mapping[str, float]]
"""Figures by name of the table."""


def own_sampler(surface: Surface, seed: int, name: str) -> Ask:
    name, _, prior = name.partition("+")
    options = {"prior": make_prior(surface, prior, seed), "warn": lambda message: None} if prior else {}
    sampler = make_sampler(name, surface.space, seed=seed, **options)
    return lambda done: next(iter(sampler.propose(done, 1)), None)


def make_prior(surface: Surface, kind: str, seed: int) -> Any:
    """Returns the prior of a kind: the estimate from the table's YAML, the same reversed, noise, or the default one."""
    if kind == "random":
        rng = np.random.default_rng(seed)
        noise = {config: float(np.exp(rng.normal())) for config in surface.rows}
        return noise.__getitem__
    if kind.startswith("default"):
        found = default_prior_of(surface)
        return found if kind == "default" else Misleading(found, list(surface.rows), kind.partition("-")[2])
    prior = estimator_of(surface)
    if kind == "reversed":
        return lambda config: 1e12 / prior(config).throughput
    if kind != "estimate":
        raise SystemExit(f"a prior must be estimate, reversed, random or default, but got '{kind}'")
    return prior


def estimator_of(surface: Surface) -> Any:
    """Returns redline's estimator for the model, training and hardware in the table's YAML.

    Raises:
        LookupError: the YAML lacks them, or the estimator does not know them.
    """
    from tables.surfaces import load

    missing = [part for part in ("model", "training", "hardware") if not surface.facts.get(part)]
    if missing:
        raise LookupError(f"no estimate, as no YAML beside the table has {' and '.join(missing)}")
    try:
        return load(surface.path).estimator
    except rl.UsageError as error:
        raise LookupError(f"no estimate: {error}") from error


def default_prior_of(surface: Surface) -> Any:
    """Returns the default prior, which knows the knobs and the kind and number of the devices, but not the model.

    Raises:
        LookupError: the table's YAML has no hardware, or too few of the knobs have a standard name.
    """
    hardware = surface.facts.get("hardware") or {}
    if "device" not in hardware:
        raise LookupError("no default prior, as no YAML beside the table has hardware")
    machine = CPU if hardware["device"] == "cpu" else find_hardware(hardware["device"])
    devices = hardware.get("gpus")
    prior = default_prior(surface.space, devices if isinstance(devices, int) else 1, machine)
    if prior is None:
        raise LookupError("no default prior, as fewer than two knobs have a standard name")
    return prior


class Misleading(ShapePrior):
    """A default prior whose knobs have the standard names with other meanings.

    Args:
        prior: the correct prior.
        rows: configurations of the table.
        how: `reversed`: fast and large configurations are predicted slow and small; `renamed`: each knob that counts
            something has the name of the next one.
    """

    def __init__(self, prior: DefaultPrior, rows: Sequence[Mapping[str, Any]], how: str) -> None:
        if how not in ("reversed", "renamed"):
            raise SystemExit(f"a default prior may be default-reversed or default-renamed, but not default-{how}")
        self._prior, self._how = prior, how
        self._names = [name for name in ("tp", "pp", "micro_batch", "dp", "grad_accum") if name in rows[0]]

    def table(self, configs: Sequence[Mapping[str, Any]]) -> Any:
        """Returns the predictions of many configurations."""
        if self._how == "renamed":
            after = dict(zip(self._names, [*self._names[1:], *self._names[:1]]))
            return self._prior.table([{name: each[after.get(name, name)] for name in each} for each in configs])
        found = self._prior.table(configs)
        found.throughput = 1e30 / found.throughput
        found.peak_memory_mib = found.fullest_memory_mib = 1e9 / found.fullest_memory_mib
        return found


def beginning(surface: Surface, how: str, seed: int) -> list[Trial]:
    """Returns the configuration measured first: none, the default one, or a random one."""
    if how == "sampler":
        return []
    rows = list(surface.rows)
    config = surface.space.default() if how == "default" else rows[np.random.default_rng(seed).integers(len(rows))]
    return [Trial(number=0, config=config, measurement=surface.rows[config])]


class Rows(Runner):
    """Runs trials by looking up the rows of a table."""

    name = "rows"

    def __init__(self, surface: Surface) -> None:
        self._rows = surface.rows

    def run(self, request: TrialRequest) -> Measurement:
        return self._rows[request.config]

    def close(self) -> None:
        self.closed = True


def replay(surface: Surface, name: str, seed: int, trials: int, begin: str) -> dict[str, Any]:
    """Returns throughput (0 for a failure) of each dry run of one search, and seconds of a proposal."""
    ask = PEERS[name](surface, seed) if name in PEERS else own_sampler(surface, seed, name)
    runner = Rows(surface)
    done = beginning(surface, begin, seed)
    seconds, proposals, run = 0.0, 0, len(done)
    while run < trials:
        started = time.perf_counter()
        config = ask(done)
        seconds += time.perf_counter() - started
        if config is None:
            break
        proposals += 1
        measured = runner.run(TrialRequest(config=config, number=len(done)))
        run += 1
        done.append(Trial(number=len(done), config=config, measurement=measured))
    return {
        "values": [trial.measurement.throughput if trial.ok else 0.0 for trial in done],
        "seconds": seconds / max(proposals, 1),
    }


def measures(run: dict[str, Any], best: float) -> dict[str, float]:
    """Returns the figures of one search."""
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
    """Returns the mean and the half-width of its 95 % interval, by bootstrap over the rows (one for each table)."""
    rng = np.random.default_rng(0)
    means = rng.choice(rows, size=(2000, len(rows))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(rows.mean()), float(high - low) / 2


def cached(folder: Path | None, surface: Surface, name: str, seed: int, trials: int, begin: str) -> dict[str, Any]:
    """Returns a search, read from `folder` if the same code ran it before on the same table."""
    if folder is None:
        return replay(surface, name, seed, trials, begin)
    rows = sorted((c.id, m.throughput or 0.0) for c, m in surface.rows.items())
    code = [] if name in PEERS else [sources()]
    key = hashlib.sha256(json.dumps([rows, name, seed, trials, begin, *code]).encode()).hexdigest()[:20]
    path = folder / f"{name}-{surface.name}-{seed}-{key}.json"
    if path.is_file():
        return json.loads(path.read_text())
    run = replay(surface, name, seed, trials, begin)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run))
    return run


@cache
def sources() -> str:
    """Returns a digest of all code that affects redline's samplers and the estimate."""
    root = Path(rl.__file__).parent
    digest = hashlib.sha256()
    for folder in ("tuner/samplers", "estimator", "space"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    for path in (root / "tuner" / "default_prior.py", Path(__file__).with_name("estimator.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def infeasible(surface: Surface, name: str, seed: int) -> str:
    """Returns the result of a whole search on a table whose rows all failed."""
    name, _, kind = name.partition("+")
    try:
        prior = make_prior(surface, kind, seed) if kind else None
    except LookupError as error:
        return str(error)
    fn = surface.rows.__getitem__
    result = rl.tune(fn, surface.space, sampler=name, prior=prior, trials=100, seed=seed, isolate=False)
    run = sum(each.measurement.status is not Status.SKIPPED for each in result.all_trials)
    verdict = result.ended if "nothing feasible" in result.ended else f"no verdict: {result.ended}"
    return f"{run} dry runs; {verdict}"


def table_figures(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the figures of one table: means over seeds, and the median of dry runs to 99 %."""
    figures = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
    figures["to_99"] = float(np.median([run["to_99"] for run in runs]))
    return figures


def summarise(tables: Mapping[str, Tables], seeds: Mapping[str, int]) -> list[dict[str, Any]]:
    """Returns a row for each sampler: means over tables with 95 % intervals, and the distance to the first sampler."""
    rows = []
    first = next(iter(tables.values()))
    for name, found in tables.items():
        row: dict[str, Any] = {"sampler": name, "seeds": seeds[name], "tables": len(found)}
        for key in COLUMNS:
            mean, half = interval(np.array([each[key] for each in found.values()]))
            row |= {key: round(100 * mean, 2), f"{key}_half": round(100 * half, 2)}
        row["worst_10"] = round(100 * min(each["after_10"] for each in found.values()), 2)
        row["to_99"] = float(np.median([each["to_99"] for each in found.values()]))
        row["seconds"] = round(float(np.mean([each["seconds"] for each in found.values()])), 4)
        shared = [table for table in found if table in first]
        for key in COLUMNS[: len(CHECKPOINTS)]:
            mean, half = interval(np.array([first[table][key] - found[table][key] for table in shared]))
            row |= {f"behind_{key}": round(100 * mean, 2), f"behind_{key}_half": round(100 * half, 2)}
        rows.append(row)
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Returns the summary as two tables."""

    def cell(row: Mapping[str, Any], key: str, form: str = ".1f") -> str:
        return f"{format(row[key], form)} ± {row[f'{key}_half']:.1f}".rjust(15)

    titles = (*(f"after {n}" for n in CHECKPOINTS), "failed in 10", "failed")
    head = "".join(title.rjust(15) for title in titles)
    print(f"\n{'% (mean, 95 %)':<18}{head}{'worst@10':>10}{'to 99 %':>9}{'s/ask':>9}{'seeds':>7}")
    for row in rows:
        cells = "".join(cell(row, key) for key in COLUMNS)
        more = f"{row['worst_10']:>10.1f}{row['to_99']:>9g}{row['seconds']:>9.3f}{row['seeds']:>7}"
        print(f"{row['sampler']:<18}{cells}{more}")
    print(f"\n{rows[0]['sampler']} ahead of, in points, table by table (95 %)")
    for row in rows[1:]:
        cells = "".join(cell(row, f"behind_{key}", "+.1f") for key in COLUMNS[: len(CHECKPOINTS)])
        print(f"{row['sampler']:<18}{cells}")


def write(folder: Path, records: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes search.csv (a row for each search) and search-summary.csv (a row for each sampler)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("search.csv", records), ("search-summary.csv", rows)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(content[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(content)
        print(f"wrote {folder / name}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--tables", "--surfaces", required=True, type=Path, action="append", help="folder of tables; repeatable"
    )
    options.add_argument("--only", default="", help="tables whose name contains this, or one of these, by comma")
    options.add_argument(
        "--samplers",
        default="bayes+estimate,bayes,random,optuna-tpe,optuna-gp,hebo-atorch,batch-search",
        help="by comma; NAME:K for K seeds instead of --seeds",
    )
    options.add_argument("--seeds", type=int, default=8)
    options.add_argument("--trials", type=int, default=max(CHECKPOINTS))
    options.add_argument(
        "--begin",
        default="sampler",
        choices=("sampler", "default", "random"),
        help="the first dry run: the sampler's proposal, the default configuration as in `redline tune`, or a random one",
    )
    options.add_argument("--cache", type=Path, help="folder that caches searches for the next run of the same code")
    options.add_argument("--out", type=Path, help="folder for search.csv and search-summary.csv")
    arguments = options.parse_args()
    wanted = [part for part in arguments.only.split(",") if part]
    surfaces = [surface for folder in arguments.tables for surface in read_folder(folder)]
    surfaces = [s for s in surfaces if not wanted or any(w in s.name for w in wanted)]
    records: list[dict[str, Any]] = []
    tables: dict[str, Tables] = {}
    seeds = {}
    print(machine("scipy"))
    for asked in arguments.samplers.split(","):
        name, _, count = asked.partition(":")
        known = [*sampler_names(), *PEERS]
        if name not in PEERS and name.partition("+")[0] not in known:
            raise SystemExit(f"unknown sampler '{name}': {', '.join(known)}")
        seeds[name] = int(count or arguments.seeds)
        found: dict[str, dict[str, float]] = {}
        for surface in surfaces:
            if surface.best is None:
                if name.partition("+")[0] in sampler_names():
                    print(f"{name:<16}{surface.name:<30}{infeasible(surface, name, 0)}", flush=True)
                continue
            runs = []
            for seed in range(seeds[name]):
                try:
                    run = cached(arguments.cache, surface, name, seed, arguments.trials, arguments.begin)
                except LookupError as error:
                    print(f"{name} on {surface.name}: {error}", file=sys.stderr)
                    break
                runs.append(measures(run, surface.best))
                records.append({"sampler": name, "surface": surface.name, "seed": seed, **runs[-1]})
            if runs:
                found[surface.name] = figures = table_figures(runs)
                line = "  ".join(f"{figures[f'after_{n}']:6.1%}" for n in CHECKPOINTS)
                print(
                    f"{name:<16}{surface.name:<30}{line}  failed {figures['failed_10']:.0%}/"
                    f"{figures['failed']:.0%}  99 % at {figures['to_99']:g}",
                    flush=True,
                )
        if found:
            tables[name] = found
    if not tables:
        return
    rows = summarise(tables, seeds)
    show(rows)
    if arguments.out:
        write(arguments.out, records, rows)


if __name__ == "__main__":
    main()
