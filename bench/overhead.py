"""The overhead of a trial: seconds beyond its own build and steps.

    python bench/overhead.py [--model gpt2-tiny] [--trials 10]

Compares in turns, in one run, the local runner, the Ray runner, and a fresh interpreter for every trial, as in
DeepSpeed's autotuner and Slapo's tuner. All three run the same dry run of the same configuration; its build, warm-up
and measurement are subtracted from the wall time outside. The start of the host agent or of Ray, once for each search,
is reported separately.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from redline.models import flops_of, make_space

PLAN = {"warmup_min_steps": 1, "warmup_max_steps": 1, "min_steps": 1, "max_steps": 1, "seconds": 0.0}

# A complete trial in a fresh interpreter: import, build, step, print. No limit, no supervision.
FRESH = """
import json, sys
model, micro_batch, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
import torch
torch.set_num_threads(threads)
from redline.base.device import detect
from redline.models import make_space, workload
from redline.training import Training
import time
w = workload(model)
space = make_space(w, detect(), devices=1)
config = space.config(**{**{k.name: space.default()[k.name] for k in space.free}, "micro_batch": micro_batch})
begin = time.perf_counter()
training = Training(w, config, torch.device("cpu"))
for _ in range(2):
    loss = float(training.step())
print(json.dumps({"own": time.perf_counter() - begin, "loss": loss}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt2-tiny")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--micro-batch", type=int, default=4)
    options = parser.parse_args()

    from redline.base.device import detect, usable_cores
    from redline.models import workload
    from redline.runners import LocalRunner, RayRunner, TimingPlan, TrialRequest, TrialTerms

    device = detect()
    threads = usable_cores()
    load = workload(options.model)
    flops_of(load).per_sample  # counted once for each search, as `tune` does, and sent along with the workload
    space = make_space(load, device, devices=1)
    chosen = {knob.name: space.default()[knob.name] for knob in space.free}
    config = space.config(**{**chosen, "micro_batch": options.micro_batch})
    terms = TrialTerms(device=device, plan=TimingPlan(**PLAN), threads=threads if device.type == "cpu" else None)
    folder = Path(tempfile.mkdtemp(prefix="redline-bench-"))

    starts, runners = {}, {}
    for make in (LocalRunner, RayRunner):
        begin = time.perf_counter()
        runners[make.name] = make(load, terms)
        runners[make.name].wait_ready()
        starts[make.name] = time.perf_counter() - begin

    def redline_trial(name: str, number: int) -> float:
        request = TrialRequest(config=config, number=number, log=folder / f"{number}.log", timeout_s=300)
        begin = time.perf_counter()
        measured = runners[name].run(request)
        total = time.perf_counter() - begin
        if not measured.ok:
            raise SystemExit(f"trial failed: {measured.reason}")
        return total - measured.seconds_build - measured.seconds_warmup - measured.seconds_measure

    def fresh_trial() -> float:
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", FRESH, options.model, str(options.micro_batch), str(threads)],
            capture_output=True,
            text=True,
            check=True,
        )
        return time.perf_counter() - begin - json.loads(done.stdout.strip().splitlines()[-1])["own"]

    taken: dict[str, list[float]] = {"local": [], "ray": [], "fresh interpreter": []}
    for number in range(options.trials + 1):  # the first round warms caches and is left out
        round_ = {
            "local": redline_trial("local", number),
            "ray": redline_trial("ray", number),
            "fresh interpreter": fresh_trial(),
        }
        if number:
            for name, seconds in round_.items():
                taken[name].append(seconds)
    for runner in runners.values():
        runner.close()

    medians = {name: statistics.median(values) for name, values in taken.items()}
    print(f"{options.model} on {device.name}, {platform.system()}; {options.trials} trials each, in turns")
    print(f"{'':<20}{'median s':>10}{'min s':>9}{'max s':>9}{'fresh / it':>12}{'start s':>9}")
    for name, values in taken.items():
        ratio = medians["fresh interpreter"] / medians[name]
        start = f"{starts[name]:9.2f}" if name in starts else f"{'':>9}"
        print(f"{name:<20}{medians[name]:>10.3f}{min(values):>9.3f}{max(values):>9.3f}{ratio:>12.1f}{start}")
    print(f"ray - local: {medians['ray'] - medians['local']:+.3f} s")


if __name__ == "__main__":
    main()
