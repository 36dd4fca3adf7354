"""Random number streams of ranks that share layers or samples: one for all ranks, or one for each."""

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
        with _rank_stream(self.axis) if self.differ else _shared_stream():
            return inner(*args, **kwargs)


class _Outer(threading.local):
    """Saved states of the shared stream while a rank's own stream is in use, one per nesting level.

    It is thread-local, because recomputation in the backward pass runs on autograd's threads.
    """

    def __init__(self) -> None:
        self.states: list[Any] = []


_outer = _Outer()


@contextmanager
def _rank_stream(axis: Axis) -> Iterator[None]:
    if _outer.states:
        # Already on this rank's own stream.
        yield
        return
    # One draw of the shared stream, on every rank: the ranks stay synchronised, and each call gets other numbers.
    seed = int(torch.randint(2**62, (), device="cpu"))
    _outer.states.append(_get_state())
    torch.manual_seed(seed + 1 + axis.rank)
    try:
        yield
    finally:
        _set_state(_outer.states.pop())


@contextmanager
def forked_streams(axis: Axis) -> Iterator[None]:
    """Gives each rank of an axis a random stream of its own, as replicas have; code inside may fork it again."""
    seed = int(torch.randint(2**62, (), device="cpu"))
    outer_states, state = _outer.states, _get_state()
    _outer.states = []  # inside, this stream is the shared one
    torch.manual_seed(seed + 1 + axis.rank)
    try:
        yield
    finally:
        _set_state(state)
        _outer.states = outer_states


@contextmanager
def _shared_stream() -> Iterator[None]:
    if not _outer.states:
        yield
        return
    own_state, shared_state = _get_state(), _outer.states.pop()
    _set_state(shared_state)
    try:
        yield
    finally:
        _outer.states.append(_get_state())  # the shared stream has advanced
        _set_state(own_state)


def _get_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None


def _set_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
