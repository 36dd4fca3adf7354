"""Randomness of a model: streams of a mesh's ranks, and contexts without dropout."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..base._torch import DropoutNd
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


@contextmanager
def quiet(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Sets the model's mode without dropout in the context, and restores everything.

    Rates of dropout are set to 0: those of dropout modules, and those that modules have as attributes
    (`attention_dropout`). Recurrent networks also train in evaluation, for which cuDNN has no backward pass; they use
    the mode for nothing else.
    """
    rates = [(module, name, getattr(module, name)) for module in model.modules() for name in rates_of(module)]
    try:
        with modes_kept(model):  # train() and the loop below change the mode of every module
            if training:
                model.train()
            else:
                for module in model.modules():
                    module.training = isinstance(module, nn.RNNBase)
            for module, name, _ in rates:
                setattr(module, name, 0.0)
            yield
    finally:
        for module, name, value in rates:
            setattr(module, name, value)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the mode of every module at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def rates_of(module: nn.Module) -> list[str]:
    """Returns the names of a module's attributes that are rates of dropout."""
    return [
        name
        for name, value in vars(module).items()
        if (name == "p" and isinstance(module, DropoutNd)) or ("drop" in name and isinstance(value, float))
    ]
