"""Dry runs that each sampler needs to come near the fastest configuration: `python bench/samplers.py`.

Throughput and out-of-memory regions are given by formulas, so that the fastest configuration is known and a trial
costs nothing. Prints, for each surface and sampler, the share of the fastest throughput reached after 5, 10, 20 and 30
trials (mean over seeds), the share of failed trials, and the seconds of a proposal. The first trial of every search is
the default configuration of the space, as in a real search.
"""

import argparse
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from redline.results import Measurement, Status, Trial
from redline.space import Config, Space
from redline.tuner.samplers import make_sampler, sampler_names

CHECKPOINTS = (5, 10, 20, 30)


@dataclass(frozen=True)
class Surface:
    """A space with a formula for the measurement of every configuration."""

    name: str
    space: Space
    model: Callable[[Mapping], tuple[float, float, str]]
    """Configuration -> throughput, required GiB, and the reason of a crash (empty without one)."""
    limit_gib: float

    def measure(self, config: Config) -> Measurement:
        throughput, need, crash = self.model(config)
        memory = {"peak_memory_mib": need * 1024, "memory_limit_mib": self.limit_gib * 1024}
        if crash:
            return Measurement(status=Status.CRASH, reason=crash)
        if need > self.limit_gib:
            return Measurement(status=Status.OOM, reason="out of memory", **memory)
        wobble = np.random.default_rng(int(config.id, 16)).normal(0.0, 0.01)  # the spread of a measurement
        return Measurement(status=Status.OK, throughput=throughput * math.exp(wobble), **memory)


def one_device() -> Surface:
    """A 1.3 B model on one 80 GiB device: micro-batch against memory, with interacting knobs."""
    space = Space()
    space.choice("micro_batch", [1, 2, 4, 8, 16, 32, 64])
    space.choice("checkpoint_ratio", [0, 0.25, 0.5, 0.75, 1], default=1)
    space.choice("precision", ["fp32", "bf16", "bf16_pure"])
    space.choice("attention", ["eager", "sdpa", "flash_attention_2"])
    space.flag("fusion")

    def model(c: Mapping) -> tuple[float, float, str]:
        half = c["precision"] != "fp32"
        flash = c["attention"] != "eager"
        speed = 3.2 if half else 1.0
        compute = c["micro_batch"] * (1 + c["checkpoint_ratio"] / 3) / speed
        attention = c["micro_batch"] * {"eager": 0.5, "sdpa": 0.18, "flash_attention_2": 0.14}[c["attention"]]
        element_wise = c["micro_batch"] * (0.08 if c["fusion"] else 0.28) / (1.6 if half else 1.0)
        launch = 0.5 if c["fusion"] else 1.1
        cast = 0.2 if c["precision"] == "bf16" else 0.0
        state = {"fp32": 21.0, "bf16": 22.5, "bf16_pure": 10.5}[c["precision"]]
        width = {"fp32": 1.0, "bf16": 0.62, "bf16_pure": 0.5}[c["precision"]]
        layer = 3.4 * width * (1.0 if flash else 1.9) * (0.85 if c["fusion"] else 1.0)
        kept = layer * (1 - 0.88 * c["checkpoint_ratio"]) + 0.4 * width
        need = state + c["micro_batch"] * kept
        wrong = c["attention"] == "flash_attention_2" and not half
        crash = "flash attention needs half precision" if wrong else ""
        return 100 * c["micro_batch"] / (compute + attention + element_wise + launch + cast), need, crash

    return Surface("one device", space, model, 80.0)


