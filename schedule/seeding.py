"""Random streams of the ranks of a mesh, for one's own loop."""

import random
from typing import Any

import torch

from .parallel.collectives import axis_of


def seed_ranks(seed: int, mesh: Any = None) -> int:
    """Seeds torch, NumPy and Python: ranks of the `tp` axis alike, those of `dp` and `pp` each otherwise.

    So replicas drop other elements, and what tensor-parallel ranks all compute stays equal; what each of them computes
    on its piece differs by the primitive `fork_rng`. Call it behind making the model, whose weights all ranks share.

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
