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
    """This rank's piece of logits along their last dimension, the vocabulary.

    It behaves as a plain tensor, with three exceptions: `cross_entropy` is that of the whole vocabulary, functions that compare
    or sum over classes (`ACROSS`) get the gathered logits on all ranks, and a `view` or `reshape` whose last size is the whole
    vocabulary uses the size of this rank's part instead.
    """

    axis: Axis
    vocabulary: int
    """The size of the whole vocabulary; the last pieces may end in unused padding columns."""

    @staticmethod
    def of(tensor: torch.Tensor, axis: Axis, vocabulary: int | None = None) -> "SplitLogits":
        """Returns a piece of logits, of shape (..., ceil(vocabulary / ranks)), as SplitLogits."""
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
        source = next((each for each in leaves if isinstance(each, SplitLogits) and hasattr(each, "axis")), None)
        if source is None:
            return super().__torch_function__(func, types, args, kwargs)
        if getattr(func, "__name__", "") in ACROSS:
            args, kwargs = tree_unflatten([whole_logits(each) for each in leaves], spec)
            return func(*args, **kwargs)
        if func in (torch.Tensor.view, torch.Tensor.reshape):
            args = (source, *_local_shape(source, args[1:]))
        out = super().__torch_function__(func, types, args, kwargs)
        if isinstance(out, SplitLogits):
            out.axis, out.vocabulary = source.axis, source.vocabulary
        return out


def whole_logits(logits: Any) -> Any:
    """Returns logits with the whole vocabulary, gathered if they are split; each piece gets its part of the gradient. Anything
    else is returned as it is."""
    if not isinstance(logits, SplitLogits) or not hasattr(logits, "axis"):
        return logits
    axis, vocabulary = logits.axis, logits.vocabulary
    rest = logits.shape[-1] * axis.size - vocabulary
    return through(
        logits.as_subclass(torch.Tensor),
        forward=lambda t: all_gather(t, -1, axis).narrow(-1, 0, vocabulary),
        backward=lambda g: scatter(F.pad(g, (0, rest)), -1, axis),
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
        # Autocast does the same for the cross-entropy of whole logits.
        logits = logits.float()
    kept = target != ignore_index
    losses = _TokenLoss.apply(logits, target.where(kept, 0), axis, input.vocabulary, label_smoothing)
    losses = losses.where(kept, 0)
    if reduction == "none":
        return losses
    return losses.sum() / kept.sum() if reduction == "mean" else losses.sum()


class _TokenLoss(torch.autograd.Function):
    """Computes -log softmax of each token's logits at its class, with the vocabulary sharded over ranks.

    Source: Shoeybi et al., Megatron-LM (2019), section 3, and its vocabulary-parallel cross-entropy.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, axis: Axis, vocabulary: int, smoothing: float
    ) -> Any:
        local = logits.shape[-1]
        real = min(max(vocabulary - axis.rank * local, 0), local)
        logits = logits[:, :real]
        top = logits.amax(-1) if real else logits.new_full(logits.shape[:1], -torch.inf)
        top = top.contiguous()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=axis.group)
        shifted = logits - top.unsqueeze(-1)
        index = target - axis.rank * local
        in_shard = (index >= 0) & (index < real)
        at = logits.new_zeros(target.shape)
        if real:
            at = shifted.gather(-1, index.where(in_shard, 0).unsqueeze(-1)).squeeze(-1) * in_shard
        exponential = shifted.exp()
        sums = [exponential.sum(-1), at] + ([shifted.sum(-1)] if smoothing else [])
        total, at, *rest = all_reduce(torch.stack(sums), axis).unbind(0)
        loss = total.log() - at
        if smoothing:
            mean = total.log() - rest[0] / vocabulary
            loss = (1 - smoothing) * loss + smoothing * mean
        ctx.save_for_backward(exponential / total.unsqueeze(-1), index, in_shard)
        ctx.smoothing, ctx.vocabulary, ctx.filling = smoothing, vocabulary, local - real
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        probability, index, in_shard = ctx.saved_tensors
        grad = probability - ctx.smoothing / ctx.vocabulary
        weight = (1 - ctx.smoothing) * in_shard.to(grad.dtype).unsqueeze(-1)
        if grad.shape[-1]:
            grad = grad.scatter_add(-1, index.where(in_shard, 0).unsqueeze(-1), -weight)
        return F.pad(grad * grads[0].unsqueeze(-1), (0, ctx.filling)), None, None, None, None
