"""Outcomes that are not certain: stalls of the network, and retries of the allocator."""

from collections.abc import Mapping

import numpy as np

from .constants import Constants
from .estimate import Z80
from .hardware import Hardware
from .knob_arrays import KnobArrays


def stall_seconds(cols: KnobArrays, constants: Constants) -> np.ndarray:
    """Seconds that a stall of the network would add to a step, shape (n,)."""
    return (cols.grad_accum + cols.pp - 1) * 2.0 * np.minimum(cols.pp - 1, 2) * constants.stall_ms * 1e-3


def stall_chance(cols: KnobArrays, hardware: Hardware, constants: Constants) -> np.ndarray:
    """Chance that a run's pipeline stalls on the network, 0 to 1; see `Constants.stall_ms`."""
    nodes = cols.tp * cols.pp * cols.replicas / hardware.devices_per_node
    least = constants.stall_least
    chance = least + (1 - least) / (1 + (constants.stall_nodes / nodes) ** 6)
    if constants.stalls_without_zero:
        # More gradient rings beside the pipeline make a stall more likely.
        rings = 1 / (1 + (constants.stall_rings / (cols.replicas * nodes)) ** 3)
        chance = np.where((cols.zero == 0) & (cols.replicas > 1), np.maximum(chance, rings), chance)
    possible = (nodes > 1) & (cols.pp > 1) & (constants.stall_ms > 0)
    return np.where(possible, chance, 0.0)


def retry_chance(fullest: Mapping[str, np.ndarray], peak: np.ndarray, std: np.ndarray, limit_mib: float) -> np.ndarray:
    """Chance that the allocator of a run that survives had to free and allocate again, shape (n,).

    There was room for its tensors, but not for slack.

    Args:
        fullest: terms of the fullest rank's peak, MiB.
        peak: the corrected peak, MiB; infinite for what cannot run.
        std: standard deviation of its logarithm.
        limit_mib: memory of the allocator.
    """
    from scipy.special import log_ndtr

    is_finite = np.isfinite(peak)
    live = 1 - np.where(is_finite, fullest["slack"], 0.0) / np.where(is_finite, sum(fullest.values()), 1.0)
    room = np.log(limit_mib / np.where(is_finite, peak, 1.0))
    # Far beyond the limit both chances vanish; their ratio is computed from logarithms.
    ratio = log_ndtr(room / std) - log_ndtr((room - np.log(live)) / std)
    return np.where(is_finite, -np.expm1(ratio), 0.0)


def beyond(chance: np.ndarray, cost: np.ndarray | float, std: np.ndarray) -> np.ndarray:
    """Distance by which an outcome of that chance, `cost` away in log time, moves the end of an 80 % interval, shape (n,)."""
    from scipy.special import ndtri

    chance = np.clip(chance, 1e-9, 1.0)
    # A tenth is left beyond the end: part of the other outcome, or all of it and part of this one.
    end = np.where(
        chance > 0.1,
        cost + std * ndtri(1 - 0.1 / np.maximum(chance, 0.1)),
        std * ndtri(np.minimum(0.9 / (1 - chance), 1 - 1e-9)),
    )
    return np.clip(end - Z80 * std, 0.0, cost)
