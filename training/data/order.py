"""Order and chance as functions of numbers alone, the same on every machine and with every version of a library.

    x         position or sample number                       [count], uint64
    key       what a permutation or a stream is told by       [count] or scalar, uint64
    n         numbers that are permuted, 0 to n - 1

Numbers are mixed by the finaliser of SplitMix64 (Steele, Lea and Flood, 2014, doi:10.1145/2660193.2660195). A permutation
is a Feistel network over the smallest power of two that holds n, walked until it comes to a number below n (Black and
Rogaway, 2002, doi:10.1007/3-540-45760-7_9): any place of it is known at once, and nothing is stored.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

ROUNDS = 8
"""Of the network: with few bits in a half, fewer are not yet even."""
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(*parts: "int | np.ndarray") -> np.ndarray:
    """Whole numbers, alone or in arrays of one shape, made into 64 bits that look random; uint64."""
    out = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            more = np.asarray(part & _MASK if isinstance(part, int) else part).astype(np.uint64)
            out = _finalise(out + np.uint64(_GOLDEN) + _finalise(more + np.uint64(_GOLDEN)))
    return out


def _finalise(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permuted(x: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Where permutations of 0 to n - 1 take numbers of these.

    Args:
        x: numbers below n, int64, one dimension.
        n: how many are permuted.
        key: of each number's permutation, uint64, shape of `x`.

    Returns:
        int64, shape of `x`; for one key each number below n once.
    """
    bits = (n - 1).bit_length()
    low = np.uint64(bits // 2)
    masks = np.uint64((1 << (bits - bits // 2)) - 1), np.uint64((1 << (bits // 2)) - 1)
    round_keys = [mix(key, number) for number in range(ROUNDS)]
    out = x.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        at = out[walking]
        left, right = at >> low, at & masks[1]
        for number in range(0, ROUNDS, 2):
            left = left ^ (_finalise(right + round_keys[number][walking]) & masks[0])
            right = right ^ (_finalise(left + round_keys[number + 1][walking]) & masks[1])
        out[walking] = (left << low) | right
        walking = walking[out[walking] >= np.uint64(n)]
    return out.astype(np.int64)


def shuffled(positions: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Places 0 to n - 1 at positions of an endless sequence: epochs follow each other, each in an order of its own."""
    epochs, at = np.divmod(positions, n)
    return permuted(at, n, mix(seed, epochs))


class HashedDraw:
    """Random numbers of samples, each a function of the seed and the sample's number: see `models.data.Draw`.

    Args:
        seed: of all.
        stream: what else tells one use of a seed from another.
        numbers: of the samples, int64, shape [samples].
    """

    def __init__(self, seed: int, stream: int, numbers: np.ndarray) -> None:
        self._keys = mix(seed, stream, numbers)
        self._calls = 0

    def uniform(self, shape: tuple[int, int]) -> "torch.Tensor":
        import torch

        self._calls += 1
        columns = np.arange(shape[1], dtype=np.uint64)
        with np.errstate(over="ignore"):
            bits = _finalise(mix(self._keys, self._calls)[:, None] + columns * np.uint64(_GOLDEN))
        return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)

    def below(self, bound: int, shape: tuple[int, int]) -> "torch.Tensor":
        return (self.uniform(shape) * bound).long()
