"""Prior for a search without a known model: effects of the standard knobs on throughput and memory of a typical
transformer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..base.device import Device
from ..estimator import Estimator, Hardware, Link, Shape, TrainingSetup, find_hardware
from ..estimator.facts.model_facts import FLASH
from ..estimator.measuring import table_entry
from ..knobs.strategy import DEGREES, STANDARD
from ..space import Config, Space
from .samplers.prior import ShapePrior

MODELS = (
    (Shape(layers=24, hidden=1024, heads=16, intermediate=2816, vocabulary=50304), 1024),
    (Shape(layers=24, hidden=2048, heads=16, intermediate=5632, vocabulary=50304), 2048),
    (Shape(layers=32, hidden=4096, heads=32, intermediate=11008, vocabulary=50304), 4096),
)
"""Typical models, and their sequence lengths in tokens: depths and widths of GPT-3 medium, XL and 6.7B (Brown et al.
2020, table 2.1) with the blocks of Llama.
"""
LEVEL, MEMORY_LEVEL = 2.0, 1.0
"""Common uncertainty of all throughputs, and of all peaks beyond the differences of the models; natural logarithms."""
GPU = "a100-80gb"
"""Assumed for GPUs that are not in the table."""
_MEMORY_BUS = Link(name="shared memory", gb_per_s=5.0, latency_us=50.0)  # gloo among ranks of one host
CPU = Hardware(
    name="cpu",
    memory_gib=8.0,
    tflops={"fp32": 0.1},
    memory_gb_per_s=10.0,
    intra_node=_MEMORY_BUS,
    inter_node=Link(name="10 Gbit/s Ethernet", gb_per_s=1.25, latency_us=50.0),
    devices_per_node=64,
    kind="cpu",
)
"""Order of magnitude of a rank on a CPU."""


KNOWN: Mapping[str, Callable[[Any], bool]] = {
    **{
        name: STANDARD[name].can_be
        for name in (
            "tp", "sp", "cp", "pp", "dp", "micro_batch", "grad_accum", "sequence_parallel", "fusion", "kernels",
            "fused_optimizer", "zero", "checkpoint_ratio", "precision", "offload",
        )
    },
    "attention": lambda value: value in ("eager", *FLASH),
}  # fmt: skip
"""Knobs with a known effect, each with a test of its values."""


def default_prior(space: Space, devices: int, hardware: Hardware) -> "DefaultPrior | None":
    """Returns the prior that follows from the knobs' names; None if fewer than two knobs that vary are standard with
    valid values.

    Args:
        space: what may vary.
        devices: devices of a trial.
        hardware: kind of the devices; nothing is measured.
    """
    known = [
        knob.name
        for knob in space.knobs
        if knob.name in KNOWN and (knob.derived or all(map(KNOWN[knob.name], knob.values)))
    ]
    vary = [name for name in known if not (knob := space.by_name[name]).derived and len(knob.values) > 1]
    return DefaultPrior(known, devices, hardware) if len(vary) > 1 else None


def assumed_hardware(device: Device, space: Space, devices: int) -> Hardware:
    """Hardware that trials probably run on: the devices here, or GPUs elsewhere if there are too few devices here."""
    if device.type == "cuda":
        return table_entry(device) or find_hardware(GPU)
    degrees = [value for knob in space.free if knob.name in DEGREES for value in knob.values]
    elsewhere = any(isinstance(degree, int) and degree > devices for degree in degrees)
    return find_hardware(GPU) if elsewhere else CPU


class DefaultPrior(ShapePrior):
    """Mean of the estimator's predictions for several models. Their differences are the prior's uncertainty.

    Each model's own uncertainty is added, so the covariance before any trial is that of a mixture of the models (law
    of total variance).

    Args:
        names: knobs with their standard meaning.
        devices: devices of a trial, if no knob sets the number of replicas.
        hardware: kind of the devices.
    """

    def __init__(self, names: Sequence[str], devices: int, hardware: Hardware) -> None:
        self._names, self._devices = tuple(names), devices
        self._estimators = []
        for shape, seq_len in MODELS:
            precision = "fp32" if hardware.kind == "cpu" else "bf16"
            setup = TrainingSetup(devices=devices, seq_len=seq_len, precision=precision)
            facts = shape.facts(precision=precision, attention=setup.attention, fusion=False)
            flops = math.log(facts.model_flops(seq_len))
            self._estimators.append((Estimator(facts, hardware, setup), facts.blocks, flops))

    def table(self, configs: Sequence[Config]) -> Any:
        """Predictions of many configurations, as `Prior` reads them: FLOP/s in place of a throughput, MiB of a
        typical model, both with their uncertainty; arrays of shape (n,), effects (n, factors).
        """
        columns = self._columns(configs)
        speeds, needs, own = [], [], []
        for estimator, blocks, flops in self._estimators:
            # A configuration with more stages than this model has blocks gets one stage per block.
            found = estimator.table({**columns, "pp": np.minimum(columns["pp"], blocks)})
            speeds.append(np.log(found.preference) + flops)
            needs.append(np.log(found.fullest_memory_mib))
            own.append(found.log_throughput_effects / math.sqrt(len(MODELS)))
        speed, effects = _mean_and_effects(speeds)
        need, memory_apart = _mean_and_effects(needs)
        whole, unknown = np.ones(len(configs)), np.full(len(configs), np.nan)
        return SimpleNamespace(
            throughput=np.exp(speed),
            peak_memory_mib=np.exp(need),
            fullest_memory_mib=np.exp(need),
            probability_fits=unknown,
            log_throughput_std=unknown,
            log_throughput_effects=np.column_stack([LEVEL * whole, effects, *own]),
            log_memory_effects=np.column_stack([MEMORY_LEVEL * whole, memory_apart]),
        )

    def _columns(self, configs: Sequence[Config]) -> dict[str, Any]:
        """Values of the standard knobs for all configurations; None for a configuration without the knob or with an
        invalid value.
        """
        columns: dict[str, Any] = {
            name: [value if name in config and KNOWN[name](value := config[name]) else None for config in configs]
            for name in self._names
        }
        names = [name for name in DEGREES if name != "dp"]
        split = {name: np.array([each or 1 for each in columns.get(name, [1] * len(configs))]) for name in names}
        rest = np.maximum(self._devices // np.prod(list(split.values()), axis=0), 1).tolist()
        dp = [each or other for each, other in zip(columns.get("dp", rest), rest)]
        return columns | split | {"dp": np.array(dp)}


def _mean_and_effects(logs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Means over models, shape (n,), and deviations whose squares sum to the variance between them, (n, models)."""
    each = np.stack(logs, axis=1)
    mean = each.mean(axis=1)
    return mean, (each - mean[:, None]) / math.sqrt(len(logs) - 1)