def eight_devices() -> Surface:
    """A 7 B model on eight 80 GiB devices: parallel degrees with a constrained product, ZeRO, bubbles."""
    space = Space()
    tp = space.choice("tp", [1, 2, 4, 8])
    pp = space.choice("pp", [1, 2, 4, 8])
    micro = space.choice("micro_batch", [1, 2, 4, 8, 16, 32])
    space.choice("zero", [0, 1, 2, 3])
    space.choice("checkpoint_ratio", [0, 0.25, 0.5, 0.75, 1], default=1)
    space.flag("sequence_parallel", when=tp > 1)
    space.require(tp * pp <= 8, "more devices than available")
    space.require(tp * pp * 32 >= micro, "global batch")

    def model(c: Mapping) -> tuple[float, float, str]:
        tp, pp, micro, zero, ratio = (c[k] for k in ("tp", "pp", "micro_batch", "zero", "checkpoint_ratio"))
        dp = 8 // (tp * pp)
        steps = max(256 // (micro * dp), 1)
        split = c.get("sequence_parallel", False)
        efficiency = micro / (micro + 0.35 * tp)
        compute = steps * micro * (1 + ratio / 3) / (tp * pp * efficiency)
        bubble = (pp - 1) / (steps + pp - 1)
        tensor = steps * micro * (tp - 1) / tp * (0.16 if split else 0.2) / pp
        gradients = 9.0 * (dp - 1) / dp / (tp * pp) * (1.0, 1.0, 0.25 * steps, 0.9 * steps)[zero]
        weights = 7.0 / (tp * pp)
        shards = [dp if zero >= stage else 1 for stage in (1, 2, 3)]
        state = weights * (12 / shards[0] + 2 / shards[1] + 2 / shards[2])
        spread = tp if split else 1 + 0.6 * (tp - 1)
        stored = micro * 11.0 / pp * (1 - 0.9 * ratio) * min(steps, pp) / spread
        crash = "pipeline with ZeRO-3" if pp > 1 and zero == 3 else ""
        return 1e4 / (compute / (1 - bubble) + tensor + gradients), state + stored + 0.3 * micro, crash

    return Surface("eight devices", space, model, 80.0)


def many_knobs() -> Surface:
    """Sixty-four devices and every knob: a large space with few fast configurations."""
    base = eight_devices()
    space = Space()
    tp = space.choice("tp", [1, 2, 4, 8])
    pp = space.choice("pp", [1, 2, 4, 8, 16])
    space.choice("micro_batch", [1, 2, 4, 8, 16, 32])
    space.choice("zero", [0, 1, 2, 3])
    space.choice("checkpoint_ratio", [0, 0.25, 0.5, 0.75, 1], default=1)
    space.flag("sequence_parallel", when=tp > 1)
    space.choice("precision", ["bf16", "bf16_pure", "fp8"])
    space.choice("attention", ["eager", "sdpa", "flash_attention_2"])
    space.flag("fusion")
    space.flag("kernels")
    space.choice("offload", ["none", "optimizer"])
    space.require(tp * pp <= 32, "at least two replicas")

    def model(c: Mapping) -> tuple[float, float, str]:
        throughput, need, crash = base.model({**c, "tp": c["tp"], "pp": min(c["pp"], 8 // c["tp"] or 1)})
        deep = c["tp"] * c["pp"] / 8
        fp8 = 1.25 if c["micro_batch"] >= 4 else 0.9
        speed = {"bf16": 1.0, "bf16_pure": 1.05, "fp8": fp8}[c["precision"]]
        speed *= {"eager": 0.75, "sdpa": 1.0, "flash_attention_2": 1.06}[c["attention"]]
        speed *= (1.12 if c["fusion"] else 1.0) * (1.08 if c["kernels"] and not c["fusion"] else 1.0)
        speed *= 0.55 if c["offload"] == "optimizer" else 1.0
        need *= {"bf16": 1.0, "bf16_pure": 0.8, "fp8": 0.95}[c["precision"]]
        need *= (0.6 if c["offload"] == "optimizer" else 1.0) * (1.3 if c["attention"] == "eager" else 1.0)
        if c["precision"] == "fp8" and c["attention"] == "eager":
            crash = crash or "no fp8 kernel"
        return throughput * speed * (1 - 0.08 * max(math.log2(deep), 0)), need / max(deep, 1), crash

    return Surface("many knobs", space, model, 80.0)


def run(surface: Surface, sampler_name: str, seed: int, trials: int) -> tuple[list[float], float, float]:
    """Returns the best throughput after each trial, the share of failed trials, and the seconds of a proposal."""
    sampler = make_sampler(sampler_name, surface.space, seed=seed)
    first = surface.space.default()
    done = [Trial(number=0, config=first, measurement=surface.measure(first))]
    seconds = 0.0
    while len(done) < trials:
        started = time.perf_counter()
        batch = sampler.propose(done)
        seconds += time.perf_counter() - started
        if not batch:
            break
        done.append(Trial(number=len(done), config=batch[0], measurement=surface.measure(batch[0])))
    throughputs = [trial.measurement.throughput if trial.ok else 0.0 for trial in done]
    best = np.maximum.accumulate(throughputs + [0.0] * (trials - len(done)))
    return best.tolist(), float(np.mean([not trial.ok for trial in done])), seconds / max(len(done) - 1, 1)


def main() -> None:
    surfaces = {each.name: each for each in (one_device(), eight_devices(), many_knobs())}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samplers", nargs="+", default=list(sampler_names()), choices=sampler_names())
    parser.add_argument("--surfaces", nargs="+", default=list(surfaces), choices=list(surfaces))
    parser.add_argument("--seeds", type=int, default=8)
    arguments = parser.parse_args()
    header = "".join(f"{f'after {n}':>10}" for n in CHECKPOINTS)
    for name in arguments.surfaces:
        surface = surfaces[name]
        outcomes = [surface.measure(config) for config in surface.space]
        fastest = max(outcome.throughput or 0.0 for outcome in outcomes)
        fail = np.mean([not outcome.ok for outcome in outcomes])
        print(f"\n{name}: {len(outcomes)} configurations, {fail:.0%} of them fail")
        print(f"{'sampler':<10}{header}{'failed':>10}{'s/proposal':>12}", flush=True)
        for sampler in arguments.samplers:
            runs = [run(surface, sampler, seed, max(CHECKPOINTS)) for seed in range(arguments.seeds)]
            shares = np.mean([best for best, _, _ in runs], axis=0) / fastest
            reached = "".join(f"{shares[n - 1]:>10.1%}" for n in CHECKPOINTS)
            failed, seconds = np.mean([run[1] for run in runs]), np.mean([run[2] for run in runs])
            print(f"{sampler:<10}{reached}{failed:>10.0%}{seconds:>12.3f}", flush=True)


if __name__ == "__main__":
    main()
