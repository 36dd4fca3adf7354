"""Accuracy of the estimator for redline's own dry runs on this machine: memory and time over a grid of knobs.

    python bench/dry_runs.py [--model gpt2-tiny] [--devices 1] [--trials 16] [--calibrate 3] [--save FILE]
    python bench/dry_runs.py --model gpt2-tiny --load FILE

Runs configurations spread over the model's default space with the local runner and prints measured and predicted
values: the largest differences, and median absolute errors before and after calibration with `--calibrate` trials, on
the others. On a machine without GPUs ranks are processes and memory is that of each rank.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
from pathlib import Path

import numpy as np

PLAN = {"warmup_min_steps": 1, "warmup_max_steps": 2, "min_steps": 2, "max_steps": 3, "seconds": 0.5}
KNOBS = ("tp", "pp", "dp", "zero", "micro_batch", "grad_accum", "checkpoint_ratio", "sequence_parallel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt2-tiny")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--global-batch", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--calibrate", type=int, default=3)
    parser.add_argument("--save", metavar="FILE", help="save configurations and measurements as JSON")
    parser.add_argument("--load", metavar="FILE", help="load saved measurements instead of running trials")
    parser.add_argument("--fix", action="append", default=[], metavar="KNOB=VALUE")
    options = parser.parse_args()

    from redline.base.device import detect, usable_cores
    from redline.estimator.request import estimate_request
    from redline.results import Trial
    from redline.runners import LocalRunner, TimingPlan, TrialRequest, TrialTerms

    asked = estimate_request(
        options.model,
        devices=options.devices,
        seq_len=options.seq_len,
        global_batch=options.global_batch,
        fix=dict(_knob(each) for each in options.fix),
    )
    estimator = asked.estimator
    if options.load:
        return show(options, estimator, load(Path(options.load), asked.space))
    configs = sorted(asked.space, key=lambda config: sorted(config.items(), key=str).__repr__())
    random.Random(0).shuffle(configs)
    configs = configs[: options.trials]
    device = detect()
    terms = TrialTerms(
        device=device,
        devices=options.devices,
        plan=TimingPlan(**PLAN),
        threads=max(usable_cores() // options.devices, 1) if device.type == "cpu" else None,
    )
    folder = Path(tempfile.mkdtemp(prefix="redline-dry-runs-"))
    done: list[Trial] = []
    with LocalRunner(asked.workload, terms) as runner:
        for number, config in enumerate(configs):
            request = TrialRequest(config=config, number=number, log=folder / f"{number}.log", timeout_s=300)
            measured = runner.run(request)
            if not measured.ok:
                print(f"{dict(config)}: {measured.status}: {measured.reason}")
            done.append(Trial(number=number, config=config, measurement=measured))
            if options.save:
                save(Path(options.save), done)
    print(f"{options.model}, {options.devices} ranks on {device.name}, {platform.system()}; {len(done)} dry runs")
    show(options, estimator, done)


def show(options, estimator, done) -> None:
    """Prints measured and predicted values."""
    ok = [trial for trial in done if trial.measurement.ok]
    shown = [name for name in KNOBS if any(name in trial.config for trial in ok)]
    table = estimator.table([trial.config for trial in ok])
    print("".join(f"{name[:9]:>10}" for name in shown) + f"{'MiB':>10}{'predicted':>10}{'ms':>10}{'predicted':>10}")
    for index, trial in enumerate(ok):
        values = "".join(f"{trial.config.get(name, '')!s:>10}" for name in shown)
        print(
            f"{values}{trial.measurement.peak_memory_mib:>10.0f}{table.peak_memory_mib[index]:>10.0f}"
            f"{trial.measurement.step_ms:>10.1f}{table.step_ms[index]:>10.1f}"
        )
    say("uncalibrated", estimator, ok)
    if options.calibrate:
        found = [
            errors(estimator.calibrate(chosen), [trial for trial in ok if trial not in chosen])
            for seed in range(10)
            for chosen in [random.Random(seed).sample(ok, min(options.calibrate, len(ok) - 1))]
        ]
        memory, time = (statistics.mean(each[at] for each in found) for at in (0, 1))
        print(f"after {options.calibrate} of them: memory {100 * memory:.1f} %, time {100 * time:.1f} %")


def save(path, trials) -> None:
    """Writes configurations with their measurements."""
    kept = [{"config": dict(each.config), "measurement": each.measurement.to_dict()} for each in trials]
    path.write_text(json.dumps(kept))


def load(path, space):
    """Returns the trials of a file written by `save`; their configurations must belong to the space."""
    from redline.results import Measurement, Trial

    free = {knob.name for knob in space.free}
    return [
        Trial(
            number=number,
            config=space.config({name: value for name, value in each["config"].items() if name in free}),
            measurement=Measurement.from_dict(each["measurement"]),
        )
        for number, each in enumerate(json.loads(path.read_text()))
    ]


def errors(estimator, trials) -> tuple[float, float]:
    """Returns the median absolute errors of memory and time."""
    table = estimator.table([trial.config for trial in trials])
    memory = np.array([trial.measurement.peak_memory_mib for trial in trials])
    step = np.array([trial.measurement.step_ms for trial in trials])
    return (
        float(np.median(np.abs(table.peak_memory_mib / memory - 1))),
        float(np.median(np.abs(table.step_ms / step - 1))),
    )


def say(what: str, estimator, trials) -> None:
    memory, time = errors(estimator, trials)
    print(f"{what}: memory {100 * memory:.1f} %, time {100 * time:.1f} % (median absolute errors)")


def _knob(text: str) -> tuple[str, object]:
    import yaml

    name, _, value = text.partition("=")
    return name, yaml.safe_load(value)


if __name__ == "__main__":
    main()
