"""Replaces repeated blocks by stand-ins while a step is traced.

Thirty-two identical blocks keep, compute and move the same, so it is enough to record the first of a kind, the second (the first
may contain tensors that are created once for all) and the last (its backward begins while the loss's gradient is live). The
others return their inputs, which have the form of their outputs, and the record of the second is copied for them.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...models.skeleton import stand_ins_for
from .step_trace import Segment, Spec

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class _Like:
    """An output tensor of a block with the form of an input tensor, or that tensor itself."""

    leaf: int
    """Index among the tensors of its inputs."""
    itself: bool


@dataclass(frozen=True, slots=True)
class _Run:
    """Form of a block's call that stand-ins repeat."""

    inputs: Any
    """Its `(args, kwargs)`, with a `Spec` for every tensor."""
    outputs: Any
    """Return value, with a `_Like` for every tensor; None if a tensor has the form of no input."""


class StandIns:
    """Replaces blocks of a model that are identical to one that runs.

    Args:
        model: the traced model.
        blocks: paths of its repeated blocks, in their order.
    """

    def __init__(self, model: "nn.Module", blocks: "tuple[str, ...]") -> None:
        self._model = model
        self._runs: dict[str, _Run] = {}
        self._stood_in: dict[str, str] = {}
        self._twin_of = stand_ins_for(model, blocks)

    def standing_in(self) -> ExitStack:
        """Replaces blocks while it is open."""
        stack = ExitStack()
        for path in {*self._twin_of, *self._twin_of.values()}:
            module = self._model.get_submodule(path)
            module.forward = self._replacing(path, module.forward)
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

    def _replacing(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            inputs, specs = _tensors((args, kwargs)), _specs((args, kwargs))
            twin = self._runs.get(self._twin_of.get(path, ""))
            if twin is not None and twin.outputs is not None and _equal(twin.inputs, specs):
                self._stood_in[path] = self._twin_of[path]
                return _returned(twin.outputs, inputs)
            outputs = forward(*args, **kwargs)
            self._runs[path] = _Run(specs, _form(outputs, inputs))
            return outputs

        return run


def _form(outputs: Any, inputs: "list[torch.Tensor]") -> Any:
    """The outputs of a block with a `_Like` for every tensor; None if one has the form of no input."""
    import torch

    from ...base._torch import tree_map_only

    forms = [Spec.of(tensor) for tensor in inputs]
    if any(Spec.of(tensor) not in forms for tensor in _tensors(outputs)):
        return None

    def like(tensor: "torch.Tensor") -> _Like:
        itself = [index for index, candidate in enumerate(inputs) if candidate is tensor]
        return _Like(itself[0] if itself else forms.index(Spec.of(tensor)), bool(itself))

    return tree_map_only(torch.Tensor, like, outputs)


def _returned(outputs: Any, inputs: "list[torch.Tensor]") -> Any:
    """The outputs of a stand-in: aliases of its inputs, whose gradients pass through unchanged."""
    import torch

    from ...base._torch import tree_map_only

    def tensor_of(leaf: _Like) -> "torch.Tensor":
        return inputs[leaf.leaf] if leaf.itself else torch.ops.aten.alias.default(inputs[leaf.leaf])

    return tree_map_only(_Like, tensor_of, outputs)


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


def _tensors(value: Any) -> "list[torch.Tensor]":
    import torch

    from ...base._torch import tree_leaves

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _specs(value: Any) -> Any:
    import torch

    from ...base._torch import tree_map_only

    return tree_map_only(torch.Tensor, Spec.of, value)


def _equal(first: Any, second: Any) -> bool:
    from ...base._torch import tree_flatten

    (a, a_tree), (b, b_tree) = tree_flatten(first), tree_flatten(second)
    return a_tree == b_tree and all(x is y or (type(x) is type(y) and bool(x == y)) for x, y in zip(a, b))
