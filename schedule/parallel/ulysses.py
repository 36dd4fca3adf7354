"""Tokens exchanged for heads around attention, among S ranks that have a piece each of the same sequences.

Attention has queries of shape (B, H, T / S, D), and an all-to-all makes (B, H / S, T, D) of them: all tokens, a part of
the heads. What comes out of it goes the way back. The notation is that of `sequences.py`; within a ring T is what all
S ranks together have of a sample.

Source: Jacobs et al., DeepSpeed-Ulysses (arXiv:2309.14509).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..collectives import all_to_all
from .collectives import Axis


def repeats(heads: int, ranks: int) -> int:
    """The fewest copies of so many heads that so many ranks divide.

    >>> repeats(8, 4), repeats(2, 4), repeats(6, 4)
    (1, 2, 2)
    """
    return math.lcm(heads, ranks) // heads


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    attention: Callable[..., Any],
    axis: Axis,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over whole sequences, of this rank's heads.

    Args:
        module: that attends.
        query: (B, H, T / S, D).
        key, value: (B, K, T / S, D).
        attention_mask: of whole sequences.
        attention: one of transformers, or `ring.attend`.
        axis: the ranks that exchange heads.

    Returns:
        (B, T / S, H, D), and no weights.
    """
    if (copies := repeats(key.shape[1], axis.size)) > 1:
        key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
    query, key, value = (all_to_all(each, 1, 2, axis) for each in (query, key, value))
    output, _ = attention(module, query, key, value, attention_mask, **kwargs)
    return all_to_all(output, 1, 2, axis), None
