"""Replaces repeated blocks by stand-ins while a step is traced.

Thirty-two identical blocks keep, compute and move the same, so it is enough to record the first of a kind, the second (the first
may contain tensors that are created once for all) and the last (its backward begins while the loss's gradient is live). The
others return outputs like those of the second without running, and its record is copied for them.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ...models.skeleton import stand_ins_for
from .step_trace import Segment, Spec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .recorder import Recorder


@dataclass(slots=True)
class _Run:
    """Record of a block that stand-ins copy."""

    inputs: Any
    """Its `(args, kwargs)`, with a `Spec` for every tensor."""
    outputs: Any = None
    """Return value, with a `_Made` or a `_Passed` for every tensor."""
    live: float = 0.0
    """Bytes that stay live after it, without its outputs."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that a block created."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class _Passed:
    """An input tensor that a block returned."""

    leaf: int
    """Index among the tensors of its inputs."""


class StandIns:
    """Replaces blocks of a model that are identical to one that runs.

    Args:
        model: the traced model.
        blocks: paths of its repeated blocks, in their order.
        recorder: records the step.
    """

    def __init__(self, model: "nn.Module", blocks: "tuple[str, ...]", recorder: "Recorder") -> None:
        self._model, self._recorder = model, recorder
        self._runs: dict[str, _Run] = {}
        self._stood_in: dict[str, str] = {}
        self._twin_of = stand_ins_for(model, blocks)

    def standing_in(self) -> ExitStack:
        """Replaces blocks while it is open."""
        stack = ExitStack()
        for path in {*self._twin_of, *self._twin_of.values()}:
            module = self._model.get_submodule(path)
            run = self._watching(path, module.forward)
            if path in self._twin_of:
                run = self._replacing(path, module.forward)
            module.forward = run
            stack.callback(delattr, module, "forward")
        return stack

    def segments(self, seen: list[Segment]) -> list[Segment]:
        """The segments of a step; those of replaced blocks are copies of their twins' segments."""
        by_path = {segment.path: segment for segment in seen if segment.block}
        return [
            _as(segment, by_path[self._stood_in[segment.path]])
            if segment.block and segment.path in self._stood_in
            else segment
            for segment in seen
        ]

    def _watching(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._recorder.live
            out = forward(*args, **kwargs)
            given = _tensors((args, kwargs))
            made = _map(lambda each: _what(each, given), out)
            size = sum(_bytes(each) for each in _leaves(made) if isinstance(each, _Made))
            self._runs[path] = _Run(_specs((args, kwargs)), made, self._recorder.live - before - size)
            return out

        return run

    def _replacing(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            twin = self._runs.get(self._twin_of[path])
            given = _tensors((args, kwargs))
            if twin is None or not _equal(twin.inputs, _specs((args, kwargs))) or not _reachable(twin, given):
                return forward(*args, **kwargs)
            self._stood_in[path] = self._twin_of[path]
            return self._like(twin, given)

        return run

    def _like(self, twin: _Run, given: "list[torch.Tensor]") -> Any:
        made = [each for each in _leaves(twin.outputs) if isinstance(each, _Made)]
        fresh = iter(_function().apply(self._recorder, twin.live, tuple(made), *given))
        self._recorder.keep(twin.live)

        def give(leaf: Any) -> Any:
            if isinstance(leaf, _Passed):
                return given[leaf.leaf]
            return next(fresh) if isinstance(leaf, _Made) else leaf

        return _map_all(give, twin.outputs)


def _as(segment: Segment, twin: Segment) -> Segment:
    """The segment of a replaced block: its twin's, with its own weights."""

    def own(name: str) -> str:
        inside = name.startswith(twin.path + ".")
        return segment.path + name.removeprefix(twin.path) if inside else name

    return replace(
        twin,
        path=segment.path,
        after=segment.after,
        inputs=segment.inputs,
        products=[replace(each, weight=own(each.weight)) for each in twin.products],
        parameters={own(name) for name in twin.parameters},
    )


def _reachable(twin: _Run, given: "list[torch.Tensor]") -> bool:
    """True if gradients can flow from the created tensors to the given ones."""
    if any(isinstance(each, _Made) and each.requires_grad for each in _leaves(twin.outputs)):
        return any(each.requires_grad for each in given)
    return True


def _what(tensor: "torch.Tensor", given: "list[torch.Tensor]") -> "_Made | _Passed":
    for index, each in enumerate(given):
        if each is tensor:
            return _Passed(index)
    return _Made(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)


def _bytes(made: _Made) -> float:
    size = float(made.dtype.itemsize)
    for each in made.shape:
        size *= each
    return size


@cache
def _function() -> Any:
    import torch

    class StandIn(torch.autograd.Function):
        """Creates output tensors from inputs, and gradients of the inputs from those of the outputs."""

        @staticmethod
        def forward(ctx: Any, recorder: Any, live: float, made: tuple[_Made, ...], *given: Any) -> Any:
            ctx.recorder, ctx.live = recorder, live
            ctx.given = [(Spec.of(each), each.stride()) for each in given]
            out = [torch.empty_strided(each.shape, each.stride, dtype=each.dtype) for each in made]
            ctx.mark_non_differentiable(*(each for each, what in zip(out, made) if not what.requires_grad))
            return tuple(out)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            ctx.recorder.keep(-ctx.live)
            back = [
                torch.empty_strided(what.shape, stride, dtype=what.dtype) if what.requires_grad else None
                for what, stride in ctx.given
            ]
            return (None, None, None, *back)

    return StandIn


def _tensors(value: Any) -> "list[torch.Tensor]":
    import torch

    return [each for each in _leaves(value) if isinstance(each, torch.Tensor)]


def _leaves(value: Any) -> list[Any]:
    from ...base._torch import tree_leaves

    return tree_leaves(value)


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with its tensors changed."""
    import torch

    from ...base._torch import tree_map_only

    return tree_map_only(torch.Tensor, change, value)


def _map_all(change: Callable[[Any], Any], value: Any) -> Any:
    from ...base._torch import tree_map

    return tree_map(change, value)


def _specs(value: Any) -> Any:
    return _map(Spec.of, value)


def _equal(first: Any, second: Any) -> bool:
    from ...base._torch import tree_flatten

    (a, a_tree), (b, b_tree) = tree_flatten(first), tree_flatten(second)
    return a_tree == b_tree and all(x is y or (type(x) is type(y) and bool(x == y)) for x, y in zip(a, b))
