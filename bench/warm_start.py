"""The gain from an earlier run, and the cost of a misleading one: `python bench/warm_start.py --surfaces DIR`.

Replays recorded tables (see `bench/tables/recorded.py`). For every table there is an earlier run on another one of the
folder: 30 trials of the default sampler, on a table with the same devices and another model, or with the same model
and twice (or half), eight times (or an eighth of) the devices. `true` is the unchanged run; `reversed` has its
throughputs in reverse order, the fastest slowest; `shuffled` has them in random order. `weighed` weighs it by
task_similarity, as a search does; `full` treats it as a run of the same workload and devices. Printed is the mean
share of the table's best that was found after a number of dry runs. With `--estimate` the search also uses the
estimate of each table's YAML, and `carried` is `weighed` with the run's corrections of the estimate itself.

`--correlations` runs no searches but prints the correlation of log throughput (with `--estimate`, of its residual from
the estimate) between the configurations that two tables share: the basis of the weights in `tuner/transfer.py`.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
from redline.results import Trial
from redline.tuner.samplers import make_sampler
from redline.tuner.samplers.judge import Judge
from redline.tuner.transfer import EarlierRun, take
from redline.tuner.warm_start import WarmStart
from search import estimator_of
from tables import Surface, read_folder

EARLIER = 30
"""Trials of an earlier run."""
SHOWN = (2, 3, 5, 8, 10)
LAYOUT = ("tp", "pp", "zero", "micro_batch", "gpus", "global_batch")
"""Knobs that identify configurations of two tables with each other."""
SHARED = 8
"""Configurations that two tables must have in common to be compared."""
CHANGES = ("true", "reversed", "shuffled")


def asked_of(surface: Surface) -> dict[str, Any]:
    """Returns the request that run.yaml would contain for a table."""
    facts = surface.facts
    gpus = facts["hardware"]["gpus"]
    model = {name: facts["model"][name] for name in ("family", "num_layers", "hidden_size")}
    return {
        "model": str(model),
        "workload": {"id": str(model)},
        "devices": {"type": "cuda", "name": facts["hardware"]["device"], "used": gpus if isinstance(gpus, int) else 1},
        "seq_len": facts["model"]["seq_len"],
        "global_batch": facts["training"].get("global_batch_sequences"),
    }


def search(surface: Surface, prior: Any, trials: int, seed: int) -> list[Trial]:
    """Returns the trials of a search that starts with the default configuration."""
    sampler = make_sampler("bayes", surface.space, seed=seed, prior=prior, warn=lambda message: None)
    done: list[Trial] = []
    while len(done) < trials:
        proposed = sampler.propose(done, 1) if done else [surface.space.default()]
        if not proposed:
            break
        throughput, memory = Judge(sampler.surrogate_prior).prediction(proposed[0])
        predicted = {"predicted_throughput": throughput, "predicted_memory_mib": memory}
        measured = surface.rows[proposed[0]]
        done.append(Trial(number=len(done), config=proposed[0], measurement=measured, **predicted))
    return done


def changed(trials: Sequence[Trial], how: str, seed: int) -> list[Trial]:
    """Returns the trials with their throughputs unchanged, reversed or shuffled."""
    speeds = [trial.measurement.throughput for trial in trials if trial.ok]
    if how == "reversed":
        speeds = [max(speeds) * min(speeds) / each for each in speeds]
    elif how == "shuffled":
        speeds = list(np.random.default_rng(seed).permutation(speeds))
    order = iter(speeds)
    without = dict.fromkeys(("step_ms", "tokens_per_second", "samples_per_second"))  # these carry the same information
    return [
        replace(trial, measurement=replace(trial.measurement, throughput=float(next(order)), **without))
        if trial.ok
        else trial
        for trial in trials
    ]


def partners(surface: Surface, tables: Sequence[Surface]) -> Iterator[tuple[str, Surface]]:
    """Returns the tables that an earlier run may have been on, and their differences."""
    here = asked_of(surface)
    for other in tables:
        there = asked_of(other)
        factor = max(there["devices"]["used"], here["devices"]["used"]) / min(
            there["devices"]["used"], here["devices"]["used"]
        )
        if there["model"] != here["model"] and factor == 1:
            yield "another model", other
        elif there["model"] == here["model"] and factor in (2, 8):
            yield f"{factor:.0f} x the devices, or as few", other


def correlations(tables: Sequence[Surface], bases: Mapping[str, Any]) -> None:
    """Prints mean correlations over pairs of tables, by their difference."""
    logs: dict[str, dict[tuple, float]] = {}
    for table in tables:
        worked = [config for config, measured in table.rows.items() if measured.ok]
        speeds = np.array([table.rows[config].throughput for config in worked])
        if bases[table.name] is not None:
            speeds = speeds / np.asarray(bases[table.name].table(worked).throughput)
        keys = [tuple((name, config.get(name)) for name in LAYOUT) for config in worked]
        logs[table.name] = {key: value for key, value in zip(keys, np.log(speeds)) if np.isfinite(value)}
    found: dict[tuple[bool, int], list[float]] = {}
    for one, other in combinations(tables, 2):
        here, there = asked_of(one), asked_of(other)
        doublings = abs(round(np.log2(here["devices"]["used"] / there["devices"]["used"])))
        shared = [key for key in logs[one.name] if key in logs[other.name]]
        if len(shared) >= SHARED:
            pair = [[logs[table.name][key] for key in shared] for table in (one, other)]
            kind = (here["model"] == there["model"], doublings)
            found.setdefault(kind, []).append(float(np.corrcoef(pair)[0, 1]))
    print("| model | devices differ by | pairs | mean correlation | least |\n|---|---|---|---|---|")
    for (same, doublings), values in sorted(found.items(), reverse=True):
        kind = "the same" if same else "another"
        print(f"| {kind} | {2**doublings} x | {len(values)} | {np.mean(values):.2f} | {min(values):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--surfaces", required=True, help="folder of tables with YAMLs")
    parser.add_argument("--only", default="nanotron", help="tables whose name starts with this")
    parser.add_argument("--estimate", action="store_true", help="start with the estimate of the YAMLs")
    parser.add_argument("--correlations", action="store_true", help="print these, and search nothing")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = [each for each in read_folder(options.surfaces) if each.name.startswith(options.only) and each.best]
    bases = {each.name: estimator_of(each) if options.estimate else None for each in found}
    if options.correlations:
        correlations(found, bases)
        return
    runs = {each.name: search(each, bases[each.name], EARLIER, options.seed + 1) for each in found}
    rows: dict[tuple[str, str, str], list[np.ndarray]] = {}
    for surface in found:
        here, base = asked_of(surface), bases[surface.name]

        def shares(prior: Any, surface: Surface = surface) -> np.ndarray:
            done = search(surface, prior, options.trials, options.seed)
            return np.maximum.accumulate([t.measurement.throughput if t.ok else 0.0 for t in done]) / surface.best

        rows.setdefault(("none", "", ""), []).append(shares(base))
        for kind, other in partners(surface, found):
            for how in CHANGES:
                trials = changed(runs[other.name], how, options.seed)
                for weight, there in (("weighed", asked_of(other)), ("full", here), ("carried", asked_of(other))):
                    if weight == "carried" and base is None:
                        continue
                    taken = take(EarlierRun(name=other.name, trials=trials, asked=there), surface.space, here)
                    known = [bases[other.name].calibrate(trials)] if weight == "carried" else []
                    prior = WarmStart(surface.space, [taken], base, lambda message: None, known)
                    rows.setdefault((kind, how, weight), []).append(shares(prior))
    shown = [at for at in SHOWN if at <= options.trials]
    print(f"| earlier run | | | searches | {' | '.join(f'after {at}' for at in shown)} |")
    print(f"|{'---|' * (4 + len(shown))}")
    for (kind, how, weight), every in rows.items():
        mean = np.mean(every, axis=0)
        print(
            f"| {kind} | {how} | {weight} | {len(every)} | {' | '.join(f'{100 * mean[at - 1]:.1f}' for at in shown)} |"
        )


if __name__ == "__main__":
    main()
