"""Parameters cut over the tensor-parallel axis of the mesh."""

import torch
from torch import nn


def full_shape(module: nn.Module, name: str) -> torch.Size | None:
    """The shape of a sharded tensor when whole; None where it is not sharded."""
    return None


def cut_fresh(root, fresh, moved): ...
