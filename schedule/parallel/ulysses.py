"""Exchange of tokens for heads around attention, among S ranks that each have a piece of the same sequences.

An all-to-all turns queries of shape (B, H, T / S, D) into (B, H / S, T, D): all tokens, a part of the heads. Another one
restores the layout of the output. The notation is that of `sequences.py`; within a ring T is the number of a sample's
tokens on all S ranks together.

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
    """Returns the fewest copies of `heads` heads whose total number `ranks` divides.

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
    """Computes attention over full sequences for this rank's heads.

    Args:
        query: (B, H, T / S, D).
        key, value: (B, K, T / S, D).
        attention_mask: the mask of full sequences.
        attention: an attention function of transformers, or `ring.attend`.

    Returns:
        The output, (B, T / S, H, D), and None for the attention weights.
    """
    if (copies := repeats(key.shape[1], axis.size)) > 1:
        key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    # Tokens for heads, and back: dimension 1 is heads before attention, and tokens in its output.
    query, key, value = (all_to_all(tensor, 1, 2, axis) for tensor in (query, key, value))
    output, _ = attention(module, query, key, value, attention_mask, **kwargs)
    return all_to_all(output, 1, 2, axis), None
