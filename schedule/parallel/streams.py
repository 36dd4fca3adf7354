"""Random number streams of ranks that share layers or samples: one for all of them, or one for each."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..forward import Inner, Layer
from .collectives import Axis


class ForkedRandom(Layer):
    """Runs a module on this rank's own random stream (`differ`), or on the stream that ranks share."""

    order = 40

    def __init__(self, axis: Axis, differ: bool) -> None:
        self.axis = axis
        self.differ = differ

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _own(self.axis) if self.differ else _shared():
            return inner(*args, **kwargs)


class _Outer(threading.local):
    """The saved states of the shared stream while a rank's own is in use, one per nesting level."""

    def __init__(self) -> None:
        self.states: list[Any] = []


_outer = _Outer()


@contextmanager
def _own(axis: Axis) -> Iterator[None]:
    if _outer.states:
        # Already on this rank's own stream.
        yield
        return
    seed = int(torch.randint(2**62, (), device="cpu"))
    _outer.states.append(_get())
    torch.manual_seed(seed + 1 + axis.rank)
    try:
        yield
    finally:
        _set(_outer.states.pop())


@contextmanager
def forked_streams(axis: Axis) -> Iterator[None]:
    """Gives each rank of an axis its own random stream, as replicas have; code inside may fork it again."""
    seed = int(torch.randint(2**62, (), device="cpu"))
    outside, state = _outer.states, _get()
    _outer.states = []
    torch.manual_seed(seed + 1 + axis.rank)
    try:
        yield
    finally:
        _set(state)
        _outer.states = outside


@contextmanager
def _shared() -> Iterator[None]:
    if not _outer.states:
        yield
        return
    own, shared = _get(), _outer.states.pop()
    _set(shared)
    try:
        yield
    finally:
        _outer.states.append(_get())
        _set(own)


def _get() -> tuple[torch.Tensor, torch.Tensor | None]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None


def _set(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
