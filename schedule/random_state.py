"""Randomness of a model: streams of ranks, one for all or one for each, and contexts without dropout."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..base._torch import DropoutNd
from .forward import Inner, Layer
from .parallel.collectives import Axis, axis_of


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


class ForkedRandom(Layer):
    """Runs a module on this rank's own random stream (`differ`), or on the stream that ranks share."""

    order = 40

    def __init__(self, axis: Axis, differ: bool) -> None:
        self.axis = axis
        self.differ = differ

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _rank_stream(self.axis) if self.differ else _shared_stream():
            return inner(*args, **kwargs)


class _Outer(threading.local):
    """Thread-local, because recomputation in the backward pass runs on autograd's threads."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        """Saved states of the shared stream while a rank's own stream is in use, one per nesting level."""


_outer = _Outer()


@contextmanager
def _rank_stream(axis: Axis) -> Iterator[None]:
    if _outer.states:
        # Already on this rank's own stream.
        yield
        return
    with _stream_of(axis) as shared_states:
        _outer.states.append(shared_states)
        try:
            yield
        finally:
            shared_states[:] = _outer.states.pop()


@contextmanager
def forked_streams(axis: Axis) -> Iterator[None]:
    """Gives each rank of an axis a random stream of its own, as replicas have; code inside may fork it again."""
    outer_states = _outer.states
    _outer.states = []  # inside, this stream is the shared one
    try:
        with _stream_of(axis):
            yield
    finally:
        _outer.states = outer_states


@contextmanager
def _stream_of(axis: Axis) -> Iterator[list[torch.Tensor]]:
    """Seeds this rank's own stream; yields the states that are restored at the end."""
    # One draw of the shared stream, on every rank: the ranks stay synchronised, and each call gets other numbers.
    seed = int(torch.randint(2**62, (), device="cpu"))
    states = generator_states()
    torch.manual_seed(seed + 1 + axis.rank)
    try:
        yield states
    finally:
        _set_states(states)


@contextmanager
def _shared_stream() -> Iterator[None]:
    if not _outer.states:
        yield
        return
    own_states = generator_states()
    _set_states(_outer.states.pop())
    try:
        yield
    finally:
        _outer.states.append(generator_states())  # the shared stream has advanced
        _set_states(own_states)


def generator_states() -> list[torch.Tensor]:
    """Returns the states of the CPU's generator and, in a process that uses a GPU, of the current GPU's."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if cuda else [])]


def _set_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
