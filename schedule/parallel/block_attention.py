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
"""Most scores that are materialized at once, where no kernel avoids it."""
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
    """The fraction of probabilities that are dropped."""
    seed: int = 0
    """The seed of the dropout mask."""
    kernels: bool = True
    """True if one of torch's kernels may be used."""


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a block's output, (B, H, q, D), and l.

    Args:
        query: (B, H, q, D).
        key, value: (B, K, k, D), where K divides H.
    """
    if _has_kernel(query, value, how):
        kernel = flash_attention_on_cpu if query.device.type == "cpu" else flash_attention
        output, log_sum, *_ = kernel(query, key, value, 0.0, how.causal, scale=how.scale)
        return output, log_sum
    outputs, sums = [], []
    for rows in _rows(query, key, how):
        least = torch.finfo(rows.scores.dtype).min
        most = rows.scores.amax(-1, keepdim=True).clamp_min(least)  # -inf where all keys are masked
        shares = rows.scores.sub_(most).exp_()
        total = shares.sum(-1, keepdim=True)
        sums.append((total.log() + most).squeeze(-1))
        shares /= total.clamp_min(torch.finfo(rows.scores.dtype).tiny)
        outputs.append((shares if rows.kept is None else shares * rows.kept) @ value.unsqueeze(2).to(shares.dtype))
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
    queries: Queries, key: torch.Tensor, value: torch.Tensor, how: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a block's contribution to the gradients of its queries, keys and values.

    Args:
        key, value: as in `attention`.
    """
    query, grad, output, log_sum = queries
    if _has_kernel(query, value, how):
        log_sum = log_sum.contiguous()  # CUDA's kernel reads it without its strides
        if query.device.type == "cpu":
            return flash_attention_on_cpu_backward(
                grad, query, key, value, output, log_sum, 0.0, how.causal, scale=how.scale
            )
        # The kernel ignores the random state and the cumulative lengths: dropout is 0, and all samples have one length.
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        lengths = (None, None, query.shape[2], key.shape[2])
        return flash_attention_backward(
            grad, query, key, value, output, log_sum, *lengths, 0.0, how.causal, state, state, scale=how.scale
        )
    wide, groups = torch.promote_types(query.dtype, torch.float32), key.shape[1]
    keys, values = (each.unsqueeze(2).to(wide) for each in (key, value))
    of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
    of_queries = []
    for rows in _rows(query, key, how):
        own_queries, grads, outputs, sums = (
            each[:, :, rows.at].to(wide).unflatten(1, (groups, -1)) for each in queries
        )
        shares = rows.scores.sub_(sums.unsqueeze(-1)).exp_()
        of_shares = grads @ values.mT
        if rows.kept is not None:
            of_shares *= rows.kept
        of_values += ((shares if rows.kept is None else shares * rows.kept).mT @ grads).sum(2, keepdim=True)
        of_scores = of_shares.sub_((grads * outputs).sum(-1, keepdim=True)).mul_(shares).mul_(how.scale)
        of_queries.append((of_scores @ keys).flatten(1, 2))
        of_keys += (of_scores.mT @ own_queries).sum(2, keepdim=True)
    return torch.cat(of_queries, 2), of_keys.squeeze(2), of_values.squeeze(2)


def _has_kernel(query: torch.Tensor, value: torch.Tensor, how: AttentionOptions) -> bool:
    """True if torch's flash attention supports the block."""
    if not how.kernels or how.dropout or how.pairs is not None or query.shape[-1] != value.shape[-1]:
        return False
    if query.device.type == "cuda":
        fits = query.dtype in HALVES and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
        return fits and torch.cuda.get_device_capability(query.device) >= FLASH_CAPABILITY
    return query.device.type == "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Scores of a slice of the queries."""

    at: slice
    scores: torch.Tensor
    """(B, K, H / K, rows, k), -inf where masked."""
    kept: torch.Tensor | None
    """The dropout mask, of the same shape: 0 for dropped probabilities, 1 / (1 - dropout) for all others."""


def _rows(query: torch.Tensor, key: torch.Tensor, how: AttentionOptions) -> Iterator[_Rows]:
    """Yields the scores by slices of queries: at most MOST_SCORES at once, but at least one query."""
    wide = torch.promote_types(query.dtype, torch.float32)
    generator = torch.Generator(query.device).manual_seed(how.seed) if how.dropout else None
    samples, heads, length = query.shape[:3]
    keys = key.unsqueeze(2).to(wide)
    step = max(1, MOST_SCORES // (samples * heads * key.shape[2]))
    for first in range(0, length, step):
        at = slice(first, first + step)
        scores = query[:, :, at].to(wide).unflatten(1, (key.shape[1], -1)) @ keys.mT
        scores *= how.scale
        hidden = None if how.pairs is None else ~how.pairs[:, :, at]
        if how.causal:
            numbers = torch.arange(length, device=query.device)
            ahead = numbers > numbers[at].unsqueeze(1)
            hidden = ahead.view(1, 1, *ahead.shape)
        if hidden is not None:
            scores.masked_fill_(hidden.unsqueeze(2), -torch.inf)
        kept = None
        if generator is not None:
            kept = torch.empty_like(scores).bernoulli_(1 - how.dropout, generator=generator) / (1 - how.dropout)
        yield _Rows(at=at, scores=scores, kept=kept)
