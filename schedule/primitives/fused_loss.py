"""fused_loss: cross-entropy of logits from hidden states, a few tokens at a time, without materialising the logits.

Notation:

 symbol | meaning | shape |
---|---|---|
 N, C | tokens of a micro-batch, and of a chunk | |
 H, V | hidden size, vocabulary (this rank's shard of it if it is sharded) | |
 h | hidden states | (N, H) |
 W, b | weight and bias of the head | (V, H), (V,) |
 z | logits of a chunk, h W^T + b | (C, V) |
 p | softmax(z) | (C, V) |
 g | gradient of the loss with respect to z: (p - onehot) / N | (C, V) |

The loss is a scalar, so its gradient is known up to the factor from backward. The forward pass therefore computes the
logits of a chunk, their losses, and at once their contributions to the gradients: g W, g^T h and the sum of g.
Backward only multiplies. No product is computed twice, and of the N x V numbers at most C x V exist at a time.

Source: Hsu et al., Liger Kernel (arXiv:2410.10989), section 3.2, FusedLinearCrossEntropy.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...base._torch import DisableTorchFunctionSubclass, tree_map_only, wrapper
from ...base.errors import ScheduleError
from ...knobs.meaning import most_chunk
from ..forward import Inner, Layer, add_layer, layers_of
from ..graph.called import check_called
from ..parallel.collectives import Axis
from ..parallel.exchange import syncs_of
from ..parallel.vocabulary import SplitLogits, losses_, num_classes
from ..tree import ScheduledModule, primitive


@primitive
def fused_loss(sch: ScheduledModule) -> None:
    """Computes the cross-entropy of this module's logits from its input, chunk by chunk, without materialising the
    logits.

    For a language-model head, an `nn.Linear`, unsharded or cut over the vocabulary with `parallel_loss`. The model's own
    loss code does not change: `torch.nn.functional.cross_entropy` of these logits computes those of a few tokens at a
    time, and the gradients in the same pass. Any other use materialises the logits as usual.

    Raises:
        ScheduleError: the module is not an `nn.Linear`; its loss is fused already; or ranks exchange its output.
    """
    label, module = f"fused_loss on '{sch.name}'", sch.module
    if type(module) is not nn.Linear:
        raise ScheduleError(f"{label}: the head must be an nn.Linear, but is a {type(module).__name__}")
    if layers_of(module, FusedLoss):
        raise ScheduleError(f"{label}: the loss is fused already")
    if any(sync.mode in ("fwd_post", "bwd_pre") for sync in syncs_of(module)):
        raise ScheduleError(f"{label}: ranks exchange its logits, which materialises them; use parallel_loss")
    check_called(sch, "fused_loss")
    add_layer(module, FusedLoss())


def formed_for(module: nn.Module) -> dict[str, bool]:
    """Returns the functions called with the logits of a head with `fused_loss`: True if these were materialised for it."""
    return layers_of(module, FusedLoss)[0].formed_for


class FusedLoss(Layer):
    """Returns unmaterialised logits in place of the module's output."""

    order = 20
    alters = True

    def __init__(self) -> None:
        self.formed_for: dict[str, bool] = {}
        """Names of functions that were called with the logits: True if the logits were materialised for the call."""

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["input"]
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        if dtype == torch.float16:
            raise ScheduleError(
                "fused_loss: gradients are computed before the loss is scaled, as float16 requires; use bf16"
            )
        product = Product(module.weight, module.bias, dtype, None, module.weight.shape[0], self.formed_for)
        return FusedLogits.of(hidden, product)


