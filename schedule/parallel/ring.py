"""Ring attention over a sequence sharded over P ranks: keys and values circulate, queries stay.

Each rank computes attention of its queries to the keys and values of one rank at a time, while it receives those of the
next, and merges the results. In the backward pass keys and values circulate again, followed by their gradients, which end on
the ranks of their keys. `ring_mask.py` defines the tokens of each rank and the mask of each block.

Notation, in addition to that of `sequences.py`:

| symbol | meaning |
|---|---|
| T' | T / P, the tokens of a rank after the exchange of heads, if there is one |
| q, k | tokens of a block of queries, and of a block of keys |
| s | scores, (B, H, q, k), times the scale |
| l | log of the sum of exp(s) over keys, (B, H, q), at least float32; -inf where all keys are masked |

A block returns softmax(s) v and l. The output of two blocks of the same queries is the mean of their outputs, weighted by
exp(l_i - l) with l = log(exp(l_1) + exp(l_2)); any number of blocks merge in the same way. The gradients of a block are
those of attention to all keys if l and the output are those over all keys: its probabilities are exp(s - l).

Source: Liu et al., Ring Attention with Blockwise Transformers (arXiv:2310.01889); Brandon et al., Striped Attention
(arXiv:2311.09431), on why a rank does not have contiguous tokens; Dao, FlashAttention-2 (arXiv:2307.08691).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ...base._torch import (
    flash_attention,
    flash_attention_backward,
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
)
from ...base.errors import ScheduleError
from .collectives import Axis, RingTransfer
from .ring_mask import Block, Kind, RingMask

MOST_SCORES = 1 << 26
"""Most scores that are materialised at once without a kernel: 256 MiB in float32."""
HALVES = (torch.float16, torch.bfloat16)
FLASH_CAPABILITY = (8, 0)
"""The lowest compute capability that CUDA's flash attention supports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """Options of the attention of a block."""

    scale: float
    causal: bool = False
    """True if a query attends only to keys up to its own position; the block then has as many queries as keys."""
    pairs: torch.Tensor | None = None
    """True where a query may attend to a key, broadcast to (B, H, q, k); None for all pairs."""
    dropout: float = 0.0
    """Probability with which an attention weight is dropped."""
    seed: int = 0
    """The seed of the dropout mask."""
    kernels: bool = True
    """True if one of torch's kernels may be used."""


