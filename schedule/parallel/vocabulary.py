"""Logits sharded over the vocabulary, and their cross-entropy."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ...base._torch import tree_flatten, tree_unflatten
from .collectives import Axis, all_gather, all_reduce, scatter, through

ACROSS = frozenset(
    (
        *("softmax", "log_softmax", "softmin", "gumbel_softmax", "logsumexp", "multinomial"),
        *("argmax", "argmin", "max", "min", "amax", "amin", "aminmax", "topk", "kthvalue", "median", "sort", "argsort"),
        *("gather", "take_along_dim", "index_select", "quantile", "any", "all", "count_nonzero"),
        *("sum", "nansum", "mean", "nanmean", "prod", "var", "std", "var_mean", "std_mean", "cumsum", "logcumsumexp"),
        *("norm", "linalg_norm", "linalg_vector_norm", "normalize", "cosine_similarity", "cdist"),
        *("matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm", "dot", "einsum", "linear"),
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "nll_loss"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
    )
)
"""Names of functions whose results may depend on all classes."""


class SplitLogits(torch.Tensor):
    """This rank's shard of logits along their last dimension, the vocabulary.

    It behaves as a plain tensor, with three exceptions: `cross_entropy` is that of the full vocabulary, functions that compare
    or sum over classes (`ACROSS`) get the gathered logits on all ranks, and a `view` or `reshape` whose last size is the full
    vocabulary uses the size of this rank's shard instead.
    """

    axis: Axis
    vocabulary: int
    """The size of the full vocabulary; the last shards may end in unused padding columns."""

    @staticmethod
    def of(tensor: torch.Tensor, axis: Axis, vocabulary: int | None = None) -> "SplitLogits":
        """Returns a shard of logits, of shape (..., ceil(vocabulary / ranks)), as SplitLogits."""
        split = tensor.as_subclass(SplitLogits)
        split.axis = axis
        split.vocabulary = tensor.shape[-1] * axis.size if vocabulary is None else vocabulary
        return split

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        source = next((leaf for leaf in leaves if isinstance(leaf, SplitLogits) and hasattr(leaf, "axis")), None)
        if source is None:
            return super().__torch_function__(func, types, args, kwargs)
        if getattr(func, "__name__", "") in ACROSS:
            args, kwargs = tree_unflatten([whole_logits(leaf) for leaf in leaves], spec)
            return func(*args, **kwargs)
        # Loss code of models often flattens logits by the configuration's vocabulary size.
        if func in (torch.Tensor.view, torch.Tensor.reshape):
            args = (source, *_local_shape(source, args[1:]))
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, SplitLogits):
            result.axis, result.vocabulary = source.axis, source.vocabulary
        return result


def whole_logits(logits: Any) -> Any:
    """Returns logits with the full vocabulary, gathered if they are sharded, and any other value unchanged.

    In the backward pass each shard gets its slice of the gradient.
    """
    if not isinstance(logits, SplitLogits) or not hasattr(logits, "axis"):
        return logits
    axis, vocabulary = logits.axis, logits.vocabulary
    num_padding = logits.shape[-1] * axis.size - vocabulary
    return through(
        logits.as_subclass(torch.Tensor),
        forward=lambda shard: all_gather(shard, -1, axis).narrow(-1, 0, vocabulary),
        backward=lambda gradient: scatter(F.pad(gradient, (0, num_padding)), -1, axis),
    )


def _local_shape(logits: SplitLogits, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
    if sizes and sizes[-1] == logits.vocabulary:
        return (*sizes[:-1], logits.shape[-1])
    return sizes


def _cross_entropy(
    input: SplitLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy`; that of one class a token without weights and smoothing needs no gathered logits."""
    usual = weight is None and size_average is None and reduce is None and not label_smoothing
    if not usual or target.is_floating_point() or input.dim() != 2:
        return F.cross_entropy(
            whole_logits(input), target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    logits = input.as_subclass(torch.Tensor)
    if torch.is_autocast_enabled(logits.device.type):
        # Autocast does the same for the cross-entropy of unsharded logits.
        logits = logits.float()
    counted = target != ignore_index
    losses = _TokenLoss.apply(logits, target.where(counted, 0), input.axis, input.vocabulary).where(counted, 0)
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def num_classes(shard_size: int, axis: Axis | None, vocabulary: int) -> int:
    """Returns the number of classes in this rank's shard of the vocabulary, without the padding of the last shards."""
    first = 0 if axis is None else axis.rank * shard_size
    return min(max(vocabulary - first, 0), shard_size)


def losses_(logits: torch.Tensor, target: torch.Tensor, axis: Axis | None, shard_size: int) -> torch.Tensor:
    """Returns -log softmax of each token's logits at its class, (tokens,), and replaces `logits` by its gradient in place.

    Args:
        logits: (tokens, classes of this rank's shard).
        target: class of each token.
        axis: the ranks that the vocabulary is sharded over; None for a whole one.
        shard_size: classes of a shard, with its padding.

    Source: Shoeybi et al., Megatron-LM (2019), section 3, and its vocabulary-parallel cross-entropy.
    """
    local = logits.shape[-1]
    top = logits.amax(-1) if local else logits.new_full(target.shape, -torch.inf)
    if axis is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=axis.group)
        target = target - axis.rank * shard_size
    logits -= top.unsqueeze(-1)
    in_shard = (target >= 0) & (target < local)
    # In an unsharded vocabulary every target must exist, and gather checks that.
    index = (target if axis is None else target.where(in_shard, 0)).unsqueeze(-1)
    target_logits = logits.gather(-1, index).squeeze(-1) * in_shard if local else torch.zeros_like(top)
    logits.exp_()
    total = logits.sum(-1)
    if axis is not None:
        # One collective for both: a rank without the target adds 0.
        total, target_logits = all_reduce(torch.stack([total, target_logits]), axis).unbind(0)
    logits /= total.unsqueeze(-1)
    if local:
        logits.scatter_add_(-1, index, -in_shard.to(logits.dtype).unsqueeze(-1))
    return total.log() - target_logits


class _TokenLoss(torch.autograd.Function):
    """The losses of tokens, with the vocabulary sharded over ranks."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, axis: Axis, vocabulary: int) -> Any:
        shard_size = logits.shape[-1]
        gradients = logits[:, : num_classes(shard_size, axis, vocabulary)].clone(memory_format=torch.contiguous_format)
        losses = losses_(gradients, target, axis, shard_size)
        ctx.save_for_backward(gradients)
        ctx.num_padding = shard_size - gradients.shape[-1]
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradients,) = ctx.saved_tensors
        return F.pad(gradients * grads[0].unsqueeze(-1), (0, ctx.num_padding)), None, None, None
