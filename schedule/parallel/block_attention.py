"""Attention of a block of queries to a block of keys, in a form in which blocks can be merged, and its gradients.

Notation, in addition to that of `sequences.py`:

| symbol | meaning |
|---|---|
| q, k | tokens of the two blocks |
| s | scores, (B, H, q, k), times the scale |
| l | log of the sum of exp(s) over keys, (B, H, q), at least float32; -inf where all keys are masked |

A block returns softmax(s) v and l. The output of two blocks of the same queries is the mean of their outputs, weighted by
exp(l_i - l) with l = log(exp(l_1) + exp(l_2)); any number of blocks merge in the same way. The gradients of a block are
those of attention to all keys if l and the output are those over all keys: its probabilities are exp(s - l).

Source: Liu et al., Ring Attention (arXiv:2310.01889); Dao, FlashAttention-2 (arXiv:2307.08691).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...base._torch import (
    flash_attention,
    flash_attention_backward,
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
)

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


def attention(
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


def gradients(
    queries: Queries, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a block's contribution to the gradients of its queries, keys and values.

    Args:
        key, value: as in `attention`.
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
