"""Checks of speed and memory against predictions and against hand-written loops."""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import cloudpickle
import torch
from redline.base.device import detect
from redline.estimator import Estimator
from redline.estimator.measuring import measure as measure_device, table_entry, this_machine
from redline.models.resolve import workload as preset
from redline.runners.dispatch import DryRuns
from redline.runners.place.local import LocalRunner
from redline.runners.runner import TrialRequest, TrialTerms
from redline.runners.trial.job import Job
from redline.runners.trial.timing import CudaClock, HostClock, TimingPlan, measure
from redline.space import Config
from redline.training import Training

from . import Row, Setting

PARITY = 0.97
"""Share of the speed of a hand-written loop that redline must reach."""
ONE_B: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "bf16 + kernels": {"precision": "bf16", "kernels": True},
    "bf16 + fusion": {"precision": "bf16", "fusion": True},
    "bf16 + checkpointing": {"precision": "bf16", "checkpoint_ratio": 1.0},
    "bf16 + kernels + fusion": {"precision": "bf16", "kernels": True, "fusion": True},
    "fp8 + fusion": {"precision": "fp8", "fusion": True},
    "fp8_rowwise + fusion": {"precision": "fp8_rowwise", "fusion": True},
    "tf32": {"precision": "tf32"},
    "fp32": {"precision": "fp32"},
}
SEVEN_B = {"precision": "bf16_pure", "checkpoint_ratio": 1.0, "kernels": True}

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def timing(setting: Setting) -> Iterator[Row]:
    """The timer of dry runs against sleeps of known length and against the wall clock."""
    if not setting.cuda:
        found = measure(lambda: time.sleep(0.02), HostClock(), TimingPlan(seconds=0.2))
        yield {"what": "20 ms of sleep", "ms": found.step_ms, "holds": found.step_ms >= 19.9}
        return
    cycles = 10_000_000
    torch.cuda._sleep(cycles)
    for factor in (1, 2, 4):
        found = measure(partial(torch.cuda._sleep, cycles * factor), CudaClock(), TimingPlan(seconds=1.0))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            torch.cuda._sleep(cycles * factor)
        torch.cuda.synchronize()
        wall = (time.perf_counter() - begin) * 100
        yield {
            "what": f"{factor} x 10 million cycles",
            "events_ms": found.step_ms,
            "wall_ms": wall,
            "spread_ms": found.spread_ms,
            "holds": abs(found.step_ms - wall) <= 0.03 * wall + 0.05,
        }


def models(setting: Setting) -> Iterator[Row]:
    """A model of 1.2 billion parameters with every knob of one device, compared with a hand-written loop."""
    workload = (
        preset("llama-tiny", global_batch=8) if setting.tiny else preset("llama3.2-1b", seq_len=4096, global_batch=4)
    )
    chosen = {name: ONE_B[name] for name in ("fp32", "bf16 + checkpointing")} if setting.tiny else ONE_B
    micro = 2 if setting.tiny else 1
    by_hand = {"bf16" if setting.cuda else "fp32": _by_hand(setting, micro)}
    yield from _trials(setting, workload, chosen, micro, by_hand)


def large(setting: Setting) -> Iterator[Row]:
    """A model of 7 billion parameters, which fits on an 80 GB device only without fp32 weights."""
    workload = (
        preset("llama-tiny", global_batch=4) if setting.tiny else preset("llama2-7b", seq_len=4096, global_batch=2)
    )
    yield from _trials(setting, workload, {"bf16_pure + checkpointing + kernels": SEVEN_B}, 2, {})