def chunk_tokens(hidden: int, tokens: int) -> int:
    """Returns C. Even few tokens are split into two chunks, so that every micro-batch, including a probe's, runs the
    same code.
    """
    return max(1, min(most_chunk(hidden), -(-tokens // 2)))


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The product that defines logits, and its format."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    """Dtype of the products: autocast's, or the hidden states' own."""
    axis: Axis | None
    """Axis that the vocabulary is sharded over, or None."""
    vocabulary: int
    """Number of tokens of the vocabulary over all ranks."""
    formed_for: dict[str, bool]
    """Names of functions that were called with the logits: True if the logits were materialised for the call."""

    @property
    def rows(self) -> int:
        """Number of rows of the weight that belong to a token; the other rows are padding of the last rank's shard."""
        return num_classes(self.weight.shape[0], self.axis, self.vocabulary)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits of hidden states, equal to those of the head itself."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(self.dtype), self.weight.to(self.dtype), bias)


class FusedLogits(torch.Tensor):
    """Represents the logits of hidden states, of shape (..., V).

    `torch.nn.functional.cross_entropy` is computed from the hidden states. Changing the format or shape, or selecting
    tokens, keeps them unmaterialised. Any other function gets the materialised logits: the result is right, but needs
    their memory. They have no autograd history themselves; results computed from them do.
    """

    hidden: torch.Tensor
    product: Product

    @staticmethod
    def of(hidden: torch.Tensor, product: Product, dtype: torch.dtype | None = None) -> "FusedLogits":
        """Returns the logits of hidden states (..., H) with dtype `dtype`, by default that of the product."""
        shape = (*hidden.shape[:-1], product.weight.shape[0])
        logits = wrapper(FusedLogits, shape, dtype or product.dtype, hidden.device)
        logits.hidden, logits.product = hidden, product
        return logits

    def cut(self, axis: Axis, vocabulary: int) -> "FusedLogits":
        """Returns them as this rank's shard of logits that are sharded over the vocabulary."""
        return FusedLogits.of(self.hidden, replace(self.product, axis=axis, vocabulary=vocabulary), self.dtype)

    def formed(self) -> torch.Tensor:
        """Returns the materialised logits; SplitLogits if they are sharded."""
        logits = self.product(self.hidden).to(self.dtype)
        axis = self.product.axis
        return logits if axis is None else SplitLogits.of(logits, axis, self.product.vocabulary)

    def chunks(self) -> Iterator[torch.Tensor]:
        """Yields the logits of C tokens at a time, each (C, V), as the loss computes them; without gradient."""
        flat = self.hidden.detach().reshape(-1, self.hidden.shape[-1])
        product = replace(self.product, weight=self.product.weight.detach())
        for states in flat.split(chunk_tokens(flat.shape[1], flat.shape[0])):
            yield product(states)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA_FUNCTIONS or _is_property(func):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and isinstance(args[0], cls) and func in _UNMATERIALISED:
            result = _UNMATERIALISED[func](*args, **kwargs)
            if result is not NotImplemented:
                return result

        def form(logits: FusedLogits) -> torch.Tensor:
            logits.product.formed_for[getattr(func, "__name__", str(func))] = True
            return logits.formed()

        args, kwargs = tree_map_only(FusedLogits, form, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # torch calls it to create and to print a wrapper
            (logits,) = args
            return FusedLogits.of(logits.hidden.detach(), logits.product, logits.dtype)
        raise ScheduleError(f"fused_loss: {func} needs the memory of logits that are not materialised")


def formed(value: torch.Tensor) -> torch.Tensor:
    """Returns unmaterialised logits materialised, and any other tensor unchanged."""
    return value.formed() if isinstance(value, FusedLogits) else value


_METADATA_FUNCTIONS = frozenset(
    {
        torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel, torch.numel,
        torch.Tensor.nelement, torch.Tensor.element_size, torch.Tensor.is_floating_point,
        torch.is_floating_point, torch.Tensor.is_complex, torch.is_complex, torch.Tensor.get_device,
        torch.Tensor.__len__,
    }
)  # fmt: skip
"""Functions that read no values of a tensor."""
_PROPERTIES = frozenset(
    ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu",
     "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "itemsize", "nbytes", "names")
)  # fmt: skip


def _is_property(func: Any) -> bool:
    descriptor = getattr(func, "__self__", None)
    return getattr(func, "__name__", "") == "__get__" and getattr(descriptor, "__name__", "") in _PROPERTIES


def _as(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda logits: FusedLogits.of(logits.hidden, logits.product, dtype)


def _to(logits: FusedLogits, *args: Any, **kwargs: Any) -> Any:
    """Changes the dtype. Another device, or a copy, materialises the logits."""
    if len(args) + len(kwargs) != 1 or not set(kwargs) <= {"dtype", "device"}:
        return NotImplemented
    (target,) = (*args, *kwargs.values())
    if isinstance(target, torch.dtype):
        return _as(target)(logits)
    same_device = isinstance(target, (str, torch.device)) and torch.device(target) == logits.device
    return logits if same_device else NotImplemented


def _reshape(logits: FusedLogits, *shape: Any, **kwargs: Any) -> Any:
    """Rearranges the tokens."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    sizes_of_vocabulary = (logits.shape[-1], logits.product.vocabulary)
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes) or sizes[-1] not in sizes_of_vocabulary:
        return NotImplemented
    hidden = logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1])
    return FusedLogits.of(hidden, logits.product, logits.dtype)


def _flatten(logits: FusedLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims = logits.dim()
    if end_dim % dims == dims - 1:
        return NotImplemented
    return FusedLogits.of(logits.hidden.flatten(start_dim % dims, end_dim % dims), logits.product, logits.dtype)


def _index(logits: FusedLogits, index: Any) -> Any:
    """Selects tokens; an index into the vocabulary materialises the logits."""
    indices = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, bool) or not (item is ... or isinstance(item, (int, slice))) for item in indices):
        return NotImplemented
    selects_logits = len(indices) == logits.dim() or (... in indices and indices[-1] is not ...)
    if selects_logits and indices[-1] != slice(None):
        return NotImplemented
    return FusedLogits.of(logits.hidden[index], logits.product, logits.dtype)


def _contiguous(logits: FusedLogits, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else logits


def _cross_entropy(
    input: FusedLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`torch.nn.functional.cross_entropy` of class indices; input: (N, V)."""
    usual = weight is None and size_average is None and reduce is None and not label_smoothing
    if not usual or target.is_floating_point() or input.dim() != 2 or reduction not in ("mean", "sum"):
        return NotImplemented
    product, device = input.product, input.hidden.device.type
    product.formed_for.setdefault("cross_entropy", False)
    # As in autocast's cross-entropy of materialised logits.
    dtype = torch.float32 if torch.is_autocast_enabled(device) else input.dtype
    mean = reduction == "mean"
    loss = _Loss.apply(
        input.hidden,
        product.weight,
        product.bias,
        target,
        product,
        ignore_index,
        mean,
        torch.is_grad_enabled(),
    )
    return loss.to(dtype)


_UNMATERIALISED: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    torch.Tensor.float: _as(torch.float32),
    torch.Tensor.to: _to,
    torch.Tensor.view: _reshape,
    torch.Tensor.reshape: _reshape,
    torch.Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.__getitem__: _index,
}


class _Loss(torch.autograd.Function):
    """The mean, or the sum, of -log p of each token's target; forward computes the gradients too."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor,
        product: Product, ignore_index: int, mean: bool, differentiable: bool,
    ) -> Any:  # fmt: skip
        dtype, exact = product.dtype, torch.promote_types(product.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            rows = product.rows
            narrow = weight[:rows].to(dtype)
            shift = None if bias is None else bias[:rows].to(dtype)
            counted = target != ignore_index
            count = counted.sum() if mean else torch.ones_like(counted.sum())
            # If all tokens are ignored, their mean is NaN, but its gradient is zero.
            share = torch.where(counted, 1.0 / count.to(exact), 0.0)
            needs_gradient = [differentiable and needed for needed in ctx.needs_input_grad[:3]]
            to_hidden = torch.empty_like(hidden) if needs_gradient[0] else None
            to_weight = weight.new_zeros(weight.shape, dtype=exact) if needs_gradient[1] else None
            to_bias = weight.new_zeros(weight.shape[:1], dtype=exact) if needs_gradient[2] else None
            total = torch.zeros((), dtype=exact, device=hidden.device)
            # Weight gradients of chunks are added in float32: in bfloat16 small contributions would be lost.
            size = chunk_tokens(hidden.shape[1], hidden.shape[0])
            for start in range(0, target.shape[0], size):
                chunk = slice(start, start + size)
                states = hidden[chunk].to(dtype)
                logits = F.linear(states, narrow, shift).to(exact)
                losses = losses_(logits, target[chunk].where(counted[chunk], 0), product.axis, weight.shape[0])
                total += losses.where(counted[chunk], 0).sum()
                # `logits` are p - onehot from here.
                if not any(needs_gradient):
                    continue
                logits *= share[chunk].unsqueeze(-1)
                if to_bias is not None:
                    to_bias[:rows] += logits.sum(0)
                gradient = logits.to(dtype)
                del logits
                if to_hidden is not None:
                    to_hidden[chunk] = gradient @ narrow
                if to_weight is not None and dtype == exact:
                    to_weight[:rows].addmm_(gradient.t(), states)
                elif to_weight is not None:
                    to_weight[:rows] += gradient.t() @ states
                del gradient  # before the next chunk's logits are computed
        to_weight = None if to_weight is None else to_weight.to(weight.dtype)
        to_bias = None if to_bias is None or bias is None else to_bias.to(bias.dtype)
        ctx.gradients = (to_hidden, to_weight, to_bias)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.gradients is None:
            raise ScheduleError(
                "fused_loss: its gradients are computed in the forward pass, so backward can be called only once"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return (*(None if gradient is None else gradient.mul_(grads[0]) for gradient in gradients), *[None] * 5)
