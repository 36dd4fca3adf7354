"""Operators that keep other tensors on CUDA than on the CPU, where they are traced, and Liger-Kernel's modules.

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
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

Forward = Callable[..., Any]

CUDA, CUDA_7, CPU = "cuda", "cuda-7", "cpu"
"""Devices whose operators differ: NVIDIA GPUs, those before compute capability 8.0, which have no flash attention, and CPUs."""
_UNDER_AUTOCAST_FP32 = ("softmax", "log_softmax", "layer_norm", "group_norm", "nll_loss", "mse_loss")
"""Operators that CUDA's autocast runs in float32 and the CPU's does not:
https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32"""


def function_mode(
    device_type: str,
    attended: "Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, Callable[[], torch.Tensor]], torch.Tensor]",
    grouped: "Callable[[torch.Tensor, torch.Tensor], None]",
) -> AbstractContextManager[Any]:
    """A mode under which operators are traced as on `device_type`.

    On CUDA dropout keeps a mask of a byte an element (`native_dropout`), attention is one kernel with or without dropout and
    keeps its operands, its output and the log-sum-exp (arXiv:2205.14135), or several that keep the scores (`_is_fused`), and
    autocast runs softmax and norms in float32. The CPU's own operators do not change.

    Args:
        device_type: `CUDA`, `CUDA_7` or `CPU`.
        attended: called for every scaled dot-product attention of one kernel as `attended(query, key, value, causal, run)`; on
            the CPU it returns the result of `run()`.
        grouped: called for every grouped product of a mixture's experts, as `grouped(rows, weights)`: (r, k),
            sorted by expert, and (experts, k, n).
    """
    import torch
    from torch.nn import functional as F
    from torch.overrides import TorchFunctionMode

    from ...base._torch import grouped_mm, run_backward

    fp32 = {getattr(F, name) for name in _UNDER_AUTOCAST_FP32}
    fp32 |= {torch.softmax, torch.log_softmax, torch.layer_norm, torch.group_norm, torch.Tensor.softmax}
    fp32 |= {torch.Tensor.log_softmax}
    # Fake tensors reject them in float32, though the devices support them:
    # https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.grouped_mm.html
    grouped_products = {F.grouped_mm, grouped_mm}

    class DeviceOperators(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is F.scaled_dot_product_attention:
                return _attention(func, args, kwargs, device_type, attended)
            if func is torch.Tensor.backward and not any(
                gradient is not None for gradient in (*args[1:], kwargs.get("gradient"))
            ):
                with self:  # recomputation runs forward operators
                    return run_backward((args[0],), (torch.ones_like(args[0]),), False, False, (), True, True)
            if func in grouped_products:
                return _grouped(*args, **kwargs, record=grouped)
            if device_type != CPU:
                if func is F.dropout:
                    return _dropout(func, *args, **kwargs)
                if func is F.cross_entropy and torch.is_autocast_enabled("cpu") and _of_16_bits(*args):
                    return _cross_entropy(*args, **kwargs)
                if func in fp32 and torch.is_autocast_enabled("cpu"):
                    args = tuple(value.float() if _is_half(value) else value for value in args)
            return func(*args, **kwargs)

    return DeviceOperators()


def _is_half(value: Any) -> bool:
    import torch

    return getattr(value, "dtype", None) in (torch.bfloat16, torch.float16)


def _of_16_bits(*args: Any) -> bool:
    """True if these are 16-bit logits and indices of classes, and perhaps weights."""
    return 2 <= len(args) <= 3 and _is_half(args[0]) and not args[1].is_floating_point()


def _cross_entropy(
    input: "torch.Tensor", target: "torch.Tensor", weight: "torch.Tensor | None" = None, **options: Any
) -> "torch.Tensor":
    """That of 16-bit logits under autocast: the logarithms have 16 bits, since `cross_entropy` asks for the logits' format, and
    their mean is taken of a copy in float32."""
    import torch
    from torch.nn import functional as F

    options.pop("label_smoothing", None)  # keeps the same
    with torch.autocast("cpu", enabled=False):
        logarithms = torch.log_softmax(input, 1 if input.dim() > 1 else 0)
    return F.nll_loss(logarithms.float(), target, weight, **options)


def _dropout(
    func: Any, input: "torch.Tensor", p: float = 0.5, training: bool = True, inplace: bool = False
) -> "torch.Tensor":
    return _functions()[0].apply(input) if training and p > 0 else func(input, 0.0, False, inplace)


def _grouped(
    mat_a: "torch.Tensor",
    mat_b: "torch.Tensor",
    *,
    record: "Callable[[torch.Tensor, torch.Tensor], None]",
    offs: "torch.Tensor | None" = None,
    bias: "torch.Tensor | None" = None,
    out_dtype: "torch.dtype | None" = None,
) -> "torch.Tensor":
    record(mat_a, mat_b)
    output = _functions()[2].apply(mat_a, mat_b)
    output = output if bias is None else output + bias
    return output if out_dtype is None else output.to(out_dtype)


def _attention(
    func: Any, args: Any, kwargs: Any, device_type: str, attended: "Callable[..., torch.Tensor]"
) -> "torch.Tensor":
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    operands = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value, mask = operands["query"], operands["key"], operands["value"], operands.get("attn_mask")
    causal = bool(operands.get("is_causal")) or mask is not None
    if device_type == CPU:
        return attended(query, key, value, causal, lambda: func(*args, **kwargs))
    query, key, value = as_autocast(query, key, value)
    if not _is_fused(query, key, device_type):
        return _attention_by_products(query, key, value, mask, bool(operands.get("is_causal")))
    return attended(query, key, value, causal, lambda: _functions()[1].apply(query, key, value, mask))


def as_autocast(*operands: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
    """The operands of attention in autocast's format, if it is on: rotated queries and keys are in float32."""
    import torch

    if not torch.is_autocast_enabled("cpu"):
        return operands
    return tuple(operand.to(torch.get_autocast_dtype("cpu")) for operand in operands)


