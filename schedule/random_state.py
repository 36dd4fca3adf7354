"""Random streams of a mesh's ranks."""

import random
from typing import Any

import torch

from .parallel.collectives import axis_of


def full(device: torch.device) -> torch.device:
    """A device with its index, like the device of a tensor."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def seed_ranks(seed: int, mesh: Any = None) -> int:
    """Seeds torch, NumPy and Python: the same for ranks of the `tp` axis, different for those of `dp` and `pp`.

    Replicas thus drop different elements, and replicated computations of tensor-parallel ranks stay equal;
    computations on pieces differ by the primitive `fork_rng`. Call it after making the model, whose weights all ranks
    share.

    Returns:
        The seed of this rank.
    """
    import numpy

    number, stride = seed, 1
    for name in ("dp", "pp"):
        found = axis_of(mesh, name)
        if found is not None:
            number += stride * found.rank
            stride *= found.size
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number % 2**32)
    return number