def block_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a block's output, (B, H, q, D), and l.

    Args:
        query: (B, H, q, D).
        key, value: (B, K, k, D), where K divides H.
    """
    if _has_kernel(query, value, options):
        kernel = flash_attention_on_cpu if query.device.type == "cpu" else flash_attention
        output, log_sum, *_ = kernel(query, key, value, 0.0, options.causal, scale=options.scale)
        return output, log_sum
    outputs, sums = [], []
    for rows in _rows(query, key, options):
        lowest = torch.finfo(rows.scores.dtype).min
        row_max = rows.scores.amax(-1, keepdim=True).clamp_min(lowest)  # -inf where all keys are masked
        probabilities = rows.scores.sub_(row_max).exp_()
        total = probabilities.sum(-1, keepdim=True)
        sums.append((total.log() + row_max).squeeze(-1))
        probabilities /= total.clamp_min(torch.finfo(rows.scores.dtype).tiny)
        outputs.append(rows.drop(probabilities) @ value.unsqueeze(2).to(probabilities.dtype))
    return torch.cat(outputs, 3).flatten(1, 2), torch.cat(sums, 3).flatten(1, 2)


class Queries(NamedTuple):
    """Queries in the backward pass, with their output and l over all blocks."""

    query: torch.Tensor
    """(B, H, q, D)."""
    grad: torch.Tensor
    """The gradient of the output, (B, H, q, D)."""
    output: torch.Tensor
    """(B, H, q, D)."""
    log_sum: torch.Tensor
    """l over all keys, +inf where all keys are masked."""


def block_gradients(
    queries: Queries, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a block's contribution to the gradients of its queries, keys and values.

    Args:
        key, value: as in `block_attention`.
    """
    query, grad, output, log_sum = queries
    if _has_kernel(query, value, options):
        log_sum = log_sum.contiguous()  # CUDA's kernel ignores its strides
        if query.device.type == "cpu":
            return flash_attention_on_cpu_backward(
                grad, query, key, value, output, log_sum, 0.0, options.causal, scale=options.scale
            )
        # The kernel ignores the random state and the cumulative lengths: dropout is 0, and all samples have one length.
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        lengths = (None, None, query.shape[2], key.shape[2])
        return flash_attention_backward(
            grad, query, key, value, output, log_sum, *lengths, 0.0, options.causal, state, state, scale=options.scale
        )
    wide, groups = torch.promote_types(query.dtype, torch.float32), key.shape[1]
    keys, values = (tensor.unsqueeze(2).to(wide) for tensor in (key, value))
    grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
    grad_queries = []
    for rows in _rows(query, key, options):
        row_queries, row_grads, row_outputs, row_log_sums = (
            tensor[:, :, rows.query_slice].to(wide).unflatten(1, (groups, -1)) for tensor in queries
        )
        probabilities = rows.scores.sub_(row_log_sums.unsqueeze(-1)).exp_()
        grad_probabilities = row_grads @ values.mT
        if rows.dropout_mask is not None:
            grad_probabilities *= rows.dropout_mask
        grad_values += (rows.drop(probabilities).mT @ row_grads).sum(2, keepdim=True)
        grad_scores = grad_probabilities.sub_((row_grads * row_outputs).sum(-1, keepdim=True))
        grad_scores.mul_(probabilities).mul_(options.scale)
        grad_queries.append((grad_scores @ keys).flatten(1, 2))
        grad_keys += (grad_scores.mT @ row_queries).sum(2, keepdim=True)
    return torch.cat(grad_queries, 2), grad_keys.squeeze(2), grad_values.squeeze(2)


