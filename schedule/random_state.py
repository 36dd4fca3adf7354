"""Random streams of a mesh's ranks."""

import random
from typing import Any

import torch

from .parallel.collectives import axis_of


def with_index(device: torch.device) -> torch.device:
    """Returns a device with its index, like the device of a tensor."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def seed_ranks(seed: int, mesh: Any = None) -> int:
    """Seeds torch, NumPy and Python: the same for ranks of the `tp` axis, different for those of `dp` and `pp`.

    Dropout masks of replicas thus differ, and those of replicated computations of tensor-parallel ranks are equal. The
    primitive `fork_rng` makes those of computations on shards differ. Call it after the model is made: initial weights
    must be equal on all ranks.

    Returns:
        The seed of this rank.
    """
    import numpy

    number, stride = seed, 1
    for name in ("dp", "pp"):
        axis = axis_of(mesh, name)
        if axis is not None:
            number += stride * axis.rank
            stride *= axis.size
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number % 2**32)  # NumPy accepts 32 bits
    return number
