"""fork_rng: which random stream a module draws from under tensor parallelism."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...base.errors import ScheduleError
from ..forward import Layer, add_layer
from ..graph.called import check_called
from ..parallel.collectives import Axis
from ..primitive import primitive
from ..tree import ScheduledModule
from .shard import tensor_parallel


@primitive
def fork_rng(sch: ScheduledModule, differ: bool = True) -> None:
    """Lets the ranks of the `tp` axis draw different random numbers within this module, or the same ones.

    Dropout must differ between ranks where activations are cut, or the pieces would share one mask; it must
    agree where every rank has the whole, or they would drift apart. By default all ranks draw the same, if
    they were seeded alike. Put `fork_rng()` on a module that computes on pieces (attention cut by heads) and
    `fork_rng(differ=False)` on one inside of it that has the whole again.

    Each call draws one number from the stream that ranks share, so that replicated dropout stays in step, and
    recomputation by `checkpoint` draws the same masks.

    Args:
        differ: whether ranks draw different numbers.

    Raises:
        ScheduleError: no `tp` axis; called on this module before.
    """
    ranks = tensor_parallel(sch, "fork_rng")
    if sch.deferred(_apply):
        raise ScheduleError(f"fork_rng on '{sch.name}': a module's random stream is set once, and it already is")
    check_called(sch, "fork_rng")
    sch.defer("random", _apply, axis=ranks, differ=differ)


class ForkedRandom(Layer):
    """Runs what lies within on a random stream of this rank, or on the stream that ranks share."""

    order = 40

    def __init__(self, axis: Axis, differ: bool) -> None:
        self.axis = axis
        self.differ = differ

    def __call__(
        self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with _own(self.axis) if self.differ else _shared():
            return inner(*args, **kwargs)


class _Outer(threading.local):
    """The shared stream's states, set aside while a rank's own is in use; one a nesting level."""

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


def _apply(sch: ScheduledModule, module: nn.Module, context: Any, axis: Axis, differ: bool) -> None:
    add_layer(module, ForkedRandom(axis, differ))