def _has_kernel(query: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> bool:
    """Returns True if torch's flash attention supports the block."""
    if not options.kernels or options.dropout or options.pairs is not None or query.shape[-1] != value.shape[-1]:
        return False
    if query.device.type == "cuda":
        is_supported = query.dtype in HALVES and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
        return is_supported and torch.cuda.get_device_capability(query.device) >= FLASH_CAPABILITY
    return query.device.type == "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Scores of a slice of the queries."""

    query_slice: slice
    scores: torch.Tensor
    """(B, K, H / K, rows, k), -inf where masked."""
    dropout_mask: torch.Tensor | None
    """The dropout mask, of the same shape: 0 for dropped probabilities, 1 / (1 - dropout) for all others."""

    def drop(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Returns the probabilities after dropout; the same tensor without dropout."""
        return probabilities if self.dropout_mask is None else probabilities * self.dropout_mask


def _rows(query: torch.Tensor, key: torch.Tensor, options: AttentionOptions) -> Iterator[_Rows]:
    """Yields the scores by slices of queries: at most MOST_SCORES at once, but at least one query."""
    wide = torch.promote_types(query.dtype, torch.float32)
    generator = torch.Generator(query.device).manual_seed(options.seed) if options.dropout else None
    samples, heads, length = query.shape[:3]
    keys = key.unsqueeze(2).to(wide)
    step = max(1, MOST_SCORES // (samples * heads * key.shape[2]))
    for start in range(0, length, step):
        query_slice = slice(start, start + step)
        scores = query[:, :, query_slice].to(wide).unflatten(1, (key.shape[1], -1)) @ keys.mT
        scores *= options.scale
        masked = None if options.pairs is None else ~options.pairs[:, :, query_slice]
        if options.causal:
            positions = torch.arange(length, device=query.device)
            is_later = positions > positions[query_slice].unsqueeze(1)
            masked = is_later.view(1, 1, *is_later.shape)
        if masked is not None:
            scores.masked_fill_(masked.unsqueeze(2), -torch.inf)
        dropout_mask = None
        if generator is not None:
            keep = 1 - options.dropout
            dropout_mask = torch.empty_like(scores).bernoulli_(keep, generator=generator) / keep
        yield _Rows(query_slice=query_slice, scores=scores, dropout_mask=dropout_mask)


MORE_THAN_SCORES = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
"""Arguments of attention, in some model families, that change scores or the mask."""
SOFTCAP = ("attn_logit_softcapping", "attn_logit_softcap")
"""Names of a bound on attention scores in configurations."""


def obstacle(model: nn.Module) -> str | None:
    """Returns how a model's attention differs from softmax(Q K') V, as a predicate; None if it does not."""
    config: Any = getattr(model, "config", None)
    for name in SOFTCAP:
        if (bound := getattr(config.get_text_config(), name, None)) is not None:
            return f"bounds the scores of its attention ({name} is {bound}), which is more than a ring computes"
    for path, _ in model.named_modules():
        if "relative_attention_bias" in path.rpartition(".")[2]:
            return f"adds a bias to the scores of its attention ('{path}'), which is more than a ring computes"
    return None


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    axis: Axis,
    kernels: bool,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention of this rank's queries to the keys of all ranks; replaces an attention function of transformers.

    Args:
        query: (B, H, T', D).
        key, value: (B, K, T', D).
        attention_mask: a mask from `make_mask`.
        kernels: True to use torch's kernels for the blocks that they support.
        scaling: the factor of the scores; None for 1 / sqrt(D).
        dropout: the fraction of probabilities that are dropped.

    Returns:
        The output, (B, T', H, D), and None for the attention weights.

    Raises:
        ScheduleError: the model's attention is not softmax(Q K') V, or its mask is not from `make_mask`.
    """
    if query.is_meta:  # tracing and pipelines infer shapes on the meta device
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
    for name in MORE_THAN_SCORES:
        if kwargs.get(name) is not None:
            raise ScheduleError(f"cp: attention with {name} is more than a ring computes; use sp")
    if not isinstance(attention_mask, RingMask):
        raise ScheduleError(
            "cp: a ring needs a mask from transformers' mask functions, but the attention of this model gets "
            f"{'none' if attention_mask is None else 'a mask of its own'}; use sp"
        )
    if torch.is_autocast_enabled(query.device.type):
        autocast_dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(autocast_dtype) for tensor in (query, key, value))
    ring = Ring(
        axis=axis,
        mask=attention_mask,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout=dropout,
        seed=int(torch.randint(2**48, ())) if dropout else 0,  # leaves room for the additions in `blocks`
        kernels=kernels,
    )
    return _RingAttention.apply(query, key, value, ring).transpose(1, 2).contiguous(), None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """The options of one ring attention, and its ranks."""

    axis: Axis
    mask: RingMask
    scale: float
    dropout: float
    seed: int
    kernels: bool

    def sources(self) -> list[int]:
        """Returns the ranks in the order in which their keys arrive, this one first."""
        return [(self.axis.rank - step) % self.axis.size for step in range(self.axis.size)]

    def blocks(self, source: int) -> Iterator[tuple[Block, AttentionOptions]]:
        """Yields the blocks to compute with the keys of a rank, with their options."""
        for number, block in enumerate(self.mask.blocks(source)):
            options = AttentionOptions(
                scale=self.scale,
                causal=block.kind is Kind.CAUSAL,
                pairs=self.mask.pairs(block, source) if block.kind is Kind.MASKED else None,
                dropout=self.dropout,
                seed=self.seed + 4 * source + number,  # at most 4 pairs of stretches, so no seed repeats
                kernels=self.kernels,
            )
            yield block, options


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring) -> torch.Tensor:
        with torch.autocast(query.device.type, enabled=False):
            output, log_sum = _forward(query, key, value, ring)
        output = output.to(query.dtype)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.autocast(grads[0].device.type, enabled=False):
            query, key, value, output, log_sum = ctx.saved_tensors
            gradients_of_inputs = _backward(grads[0], query, key, value, output, log_sum, ctx.ring)
        return *(
            gradient.to(input_tensor.dtype) for gradient, input_tensor in zip(gradients_of_inputs, (query, key, value))
        ), None


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output, (B, H, T', D), and l, (B, H, T'), which is -inf where all keys are masked; both at least float32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    output = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=wide)
    log_sum = query.new_full(query.shape[:3], -torch.inf, dtype=wide)
    keys_values = torch.cat((key, value), -1)  # one message
    sources = ring.sources()
    for source in sources:
        # Sent before the computation, which hides the transfer.
        transfer = RingTransfer(keys_values, ring.axis) if source != sources[-1] else None
        keys, values = keys_values.split((key.shape[-1], value.shape[-1]), -1)
        for block, options in ring.blocks(source):
            queries = block.queries
            block_result = block_attention(
                query[:, :, queries], keys[:, :, block.keys], values[:, :, block.keys], options
            )
            merge_((output[:, :, queries], log_sum[:, :, queries]), block_result)
        keys_values = keys_values if transfer is None else transfer.received()
    return output, log_sum


