"""The cost of a proposal: `python bench/ask.py [--sampler bayes] [--out bench/results/ask.json]`.

The space has 50,000 valid configurations (a cluster of 128 devices and every knob); trials are measured by a formula,
some of them out of memory. The prior is redline's estimator for a model of 7 B parameters on H100s (`--prior none` for
no prior; `noise` for a callable that predicts one configuration at a time). Timed: one proposal after 100 and after
1,000 trials, and a batch of 64, each in a fresh sampler as after `--resume` ("first"), and again after one more trial,
as within a search ("next", median). Then memory: the resident set of the process while 5,000 trials are proposed in
batches of 64.

Goals, on two cores: one proposal within 0.5 s at 100 trials and 2 s at 1,000; a batch within 5 s; constant memory.
"""

import gc
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import machine, parser, write_json
from redline.base.device import usable_cores
from redline.estimator import Estimator, Shape, TrainingSetup
from redline.results import Measurement, Status, Trial
from redline.space import Config, Space
from redline.tuner.samplers import make_sampler, sampler_names

LIMIT_MIB = 81920.0
DEVICES = 128
GOALS = {"one at 100 trials": 0.5, "one at 1,000 trials": 2.0, "64 at 100 trials": 5.0, "64 at 1,000 trials": 5.0}


