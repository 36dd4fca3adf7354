"""Outcomes that are not certain: stalls of the network."""

import numpy as np

from .constants import Constants
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