OutputAndLogSum = tuple[torch.Tensor, torch.Tensor]


def merge_(accumulated: OutputAndLogSum, block_result: OutputAndLogSum) -> None:
    """Merges the output and l of a block of keys into those of the previous blocks, for the same queries, in place.

    It makes two passes over the output, bound by memory bandwidth.
    """
    (output, log_sum), (block_output, block_log_sum) = accumulated, block_result
    total = torch.logaddexp(log_sum, block_log_sum)
    all_masked = total == -torch.inf
    weight, block_weight = (
        (side - total).exp().masked_fill(all_masked, 0.0).unsqueeze(-1) for side in (log_sum, block_log_sum)
    )
    output.mul_(weight).addcmul_(block_output, block_weight)
    log_sum.copy_(total)


def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    ring: Ring,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of this rank's queries, keys and values, at least float32.

    Keys and values circulate as in the forward pass. Their partial gradients follow one step behind: a rank receives them
    while it computes its own part, adds this part, and sends the sum to the next rank.
    """
    # exp(s - l) is then 0, not NaN, for queries whose keys are all masked.
    log_sum = log_sum.masked_fill(log_sum == -torch.inf, torch.inf)
    grad_queries = torch.zeros_like(query, dtype=log_sum.dtype)
    keys_values = torch.cat((key, value), -1)
    sizes = key.shape[-1], value.shape[-1]
    gradient_transfer: RingTransfer | None = None
    sources = ring.sources()
    for source in sources:
        transfer = RingTransfer(keys_values, ring.axis) if source != sources[-1] else None
        keys, values = keys_values.split(sizes, -1)
        grad_keys_values = torch.zeros_like(keys_values, dtype=log_sum.dtype)
        grad_keys, grad_values = grad_keys_values.split(sizes, -1)
        for block, options in ring.blocks(source):
            queries, keys_of_block = block.queries, block.keys
            block_queries = Queries(*(tensor[:, :, queries] for tensor in (query, grad, output, log_sum)))
            gradients = block_gradients(block_queries, keys[:, :, keys_of_block], values[:, :, keys_of_block], options)
            grad_queries[:, :, queries] += gradients[0]
            grad_keys[:, :, keys_of_block] += gradients[1]
            grad_values[:, :, keys_of_block] += gradients[2]
        # The gradient of these keys and values so far, from the ranks that had them before.
        if gradient_transfer is not None:
            grad_keys_values += gradient_transfer.received()
        gradient_transfer = RingTransfer(grad_keys_values, ring.axis, tag=1)
        keys_values = keys_values if transfer is None else transfer.received()
    assert gradient_transfer is not None, "a ring has ranks"
    grad_keys, grad_values = gradient_transfer.received().split(sizes, -1)
    return grad_queries, grad_keys, grad_values
