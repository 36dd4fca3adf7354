"""Logits sharded over the vocabulary, and their cross-entropy."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ...base._torch import tree_flatten, tree_unflatten
from ...base.errors import ScheduleError
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
    """`torch.nn.functional.cross_entropy` of class indices; input: (tokens, vocabulary / ranks)."""
    if weight is not None or target.is_floating_point() or input.dim() != 2:
        raise ScheduleError(
            "the cross-entropy of logits cut over the vocabulary takes logits (tokens, vocabulary), a class "
            "a token and no weights; gather the logits with sync('fwd_post', 'all_gather', axis=-1) instead"
        )
    axis, logits = input.axis, input.as_subclass(torch.Tensor)
    if torch.is_autocast_enabled(logits.device.type):
        # Autocast does the same for the cross-entropy of unsharded logits.
        logits = logits.float()
    counted = target != ignore_index
    losses = _TokenLoss.apply(logits, target.where(counted, 0), axis, input.vocabulary, label_smoothing)
    losses = losses.where(counted, 0)
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


class _TokenLoss(torch.autograd.Function):
    """Computes -log softmax of each token's logits at its class, with the vocabulary sharded over ranks.

    Source: Shoeybi et al., Megatron-LM (2019), section 3, and its vocabulary-parallel cross-entropy.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, axis: Axis, vocabulary: int, smoothing: float
    ) -> Any:
        shard_size = logits.shape[-1]
        num_tokens = min(max(vocabulary - axis.rank * shard_size, 0), shard_size)
        logits = logits[:, :num_tokens]
        top = logits.amax(-1) if num_tokens else logits.new_full(logits.shape[:1], -torch.inf)
        top = top.contiguous()  # collectives need it
        dist.all_reduce(top, dist.ReduceOp.MAX, group=axis.group)
        shifted = logits - top.unsqueeze(-1)
        local_target = target - axis.rank * shard_size
        in_shard = (local_target >= 0) & (local_target < num_tokens)
        # Zero for targets of other ranks, so that the sum over ranks is the logit of each target.
        target_logits = logits.new_zeros(target.shape)
        if num_tokens:
            target_logits = shifted.gather(-1, local_target.where(in_shard, 0).unsqueeze(-1)).squeeze(-1) * in_shard
        exponential = shifted.exp()
        sums = [exponential.sum(-1), target_logits] + ([shifted.sum(-1)] if smoothing else [])
        total, target_logits, *sum_of_logits = all_reduce(torch.stack(sums), axis).unbind(0)
        loss = total.log() - target_logits
        if smoothing:
            mean = total.log() - sum_of_logits[0] / vocabulary
            loss = (1 - smoothing) * loss + smoothing * mean
        ctx.save_for_backward(exponential / total.unsqueeze(-1), local_target, in_shard)
        ctx.smoothing, ctx.vocabulary, ctx.num_padding = smoothing, vocabulary, shard_size - num_tokens
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        probability, local_target, in_shard = ctx.saved_tensors
        grad = probability - ctx.smoothing / ctx.vocabulary
        weight = (1 - ctx.smoothing) * in_shard.to(grad.dtype).unsqueeze(-1)
        if grad.shape[-1]:
            grad = grad.scatter_add(-1, local_target.where(in_shard, 0).unsqueeze(-1), -weight)
        return F.pad(grad * grads[0].unsqueeze(-1), (0, ctx.num_padding)), None, None, None, None
