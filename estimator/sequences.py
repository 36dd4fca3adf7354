"""Exchanges around attention among ranks that share sequences, and the time that they take.

K, D, T and P: heads of keys and their features, tokens of a sample, ranks of a ring.
"""

import numpy as np

from .collectives import Group
from .experts import Rows
from .facts.model_facts import Part, bytes_of
from .rank import Rank


def all_to_alls(rank: Rank, part: Part, ranks: Rows, fixed: float) -> np.ndarray:
    """Seconds of the all-to-alls around one block's attention in a forward pass: of queries, keys and values before it, and of
    its output; a rank sends all bytes but its own share (Jacobs et al., arXiv:2309.14509).

    Keys are repeated if there are fewer heads than ranks.

    Args:
        rank: the configurations.
        part: the block.
        ranks: those that exchange heads.
        fixed: seconds of a collective beyond those of its bytes and its ring.
    """
    kind, sp = part.attention, rank.cols.sp
    if kind is None or (sp == 1).all():
        return rank.none
    keys = np.lcm(np.maximum(kind.kv_heads // rank.cols.tp, 1), sp) * rank.tp
    width = kind.head_dim * bytes_of(rank.facts.precision) * rank.tokens / rank.tp
    return 2 * (ranks.seconds(width * kind.heads, fixed, True) + ranks.seconds(width * keys, fixed, True))


def ring_waits(
    rank: Rank, part: Part, ranks: Group, fixed: float, attention: np.ndarray, attention_back: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds, forward and backward, that one block's attention waits for keys and values that are passed around a ring.

    P - 1 times in a forward pass a rank sends the keys and values of T / P tokens, 2 K D T (P - 1) / P numbers a sample, while it
    computes with the current ones; the excess over computing is waiting time. The backward pass repeats this, and sends their
    gradients in float32 after them, P times: the last time without computing (Liu et al., arXiv:2310.01889).

    Among ranks that exchange heads, each has its own ring.

    Args:
        rank: the configurations.
        part: the block.
        ranks: those of a ring.
        fixed: as above.
        attention, attention_back: seconds of the block's attention, forward and backward.
    """
    kind, cp = part.attention, rank.cols.cp
    if kind is None or (cp == 1).all():
        return rank.none, rank.none
    sp = rank.cols.sp
    heads = np.lcm(np.maximum(kind.kv_heads // rank.cols.tp, 1), sp)
    numbers = 2.0 * heads * kind.head_dim * rank.tokens * cp
    behind = (cp - 1) / cp
    fixed_of_ring = fixed * (cp - 1)
    there = ranks.gather(numbers * bytes_of(rank.facts.precision), fixed_of_ring)
    home = ranks.gather(numbers * 4, fixed_of_ring)
    forward = np.maximum(there - behind * attention, 0.0)
    backward = np.maximum(there + home - behind * attention_back, 0.0) + home / np.maximum(cp - 1, 1)
    return np.where(cp > 1, forward, 0.0), np.where(cp > 1, backward, 0.0)
