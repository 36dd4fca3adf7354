"""Liger-Kernel's modules in a trace: what they keep for backward, and their passes over memory.

On a GPU the knob `kernels` replaces norms, gated feed-forward parts and rotary embeddings (`schedule/liger.py`). Liger's kernels
need Triton and values, so that a trace runs functions of the same form instead, of one operator for each kernel.

| | kept for backward | forward | backward |
|---|---|---|---|
| norm | its input, and a number or two a row | reads it, writes its output | reads gradient and input, writes a gradient |
| gate | both inputs, which backward overwrites | reads them, writes the product | reads them and the gradient, writes two |
| rotary embedding | angles | rotates queries and keys in place | the same |

Source: Hsu et al., Liger Kernel (arXiv:2410.10989), section 3; src/liger_kernel/ops of liger-kernel 0.8.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ...schedule.liger import forward_with, gated_by, is_layer_norm, rms_norm_of, rotates

if TYPE_CHECKING:
    import torch
    from torch import nn

Forward = Callable[..., Any]


def forwards_of(model: "nn.Module") -> "dict[str, Forward]":
    """The forward of the same form for every module that Liger's would replace, by its path. Modules run on a few numbers to
    find them, so that no mode may be on that does not compute."""
    forwards: dict[str, Forward] = {}
    for path, module in model.named_modules():
        if rms_norm_of(module) is not None or is_layer_norm(module):
            forwards[path] = _normalise
        elif gated_by(module) is not None:
            forwards[path] = _gate
        elif rotates(module):
            forwards[path] = forward_with(type(module).forward, _rotate)
    return forwards


def put_forwards(model: "nn.Module", forwards: "Mapping[str, Forward]") -> None:
    """Gives modules these forwards, in place."""
    for path, forward in forwards.items():
        module = model.get_submodule(path)
        module.__class__ = _with_forward(type(module), forward)


_classes: dict[tuple[type, Any], type] = {}
"""Classes that were made: equal blocks must stay of equal classes."""


def _with_forward(kind: type, forward: Any) -> type:
    key = (kind, getattr(forward, "__code__", forward))
    if key not in _classes:
        _classes[key] = type(kind.__name__, (kind,), {"forward": forward})
    return _classes[key]


def _normalise(self: Any, x: "torch.Tensor") -> "torch.Tensor":
    return _functions()[0].apply(x, self.weight, getattr(self, "bias", None))


def _gate(self: Any, x: "torch.Tensor") -> "torch.Tensor":
    return self.down_proj(_functions()[1].apply(self.gate_proj(x), self.up_proj(x)))


def _rotate(
    q: "torch.Tensor", k: "torch.Tensor", cos: "torch.Tensor", sin: "torch.Tensor", unsqueeze_dim: int = 1
) -> "tuple[torch.Tensor, torch.Tensor]":
    return _functions()[2].apply(q, k, cos, sin)


@cache
def _functions() -> tuple[Any, Any, Any]:
    import torch

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
            numbers = 1 if bias is None else 2
            ctx.save_for_backward(x, weight, x.new_empty((numbers, *x.shape[:-1]), dtype=torch.float32))
            ctx.biased = bias is not None
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight, _ = ctx.saved_tensors
            return torch.add(grad, x), torch.empty_like(weight), torch.empty_like(weight) if ctx.biased else None

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: Any, up: Any) -> Any:
            ctx.save_for_backward(gate, up)
            return gate * up

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            gate, up = ctx.saved_tensors
            return gate.addcmul_(up, grad), up.mul_(grad)

    class Rotation(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, cos: Any, sin: Any) -> Any:
            ctx.save_for_backward(cos, sin)
            return q.clone(), k.clone()

        @staticmethod
        def backward(ctx: Any, q: Any, k: Any) -> Any:
            return q.clone(), k.clone(), None, None

    return Norm, Gate, Rotation
