"""A runner of whole searches that measures nothing: each trial is the estimate with some noise."""

import hashlib
from dataclasses import replace
from functools import cache
from math import prod

import numpy as np
import redline as rl
from redline.estimator.hardware import find_hardware
from redline.estimator.survey import device_of
from redline.results import Measurement, Status
from redline.runners.runner import Runner
from redline.tuner.budget import parse_memory

DEGREES = ("tp", "sp", "cp", "pp", "dp")


class PredictedRunner(Runner):
    """Args:
    model: as for `rl.workload`.
    hardware: name of the hardware that trials pretend to run on.
    devices: of a trial; None for the product of a configuration's degrees.
    global_batch: of configurations that do not determine it.
    memory_limit_mib: as in the request.
    sizes: further arguments of `rl.workload`.
    """

    name = "predicted"

    def __init__(self, model, hardware, *, devices=None, global_batch=None, memory_limit_mib=None, **sizes):
        self.device = device_of(find_hardware(hardware))
        self._model, self._hardware, self._devices, self._sizes = model, hardware, devices, sizes
        self._total, self._limit_mib = global_batch, memory_limit_mib
        self._estimator = cache(self._make)

    def _make(self, devices, total):
        workload = rl.workload(self._model, **self._sizes)
        setup = rl.TrainingSetup(
            devices=devices, seq_len=workload.seq_len, global_batch=total, memory_limit_mib=self._limit_mib
        )
        return rl.Estimator(workload.with_global_batch(total), self._hardware, setup)

    def run(self, request):
        config = request.config
        devices = self._devices or prod(config.get(name, 1) for name in DEGREES)
        replicas = config.get("dp") or devices // prod(config.get(name, 1) for name in DEGREES)
        samples = self._total if "grad_accum" not in config else config["micro_batch"] * config["grad_accum"] * replicas
        estimate = self._estimator(devices, samples)(config)
        random = np.random.default_rng(int.from_bytes(hashlib.sha256(config.id.encode()).digest()[:8]))
        measurement = Measurement(
            status=Status.OK,
            throughput=estimate.throughput * float(np.exp(random.normal(0.0, 0.03))),
            unit=estimate.unit,
            mfu=estimate.mfu,
            devices=devices,
            peak_memory_mib=estimate.peak_memory_mib,
            memory_limit_mib=estimate.memory_limit_mib,
            seconds_total=20.0,
        )
        if estimate.peak_memory_mib <= estimate.memory_limit_mib:
            return measurement
        return replace(measurement, status=Status.OOM, reason="more memory is needed", throughput=None, mfu=None)


def predicted(model, hardware, **options):
    """The arguments of `rl.tune` for a search with a `PredictedRunner`; `devices` counts those of each trial."""
    limit = options.get("memory_limit")
    sizes = {name: options[name] for name in ("seq_len",) if name in options}
    counts = {name: options.get(name) for name in ("devices", "global_batch")}
    runner = PredictedRunner(model, hardware, memory_limit_mib=parse_memory(limit), **counts, **sizes)
    return {"runner": runner, "hardware": hardware, **options}