def _is_fused(query: "torch.Tensor", key: "torch.Tensor", device_type: str) -> bool:
    """True if torch has one kernel for an attention. Fewer heads of keys than of queries (`enable_gqa`) need flash attention or
    cuDNN's, which compute in 16 bits from compute capability 8.0 on.

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.11 to 2.13; measured on an H200 (docs/gpus.md).
    """
    if query.dim() < 4 or query.shape[-3] == key.shape[-3]:
        return True
    return device_type == CUDA and _is_half(query)


def _attention_by_products(
    query: "torch.Tensor", key: "torch.Tensor", value: "torch.Tensor", mask: "torch.Tensor | None", causal: bool
) -> "torch.Tensor":
    """As torch computes without such a kernel: in float32, with repeated keys and values.

    Source: `_scaled_dot_product_attention_math` in aten/src/ATen/native/transformers/attention.cpp.
    """
    import torch

    format_, repeats = query.dtype, query.shape[-3] // key.shape[-3]
    with torch.autocast("cpu", enabled=False):
        query, key, value = (operand.float() for operand in (query, key, value))
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        root = query.shape[-1] ** -0.25
        scores = (query * root) @ (key * root).transpose(-2, -1)
        if causal:
            mask = torch.zeros(scores.shape[-2:], dtype=scores.dtype, device=scores.device)
        if mask is not None:
            scores = scores + mask
        return (scores.softmax(-1) @ value).to(format_)


@cache
def _functions() -> tuple[Any, Any, Any]:
    import torch

    class Dropout(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Any) -> Any:
            mask = torch.empty_like(input, dtype=torch.bool)
            ctx.save_for_backward(mask)
            return torch.where(mask, input, 0)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (mask,) = ctx.saved_tensors
            return torch.where(mask, grad, 0)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
            output = query.new_empty((*query.shape[:-1], value.shape[-1]))
            logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
            # The kernels return (batch, sequence, heads, size), and the caller gets a transposed view.
            if output.dim() == 4:
                output = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1])).transpose(
                    1, 2
                )
            ctx.save_for_backward(query, key, value, output, logsumexp, mask)
            return output

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            query, key, value, _, _, mask = ctx.saved_tensors
            # A bias of relative positions is trained and passed as a mask.
            bias = torch.empty_like(mask) if ctx.needs_input_grad[3] else None
            return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), bias

    class Grouped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Any, weights: Any) -> Any:
            ctx.save_for_backward(rows, weights)
            return rows.new_empty((rows.shape[0], weights.shape[2]))

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            rows, weights = ctx.saved_tensors
            return torch.empty_like(rows), torch.empty_like(weights)

    return Dropout, Attention, Grouped


def forwards_of(model: "nn.Module") -> "dict[str, Forward]":
    """The forward of the same form for every module that Liger's would replace, by its path. Modules run on a few numbers to
    find them, so that no mode may be on that does not compute."""
    from ...schedule.liger import forward_with, gated_by, is_layer_norm, rms_norm_of, rotates

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
    return _liger_functions()[0].apply(x, self.weight, getattr(self, "bias", None))


def _gate(self: Any, x: "torch.Tensor") -> "torch.Tensor":
    return self.down_proj(_liger_functions()[1].apply(self.gate_proj(x), self.up_proj(x)))


def _rotate(
    q: "torch.Tensor", k: "torch.Tensor", cos: "torch.Tensor", sin: "torch.Tensor", unsqueeze_dim: int = 1
) -> "tuple[torch.Tensor, torch.Tensor]":
    return _liger_functions()[2].apply(q, k, cos, sin)


@cache
def _liger_functions() -> tuple[Any, Any, Any]:
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
