"""How alike two runs are, by what run.yaml says of them.

The weight of an earlier run is the correlation that is expected between what departs from the mean there and
here. It is a product of one factor for each thing that differs. The factors of model and devices are what
recorded tables show (`bench/warm_start.py --correlations`, log throughput of the same configurations of
nanotron on 8 to 512 H100: 0.71 between two models; 0.69, 0.50, 0.32 and 0.35 where the devices differ by a
factor of 2, 4, 8 and 16); the others are set with these as a measure. How much an earlier run really says, the
search itself finds out: a weight is where that begins.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANOTHER_MODEL = 0.7
CHANGED = 0.9
"""The same model by name and sizes, whose code, data or trainer are not the same."""
ANOTHER_DEVICE = 0.5
ANOTHER_KIND_OF_DEVICE = 0.25
"""GPUs there, a CPU here."""
PREDICTED = 0.2
"""Simulated there and measured here, or the reverse: an earlier run is then no more than a prediction."""
NUMBERS = {"devices": "devices", "seq_len": "tokens a sample", "global_batch": "samples a step"}
"""What is compared as a number, in words."""
DOUBLING = {"devices": 0.7, "seq_len": 0.85, "global_batch": 0.9}
"""For each factor of two between the two."""
LEAST = 0.3
"""What of a number can differ at the most."""


@dataclass(frozen=True, slots=True)
class TaskSimilarity:
    """How much an earlier run counts, and why not fully."""

    weight: float
    """Expected correlation, 0 to 1."""
    differences: tuple[str, ...] = ()
    """What differs, in words."""

    def __str__(self) -> str:
        if not self.differences:
            return ""
        share = "half" if round(self.weight, 2) == 0.5 else f"{100 * self.weight:.0f} %"
        return f"at {share} weight: {', '.join(self.differences)}"


def task_similarity(there: Mapping[str, Any], here: Mapping[str, Any]) -> TaskSimilarity:
    """How much a run that was asked `there` says of one that is asked `here`; both as run.yaml's `asked`."""
    found = [*_model(there, here), *_device(there, here), *_simulation(there, here)]
    for name, words in NUMBERS.items():
        before, now = _number(there, name), _number(here, name)
        if before and now and before != now:
            factor = max(LEAST, DOUBLING[name] ** abs(math.log2(before / now)))
            found.append((factor, f"{before:g} {words} instead of {now:g}"))
    return TaskSimilarity(math.prod(factor for factor, _ in found), tuple(words for _, words in found))


def same_devices(there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether two runs were on devices alike, both measured or both simulated as one cluster, however many they used."""
    return not _device(there, here) and not _simulation(there, here)


def _model(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[float, str]]:
    before, now = there.get("workload") or {}, here.get("workload") or {}
    names = [str(each.get("model")) for each in (there, here)]
    if "callable" in before or "callable" in now:
        if before.get("callable") == now.get("callable"):
            return []
        return [(ANOTHER_MODEL, f"another callable ({names[0]} -> {names[1]})")]
    if "command" in before or "command" in now:
        if all(before.get(each) == now.get(each) for each in ("command", "spec", "lora")):
            return []
        if now.get("spec") and all(before.get(each) == now.get(each) for each in ("spec", "lora")):
            return [(CHANGED, f"{now['spec']} is trained otherwise")]
        return [(ANOTHER_MODEL, f"another command ({names[0]} -> {names[1]})")]
    if before.get("id") == now.get("id"):
        return []
    if names[0] != names[1] or any(before.get(each) != now.get(each) for each in ("spec", "lora")):
        return [(ANOTHER_MODEL, f"another model ({names[0]} -> {names[1]})")]
    if all(there.get(each) == here.get(each) for each in ("seq_len", "global_batch")):
        return [(CHANGED, f"{names[1]} has changed since")]
    return []  # of which the sizes tell


def _device(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[float, str]]:
    before, now = there.get("devices") or {}, here.get("devices") or {}
    if before.get("name") == now.get("name"):
        return []
    words = f"({before.get('name')} -> {now.get('name')})"
    if before.get("type") != now.get("type"):
        return [(ANOTHER_KIND_OF_DEVICE, f"another kind of device {words}")]
    return [(ANOTHER_DEVICE, f"another device {words}")]


def _simulation(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[float, str]]:
    before, now = bool(there.get("simulated")), bool(here.get("simulated"))
    if before != now:
        return [(PREDICTED, "simulated there, measured here" if before else "measured there, simulated here")]
    if now and there.get("seed") != here.get("seed"):
        return [(PREDICTED, f"another simulated cluster (seed {there.get('seed')} -> {here.get('seed')})")]
    return []


def _number(asked: Mapping[str, Any], name: str) -> float | None:
    value = (asked.get("devices") or {}).get("used") if name == "devices" else asked.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else None
