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
            _copied(segment, by_path[self._stood_in[segment.path]])
            if segment.block and segment.path in self._stood_in
            else segment
            for segment in seen
        ]

    def _watching(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            live_before = self._recorder.live
            outputs = forward(*args, **kwargs)
            inputs = _tensors((args, kwargs))
            recorded = _map(lambda tensor: _record(tensor, inputs), outputs)
            size = sum(_bytes(leaf) for leaf in _leaves(recorded) if isinstance(leaf, _Made))
            self._runs[path] = _Run(_specs((args, kwargs)), recorded, self._recorder.live - live_before - size)
            return outputs

        return run

    def _replacing(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            twin = self._runs.get(self._twin_of[path])
            inputs = _tensors((args, kwargs))
            if twin is None or not _equal(twin.inputs, _specs((args, kwargs))) or not _reachable(twin, inputs):
                return forward(*args, **kwargs)
            self._stood_in[path] = self._twin_of[path]
            return self._like(twin, inputs)

        return run

    def _like(self, twin: _Run, inputs: "list[torch.Tensor]") -> Any:
        created = [leaf for leaf in _leaves(twin.outputs) if isinstance(leaf, _Made)]
        fresh = iter(_function().apply(self._recorder, twin.live, tuple(created), *inputs))
        self._recorder.keep(twin.live)

        def give(leaf: Any) -> Any:
            if isinstance(leaf, _Passed):
                return inputs[leaf.leaf]
            return next(fresh) if isinstance(leaf, _Made) else leaf

        return _map_all(give, twin.outputs)


def _copied(segment: Segment, twin: Segment) -> Segment:
    """The segment of a replaced block: its twin's, with its own weights."""

    def renamed(name: str) -> str:
        inside = name.startswith(twin.path + ".")
        return segment.path + name.removeprefix(twin.path) if inside else name

    return replace(
        twin,
        path=segment.path,
        after=segment.after,
        inputs=segment.inputs,
        products=[replace(product, weight=renamed(product.weight)) for product in twin.products],
        parameters={renamed(name) for name in twin.parameters},
    )


def _reachable(twin: _Run, inputs: "list[torch.Tensor]") -> bool:
    """True if gradients can flow from the created tensors to the inputs."""
    if any(isinstance(leaf, _Made) and leaf.requires_grad for leaf in _leaves(twin.outputs)):
        return any(tensor.requires_grad for tensor in inputs)
    return True


def _record(tensor: "torch.Tensor", inputs: "list[torch.Tensor]") -> "_Made | _Passed":
    for index, candidate in enumerate(inputs):
        if candidate is tensor:
            return _Passed(index)
    return _Made(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)


def _bytes(created: _Made) -> float:
    size = float(created.dtype.itemsize)
    for extent in created.shape:
        size *= extent
    return size


@cache
def _function() -> Any:
    import torch

    class StandIn(torch.autograd.Function):
        """Creates output tensors from inputs, and gradients of the inputs from those of the outputs."""

        @staticmethod
        def forward(ctx: Any, recorder: Any, live: float, created: tuple[_Made, ...], *inputs: Any) -> Any:
            ctx.recorder, ctx.live = recorder, live
            ctx.given = [(Spec.of(tensor), tensor.stride()) for tensor in inputs]
            outputs = [torch.empty_strided(tensor.shape, tensor.stride, dtype=tensor.dtype) for tensor in created]
            ctx.mark_non_differentiable(
                *(tensor for tensor, record in zip(outputs, created) if not record.requires_grad)
            )
            return tuple(outputs)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            ctx.recorder.keep(-ctx.live)
            back = [
                torch.empty_strided(spec.shape, stride, dtype=spec.dtype) if spec.requires_grad else None
                for spec, stride in ctx.given
            ]
            return (None, None, None, *back)

    return StandIn


def _tensors(value: Any) -> "list[torch.Tensor]":
    import torch

    return [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]


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
