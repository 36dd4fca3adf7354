"""Runs made up for the browser tests."""

import json
import random

import optuna
from optuna.storages.journal import BaseJournalBackend, JournalStorage
from redline.results import Measurement, RunFolder, Status, Trial
from redline.results.table import Table

KNOBS = {
    "micro_batch": (1, 2, 4, 8, 16), "checkpoint_ratio": (0.0, 0.25, 0.5, 0.75, 1.0),
    "precision": ("fp32", "bf16"), "attention": ("sdpa", "eager"), "fusion": (False, True),
}  # fmt: skip
FAILURES = (Status.CRASH, Status.TIMEOUT, Status.WRONG, Status.SKIPPED)


def trial(number, rng, status=None):
    """Returns a trial of a made-up machine with 1000 MiB; every status occurs."""
    config = {name: rng.choice(values) for name, values in KNOBS.items()}
    memory = 100 + 80 * config["micro_batch"] * (1.2 - config["checkpoint_ratio"])
    speed = (
        1000 * config["micro_batch"] ** 0.5 * (1.5 if config["fusion"] else 1) * (1 - 0.2 * config["checkpoint_ratio"])
    )
    if status is None:
        status = Status.OOM if memory > 1000 else rng.choice(FAILURES) if rng.random() < 0.08 and number else Status.OK
    fields = (
        {}
        if status is Status.SKIPPED
        else {
            "started": 1.7e9 + 10 * number,
            "seconds_total": 9.0,
            "devices": 1,
            "memory_limit_mib": 1000.0,
            "log": f"logs/{number}.log",
        }
    )
    if status is Status.OK:
        fields |= {
            "throughput": speed,
            "unit": "tokens/s",
            "step_ms": 1e6 / speed,
            "step_ms_spread": 1e4 / speed,
            "peak_memory_mib": memory,
            "loss": 9.5,
        }
    elif status is Status.OOM:
        fields |= {"peak_memory_mib": memory}
    reason = "" if status is Status.OK else f"{status}: made up, of {memory:.0f} MiB"
    return Trial(
        number=number, config=config, sampler="default" if number == 0 else "tpe", predicted_throughput=speed * 1.1,
        predicted_memory_mib=memory * 0.9, measurement=Measurement(status=status, reason=reason, **fields),
    )  # fmt: skip


class Point(dict):
    """The part of a configuration's interface that a run's folder needs."""

    id = property(lambda self: "-".join(f"{name}={value}" for name, value in sorted(self.items())))
    to_dict = dict.copy


def measured(throughput, **more):
    """Returns a successful measurement on eight devices, with the other values derived from the throughput."""
    fields = {
        "unit": "tokens/s",
        "step_ms": 1e6 / throughput,
        "step_ms_spread": 1e4 / throughput,
        "peak_memory_mib": 500.0,
        "memory_limit_mib": 1000.0,
        "devices": 8,
        "mfu": 0.3,
        "started": 1.7e9,
        "seconds_total": 9.0,
    }
    return Measurement(status=Status.OK, throughput=throughput, **fields | more)


def write_search(folder, outcomes, again=None, *, finished=True, **asked):
    """Writes the folder of a search through redline.results' own `RunFolder`.

    Args:
        folder: the run's folder.
        outcomes: a configuration and its measurement for each trial; the first is the default.
        again: throughputs of re-measurements by trial.
        finished: True to write best.yaml.
        asked: more entries of `asked` in run.yaml.
    """
    knobs = {name: sorted({config[name] for config, _ in outcomes}, key=str) for name in outcomes[0][0]}
    asked = {
        "model": "made-up",
        "workload": {"id": "x"},
        "devices": {"type": "cuda", "name": "H100", "count": 8, "used": 8},
        "seed": 0,
    } | asked
    asked["space"] = {"knobs": [{"name": name, "values": values} for name, values in knobs.items()]}
    with RunFolder.open(
        folder, asked, knobs={name: tuple(values) for name, values in knobs.items()}, make_config=Point
    ) as run:
        for number, (config, outcome) in enumerate(outcomes):
            run.start(
                Point(config),
                sampler="bayes" if number else "default",
                predicted_throughput=900.0,
                predicted_memory_mib=450.0,
            )
            run.finish(number, outcome)
        for number, throughputs in (again or {}).items():
            run.remeasure(number, throughputs)
        if finished:
            run.write_best(["redline", "tune", "made-up"], devices=asked["devices"])
    return folder


STUDY = "made-up"
"""Name of the study of `write_run`, which its run.yaml must name."""


class Records(BaseJournalBackend):
    """A journal in memory: thousands of trials are written at once."""

    def __init__(self):
        self.lines = []

    def read_logs(self, log_number_from):
        return map(json.loads, self.lines[log_number_from:])

    def append_logs(self, logs):
        self.lines += [json.dumps(log) for log in logs]


def write_run(folder, count, seed=0, trials=None):
    """Writes a folder with the ledger and the table of `count` trials, and returns them."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    made = trials if trials is not None else [trial(number, rng) for number in range(count)]
    (folder / "run.yaml").write_text(f"format: 1\nstudy: {STUDY}\nasked: {{}}\n")
    records = Records()
    storage = JournalStorage(records)
    study = storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], STUDY)
    for each in made:
        attributes = {"config": dict(each.config), "sampler": each.sampler, "measurement": each.measured.to_dict()}
        predicted = {name: getattr(each, name) for name in ("predicted_throughput", "predicted_memory_mib")}
        attributes |= {name: value for name, value in predicted.items() if value is not None}
        storage.create_new_trial(
            study, optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL, user_attrs=attributes)
        )
    (folder / "study.log").write_text("".join(f"{line}\n" for line in records.lines))
    Table(folder / "trials.csv", dict.fromkeys(name for each in made for name in each.config) or KNOBS).write(made)
    return made