def space_of() -> Space:
    """Returns a space of 50,000 valid configurations: every knob of a cluster, with its constraints."""
    space = Space()
    tp = space.choice("tp", [1, 2, 4, 8])
    pp = space.choice("pp", [1, 2, 4, 8])
    micro = space.choice("micro_batch", [1, 2, 4, 8, 16], monotone_memory=1)
    space.choice("zero", [0, 1, 2, 3], monotone_memory=-1)
    space.choice("checkpoint_ratio", [0, 0.25, 0.5, 0.75, 1], default=1, monotone_memory=-1)
    space.flag("sequence_parallel", when=tp > 1)
    space.choice("precision", ["bf16", "bf16_pure", "fp8"])
    space.choice("attention", ["eager", "sdpa", "flash_attention_2"])
    space.flag("fusion")
    space.derive("dp", DEVICES // (tp * pp))
    space.derive("grad_accum", 512 * tp * pp // (DEVICES * micro))
    space.require(tp * pp <= DEVICES // 2, "at least two replicas")
    space.require(512 * tp * pp % (DEVICES * micro) == 0, "global batch")
    return space


def measure(config: Config) -> Measurement:
    """Returns throughput and memory by a formula with the scatter of a measurement."""
    tp, pp, micro = config["tp"], config["pp"], config["micro_batch"]
    ratio, zero = config["checkpoint_ratio"], config["zero"]
    rng = np.random.default_rng(int(config.id, 16))
    speed = micro / (micro + 0.4 * tp) / (1 + ratio / 3) / (1 + 0.15 * (tp - 1)) / (1 + 0.05 * (pp - 1))
    speed *= {"bf16": 1.0, "bf16_pure": 1.06, "fp8": 1.2}[config["precision"]]
    speed *= (1.15 if config["fusion"] else 1.0) / (1 + 0.07 * zero)
    speed *= {"eager": 0.8, "sdpa": 1.0, "flash_attention_2": 1.05}[config["attention"]]
    state = 2e5 / (tp * pp) / (1 + zero)
    need = state + micro * 9000.0 / tp * (1 - 0.85 * ratio) * (1.6 if config["attention"] == "eager" else 1.0)
    need *= math.exp(rng.normal(0, 0.02))
    memory = {"peak_memory_mib": need, "memory_limit_mib": LIMIT_MIB, "seconds_total": 20.0}
    if need > LIMIT_MIB:
        return Measurement(status=Status.OOM, reason="out of memory", **memory)
    return Measurement(status=Status.OK, throughput=1e5 * speed * math.exp(rng.normal(0, 0.01)), **memory)


def estimator() -> Estimator:
    """Returns the estimator of a Llama with 7 B parameters on H100s."""
    shape = Shape(
        name="llama", layers=32, hidden=4096, heads=32, intermediate=11008, vocabulary=32000, gated=True, tied=False
    )
    return Estimator(shape, "h100", TrainingSetup(devices=DEVICES, seq_len=4096, global_batch=512))


def noise(config: Config) -> float:
    """Returns a random error of up to about a third as prior, always the same for the same configuration."""
    wrong = np.random.default_rng(int(config.id, 16) + 1).normal(0, 0.3)
    return 1e5 * config["micro_batch"] / (config["micro_batch"] + config["tp"]) * math.exp(wrong)


def trials_of(space: Space, count: int, seed: int) -> list[Trial]:
    """Returns `count` measured trials of different random configurations."""
    rows = space.sample(count, seed=seed)
    return [Trial(number=i, config=config, measurement=measure(config)) for i, config in enumerate(rows)]


def timed(name: str, space: Space, options: dict[str, Any], trials: int, batch: int, repeats: int) -> dict[str, float]:
    """Returns the seconds of the first proposal of a fresh sampler, and median and maximum of the following ones."""
    done = trials_of(space, trials, seed=trials)
    sampler = make_sampler(name, space, seed=0, **options)
    seconds = []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        configs = sampler.propose(done, batch)
        seconds.append(time.perf_counter() - begin)
        assert len(configs) == batch == len(set(configs)), f"asked for {batch}, got {len(set(configs))}"
        done.append(Trial(number=len(done), config=configs[0], measurement=measure(configs[0])))
    return {"first": seconds[0], "next": statistics.median(seconds[1:]), "worst_next": max(seconds[1:])}


def memory(
    name: str, space: Space, options: dict[str, Any], trials: int, batch: int
) -> Iterator[tuple[int, float, float]]:
    """Yields trials, resident set in MiB, and seconds of the batch during a search of so many trials."""
    process = psutil.Process()
    sampler = make_sampler(name, space, seed=0, **options)
    done: list[Trial] = []
    while len(done) < trials:
        begin = time.perf_counter()
        configs = sampler.propose(done, batch)
        seconds = time.perf_counter() - begin
        for config in configs:
            done.append(Trial(number=len(done), config=config, measurement=measure(config)))
        gc.collect()
        yield len(done), process.memory_info().rss / 2**20, seconds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sampler", default="bayes", choices=sampler_names())
    options.add_argument("--trials", type=int, nargs="+", default=[100, 1000])
    options.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    options.add_argument("--repeats", type=int, default=5, help="proposals after the first")
    options.add_argument("--prior", default="estimator", choices=["estimator", "noise", "none"])
    options.add_argument("--memory-trials", type=int, default=0, help="also measure memory over so many trials")
    options.add_argument("--out", type=Path, help="JSON with the figures, the machine and the versions")
    arguments = options.parse_args()
    space = space_of()
    prior = arguments.prior if arguments.sampler == "bayes" else "none"
    options: dict[str, Any] = {}
    if prior != "none":
        options = {"prior": estimator() if prior == "estimator" else noise, "warn": print}
    report = {
        "sampler": arguments.sampler,
        "prior": prior,
        "points": len(space),
        "machine": machine(),
        "seconds": {},
    }
    print(f"{arguments.sampler}, prior {prior}: {len(space):,} valid configurations, {usable_cores()} cores")
    for count in arguments.trials:
        for batch in arguments.batch:
            what = f"{'one' if batch == 1 else batch} at {count:,} trials"
            found = timed(arguments.sampler, space, options, count, batch, arguments.repeats if batch == 1 else 1)
            goal = GOALS.get(what)
            goal_text = "" if goal is None else f"goal {goal:g} s: {'met' if max(found.values()) <= goal else 'MISSED'}"
            after = f"next {found['next']:.3f} s (worst {found['worst_next']:.3f})"
            print(f"{what:22}first {found['first']:.3f} s   {after}   {goal_text}", flush=True)
            report["seconds"][what] = {key: round(value, 4) for key, value in found.items()}
    if arguments.memory_trials:
        rows = list(memory(arguments.sampler, space, options, arguments.memory_trials, max(arguments.batch)))
        shares = [share * arguments.memory_trials for share in (0.1, 0.25, 0.5, 0.75, 1)]
        marks = [min(rows, key=lambda row: abs(row[0] - count)) for count in shares]
        for trials, mib, seconds in marks:
            print(f"{trials:>6} trials: {mib:8.1f} MiB resident, the batch took {seconds:.2f} s")
        report["memory_mib"] = {str(trials): round(mib, 1) for trials, mib, _ in marks}
        report["slowest_batch"] = round(max(seconds for *_, seconds in rows), 3)
        print(f"the slowest batch took {report['slowest_batch']:.2f} s")
    write_json(arguments.out, report)


if __name__ == "__main__":
    main()
