"""Checks that the winner of a search is the fastest configuration on a machine with intermittent other load.

    python bench/winners.py --models gpt2-tiny llama-tiny --searches 10 --out bench/results/winners.json

Runs searches beside a process that alternates randomly between keeping a core busy and resting. Afterwards, without
the load, every configuration that ran is measured again, one after the other, the fastest ones in several rounds. The
result is the winner's true throughput relative to the best one's; the goal is 0.97 in nine of ten searches.
"""

import argparse
import math
import multiprocessing
import random
import statistics
import tempfile
import time
from pathlib import Path

import redline as rl
from common import machine, parser, write_json
from redline.base.device import detect, usable_cores
from redline.runners import LocalRunner, TimingPlan, TrialRequest, TrialTerms
from redline.runners.trial.timing import median_interval

NEAR = 0.9
"""Share of the best first result above which a configuration is measured for longer."""
FIRST_SECONDS = 3.0
"""Seconds of the first measurement of each configuration."""


def disturb(seed: int, shortest: float, longest: float) -> None:
    """Alternates indefinitely between keeping a core busy and resting, for equal times on average."""
    draw = random.Random(seed)
    while True:
        end = time.monotonic() + draw.uniform(shortest, longest)
        while time.monotonic() < end:
            sum(range(10_000))
        time.sleep(draw.uniform(shortest, longest))


def alternating(workload, trials, *, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Returns the deviation of each configuration, by id, from the mean of all in every round, as logarithms of
    throughputs. In a round each configuration is built and measured once, for up to `seconds`.
    """
    device = detect()
    terms = TrialTerms(
        device=device,
        memory_limit_mib=float(device.memory_mib),
        threads=usable_cores() if device.type == "cpu" else None,
        plan=TimingPlan(seconds=seconds),
    )
    deviations: dict[str, list[float]] = {trial.config.id: [] for trial in trials}
    with LocalRunner(workload, terms) as runner:
        runner.wait_ready()
        for round_ in range(rounds):
            # Another one begins each round, so that none is always measured after the same one.
            order = [*trials[round_ % len(trials) :], *trials[: round_ % len(trials)]]
            measurements = [runner.run(TrialRequest(config=trial.config, number=trial.number)) for trial in order]
            logs = {
                trial.config.id: math.log(measured.throughput)
                for trial, measured in zip(order, measurements, strict=True)
                if measured.ok
            }
            mean = statistics.fmean(logs.values())
            for name, value in logs.items():
                deviations[name].append(value - mean)
    return {name: values for name, values in deviations.items() if values}


def throughputs_of(
    workload, trials, winner: str, *, rounds: int, seconds: float
) -> tuple[dict[str, float], float, float]:
    """Returns the throughput of each trial's configuration, by id, on a quiet machine, relative to the best; the fastest
    ones are measured in several rounds.

    Args:
        workload: workload of the search.
        trials: trials that ran.
        winner: id of the configuration that the search chose.
        rounds: number of times that the fastest ones are built and measured.
        seconds: seconds of each such measurement.

    Returns:
        Throughputs relative to the best, the winner's, and half of its 95 % interval.
    """
    relative = {
        name: statistics.median(values)
        for name, values in alternating(workload, trials, rounds=1, seconds=FIRST_SECONDS).items()
    }
    floor = max(relative.values()) + math.log(NEAR)
    near = [t for t in trials if relative.get(t.config.id, -math.inf) >= floor or t.config.id == winner]
    deviations: dict[str, list[float]] = {}
    if len(near) > 1:
        deviations = alternating(workload, near, rounds=rounds, seconds=seconds)
        medians = {name: statistics.median(values) for name, values in deviations.items()}
        # Other configurations keep their first ratio.
        shift = statistics.fmean(medians[name] - relative[name] for name in medians)
        relative = {name: medians.get(name, value + shift) for name, value in relative.items()}
    best = max((trial.config.id for trial in near), key=relative.get)
    shares = {name: math.exp(value - relative[best]) for name, value in relative.items()}
    if best == winner:
        return shares, 1.0, 0.0
    middle, within = median_interval([a - b for a, b in zip(deviations[winner], deviations[best], strict=True)])
    return shares, math.exp(middle), within * math.exp(middle)


def one(model: str, seed: int, options: argparse.Namespace) -> dict:
    """Runs a search beside the load, and rates its winner."""
    load = multiprocessing.get_context("fork").Process(
        target=disturb, args=(seed, options.shortest, options.longest), daemon=True
    )
    load.start()
    begin = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = rl.tune(
                model, trials=options.trials, runner="local", seed=seed, out=Path(folder) / "run", patience=0
            )
    finally:
        load.terminate()
        load.join()
    seconds = time.monotonic() - begin
    workload = rl.workload(model)
    ran = [trial for trial in result.all_trials if trial.measurement.peak_memory_mib and trial.measurement.ok]
    named = result.best.config.id
    true, share, within = throughputs_of(workload, ran, named, rounds=options.rounds, seconds=options.seconds)
    best = max(true, key=true.get)
    return {
        "model": model,
        "seed": seed,
        "share": share,
        "share_within": within,
        "winner": dict(result.best.config),
        "best": next(dict(trial.config) for trial in ran if trial.config.id == best),
        "search_seconds": round(seconds, 1),
        "notes": list(result.notes),
        "trials": [
            {
                "config": dict(trial.config),
                "true": true.get(trial.config.id),
                "first": trial.first,
                "remeasured": trial.remeasured,
                **{name: getattr(trial.measurement, name) for name in ("status", "throughput")},
            }
            for trial in result.all_trials
        ],
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=["gpt2-tiny", "llama-tiny"])
    arguments.add_argument("--searches", type=int, default=10, help="in all, the models in turn")
    arguments.add_argument("--trials", type=int, default=16)
    arguments.add_argument("--rounds", type=int, default=6, help="of measuring those near the top at length")
    arguments.add_argument("--seconds", type=float, default=12.0, help="that each such round measures a configuration")
    arguments.add_argument("--shortest", type=float, default=5.0, help="that the load stays or is away, s")
    arguments.add_argument("--longest", type=float, default=40.0)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    if options.rounds < 1:
        arguments.error("--rounds must be at least 1")
    rows = []
    for seed in range(options.searches):
        row = one(options.models[seed % len(options.models)], seed, options)
        rows.append(row)
        print(
            f"{row['model']:<12} seed {seed}: {100 * row['share']:.1f} ± {100 * row['share_within']:.1f} % of the best, "
            f"{row['search_seconds']} s",
            flush=True,
        )
        settings = {name: str(value) for name, value in vars(options).items()}
        write_json(options.out, {"about": machine(), "options": settings, "rows": rows})
    good = sum(row["share"] >= 0.97 for row in rows)
    print(f"{good} of {len(rows)} searches named a winner of at least 97 % of the best of all they tried")


if __name__ == "__main__":
    main()
