"""Folders of trainings with made-up numbers."""

import json
import math

from redline.results.trained import LOG, write_document

BEGAN = 1_790_000_000.0


def step_line(step, loss, *, steps=400, **more):
    """Returns a log line of a step, in the loop's format."""
    return {
        "time": BEGAN + step, "kind": "step", "step": step, "samples": 32 * step, "loss": loss,
        "lr": 1e-3 * min(1.0, step / 50) * (1 - step / (2 * steps)), "grad_norm": 1.0 + 1 / (1 + step / 40),
        "step_ms": 250.0, "samples_per_second": 128.0, "tokens_per_second": 8192.0 + step, "tflops_per_device": 1.5,
        "mfu": None, "memory_mib": 900.0 + step / 10, "seconds": step / 4, "seconds_left": (steps - step) / 4, **more,
    }  # fmt: skip


def write_training(folder, lines, *, strategies=({"zero": 0},), at=(0,), steps=400, **document):
    """Writes a training with these lines in its log; its configurations begin at the steps of `at`."""
    folder.mkdir(parents=True, exist_ok=True)
    had = [
        {"step": step, "devices": 2, "configuration": {"tp": 1, "precision": "bf16", **each}, "why": "the run's winner"}
        for step, each in zip(at, strategies)
    ]
    known = {"asked": {"paths": ["corpus.txt"]}, "steps": steps, "name": "llama-tiny", "unit": "tokens/s"}
    write_document(folder, {**known, "data": {"samples": 6557}, "strategies": had, **document})
    with (folder / LOG).open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in lines)


def eventful(folder):
    """Writes a training that was resumed twice, the second time with another configuration, and failed to save once.

    Steps that were repeated after a resume first have losses of 99 and 77, which no page may show.
    """
    lines = [step_line(step, loss(step)) for step in range(10, 101, 10)] + [held_out(100), saved(100)]
    lines += [step_line(step, 99.0) for step in range(110, 201, 10)] + [held_out(200)]
    lines += [{"time": BEGAN, "kind": "resumed", "step": 100, "checkpoint": "step-100"}]
    lines += [step_line(step, loss(step)) for step in range(110, 201, 10)] + [held_out(200), saved(200)]
    lines += [step_line(step, 77.0) for step in range(210, 251, 10)] + [
        saved(240, "[Errno 28] No space left on device")
    ]
    lines += [{"time": BEGAN, "kind": "resumed", "step": 200, "checkpoint": "step-200"}]
    lines += [step_line(step, loss(step)) for step in range(210, 301, 10)] + [held_out(300)]
    write_training(folder, lines, strategies=({"zero": 0, "pp": 1}, {"zero": 3, "pp": 1}), at=(0, 200))


def loss(step):
    return 2.0 + 7.0 * math.exp(-step / 120) + 0.1 * math.sin(step)


def held_out(step):
    return {"time": BEGAN + step, "kind": "evaluation", "step": step, "loss": loss(step) + 0.2, "steps": 4}


def saved(step, failure=""):
    times = {"seconds": 1.5, "stalled": 0.1}
    return {"time": BEGAN + step, "kind": "checkpoint", "step": step, "failure": failure, **times}
