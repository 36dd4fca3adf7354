"""Which terms of a prediction calibration scales together."""

from collections.abc import Mapping

import numpy as np

from .calibration import Correction
from .knob_arrays import KnobArrays
from .memory import MEMORY_TERMS
from .time import TIME_TERMS

TIME_GROUPS: Mapping[str, tuple[str, ...]] = {
    "compute": ("matmul", "attention", "memory-bound", "recomputation", "optimizer"),
    "launches": ("launches", "fixed"),
    "links": ("tensor parallel", "data parallel", "parameter gathers", "pipeline transfers", "offload"),
    "stalls": ("stalls", "allocator retries"),
}
"""Terms of the step by group; the bubble goes with what a slot consists of."""
NETWORK = "network"
"""A further group: the terms of `links` where they leave the node."""
MEMORY_GROUPS: Mapping[str, tuple[str, ...]] = {
    "static": ("parameters", "gradients", "optimizer", "master", "weight copies"),
    "activations": (
        "gradient copies", "activations", "checkpoints", "recomputation", "logits and loss", "buffers",
        "slack",
    ),
    "overhead": ("context",),
}  # fmt: skip
"""Terms of the peak by group."""
_IN_SLOTS = ("matmul", "attention", "memory-bound", "recomputation", "launches", "tensor parallel")


def time_names() -> tuple[str, ...]:
    """Names of the columns of `time_groups`."""
    return (*TIME_GROUPS, NETWORK)


def leaves_node(cols: KnobArrays, per_node: int) -> dict[str, np.ndarray]:
    """For each term of `links`, where its traffic goes between nodes: booleans, shape (n,)."""
    stage = cols.tp * cols.dp > per_node
    return {
        "tensor parallel": cols.tp > per_node,
        "data parallel": stage,
        "parameter gathers": cols.tp * cols.shares > per_node,
        "pipeline transfers": (cols.tp * cols.dp * cols.pp > per_node) & (cols.tp * cols.dp >= per_node),
        "offload": np.zeros(len(cols), bool),
    }


def time_groups(time: Mapping[str, np.ndarray], far: Mapping[str, np.ndarray]) -> np.ndarray:
    """Terms summed by group, shape (n, len(time_names())), the bubble shared out as a slot is made up."""
    slots = sum(time[name] for name in _IN_SLOTS)
    with np.errstate(divide="ignore", invalid="ignore"):
        more = np.where(slots > 0, 1 + time["bubble"] / slots, 1.0)
    whole = {name: time[name] * (more if name in _IN_SLOTS else 1.0) for name in TIME_TERMS if name != "bubble"}
    columns = [
        sum(np.where(far[name], 0.0, whole[name]) if name in far else whole[name] for name in names)
        for names in TIME_GROUPS.values()
    ]
    columns.append(sum(np.where(away, whole[name], 0.0) for name, away in far.items()))
    return np.stack(columns, axis=1)


def memory_groups(memory: Mapping[str, np.ndarray]) -> np.ndarray:
    """Terms summed by group, shape (n, len(MEMORY_GROUPS))."""
    return np.stack([sum(memory[name] for name in names) for names in MEMORY_GROUPS.values()], axis=1)


def corrected_time(
    time: Mapping[str, np.ndarray], far: Mapping[str, np.ndarray], total: np.ndarray, correction: Correction
) -> dict[str, np.ndarray]:
    """The corrected terms of the step, `time.NAME` each; what is left of `total` is the bubble."""
    factors = dict(zip(time_names(), np.exp(correction.theta), strict=True))
    out = {}
    for group, names in TIME_GROUPS.items():
        for name in names:
            away = far.get(name)
            factor = factors[group] if away is None else np.where(away, factors[NETWORK], factors[group])
            out[f"time.{name}"] = time[name] * factor
    with np.errstate(invalid="ignore"):
        rest = total - sum(out.values())
    out["time.bubble"] = np.where(np.isfinite(rest), np.maximum(rest, 0.0), 0.0)
    return {f"time.{name}": out[f"time.{name}"] for name in TIME_TERMS}


def corrected_memory(memory: Mapping[str, np.ndarray], correction: Correction) -> dict[str, np.ndarray]:
    """The corrected terms of the peak, `memory.NAME` each."""
    out = {}
    for factor, names in zip(np.exp(correction.theta), MEMORY_GROUPS.values(), strict=True):
        for name in names:
            out[f"memory.{name}"] = memory[name] * factor
    return {f"memory.{name}": out[f"memory.{name}"] for name in MEMORY_TERMS}