def _trials(
    setting: Setting,
    workload: Any,
    chosen: Mapping[str, Mapping[str, Any]],
    micro: int,
    by_hand: Mapping[str, Callable[[Any], float]],
) -> Iterator[Row]:
    device = detect()
    terms = TrialTerms(
        device=device, threads=None if setting.cuda else 1, plan=TimingPlan(seconds=0.1 if setting.tiny else 3.0)
    )
    estimator = Estimator(workload, this_machine())
    runner = LocalRunner(DryRuns(workload, compiles=not setting.tiny), terms, agent=setting.agent)
    for number, (what, knobs) in enumerate(chosen.items()):
        config = Config({"micro_batch": micro, "grad_accum": workload.global_batch // micro, **knobs})
        outcome = runner.run(TrialRequest(config=config, number=number))
        expected = estimator(config)
        row = {
            "what": f"{workload.name}, {what}",
            "status": outcome.status.value,
            "reason": outcome.reason[:200] or None,
            "throughput": outcome.throughput,
            "mfu": outcome.mfu,
            "step_ms": outcome.step_ms,
            "predicted_ms": expected.step_ms,
            "peak_mib": outcome.peak_memory_mib,
            "predicted_mib": expected.peak_memory_mib,
            "build_mib": max((each.build_memory_mib or 0.0 for each in outcome.ranks), default=None),
            "outside_mib": max((each.outside_mib or 0.0 for each in outcome.ranks), default=None),
            "holds": outcome.ok,
        }
        if what in by_hand and outcome.ok:
            job = Job(program=cloudpickle.dumps(by_hand[what]), device_type=setting.device, threads=1, timeout_s=60.0)
            (rank,) = runner.dispatch(job).ranks
            row["by_hand_ms"] = rank.report or rank.reason
            if rank.report:
                row["ratio"] = rank.report / outcome.step_ms
                row["holds"] = outcome.ok and (setting.tiny or row["ratio"] >= PARITY)
        yield row


def _by_hand(setting: Setting, micro: int) -> Callable[[Any], float]:
    """The loop of a typical script: returns the milliseconds of a step."""
    tiny = setting.tiny

    def program(context: Any) -> float:
        device = torch.device(context.device_type)
        workload = preset("llama-tiny", global_batch=8) if tiny else preset("llama3.2-1b", seq_len=4096, global_batch=4)
        with device:
            model = workload.build_model({}).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        batch = {name: each.to(device) for name, each in workload.batch(workload.global_batch, 0).items()}
        parts = [
            {name: each[at : at + micro] for name, each in batch.items()}
            for at in range(0, workload.global_batch, micro)
        ]
        times = []
        for _ in range(4 if tiny else 10):
            begin = time.perf_counter()
            for part in parts:
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = model(**part).loss / len(parts)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times[2:])

    return program


def offload(setting: Setting) -> Iterator[Row]:
    """A step with the optimizer in host memory, compared with the minimum: pinned copies and the update on the host."""
    workload = (
        preset("gpt2-tiny", global_batch=4, seq_len=16)
        if setting.tiny
        else preset("gpt2-large", seq_len=512, global_batch=8)
    )
    device, times = torch.device(setting.device), {}
    for name in ("none", "optimizer"):
        training = Training(workload, {"micro_batch": workload.global_batch, "offload": name}, device)
        times[name] = _median_ms(training.step, setting)
        del training
    with device:
        model = workload.build_model({})
    params = list(model.parameters())
    host = [torch.empty(each.shape, pin_memory=setting.cuda).copy_(each.detach()).requires_grad_() for each in params]
    for each in host:
        each.grad = torch.zeros(each.shape, pin_memory=setting.cuda)
    optimizer = workload.make_optimizer(host, fused=True)

    @torch.no_grad()
    def baseline() -> None:
        for param, copy in zip(params, host, strict=True):
            copy.grad.copy_(param, non_blocking=True)
        if setting.cuda:
            torch.cuda.synchronize()
        optimizer.step()
        for param, copy in zip(params, host, strict=True):
            param.copy_(copy, non_blocking=True)

    least = _median_ms(baseline, setting)
    extra = times["optimizer"] - times["none"]
    yield {
        "what": f"{workload.name}, {torch.get_num_threads()} threads",
        "on_device_ms": times["none"],
        "offloaded_ms": times["optimizer"],
        "pinned_baseline_ms": least,
        "holds": setting.tiny or extra <= 1.25 * least,
    }


def _median_ms(step: Callable[[], object], setting: Setting) -> float:
    marks = []
    for _ in range(4 if setting.tiny else 8):
        step()
        if setting.cuda:
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
    return statistics.median(b - a for a, b in itertools.pairwise(marks)) * 1e3


def measured(setting: Setting) -> Iterator[Row]:
    """The measurement of the device by `redline scale`, compared with the entry of the table."""
    found = measure_device()
    known = table_entry(found.device)
    for dtype, best in found.tflops.items():
        peak = known.rate(dtype) / 1e12 if known is not None else None
        yield {"what": dtype, "tflops": best, "table": peak, "holds": peak is None or 0.5 * peak <= best <= 1.05 * peak}
    yield {
        "what": "memory",
        "gb_per_s": found.memory_gb_per_s,
        "table": known and known.memory_gb_per_s,
        "host_gb_per_s": found.host_gb_per_s,
    }
