"""Order of samples: train and validation split, shuffling, and each rank's share of a step.

Order and random draws are functions of numbers alone, the same on every machine and with every version of a library.

    x         position or sample number                       [count], uint64
    key       identifies a permutation or a stream            [count] or scalar, uint64
    n         numbers that are permuted, 0 to n - 1

Numbers are mixed by the finaliser of SplitMix64 (Steele, Lea and Flood, 2014, doi:10.1145/2660193.2660195). A
permutation is a Feistel network over the smallest power of two of at least n, walked until it reaches a number below n
(Black and Rogaway, 2002, doi:10.1007/3-540-45760-7_9). Each of its values is computed directly, and nothing is stored.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import numpy as np

from ...base.errors import UsageError, WorkloadError
from ...base.option import Option, check_options

if TYPE_CHECKING:
    import torch


STRETCHES = 64
"""Largest number of stretches that each hold out their last samples."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Holds out the last samples of each of up to 64 equal stretches of the data.

    They come from all over the data and depend only on the data (not on the seed, so that trainings can be compared).
    Few of them are next to a training sample from the same document.
    """

    samples: int
    """Number of samples of the data."""
    evaluation: int
    """Number of samples held out."""

    @staticmethod
    def of(samples: int, share: float) -> "Split":
        """Returns a split that holds out a share of the samples: at least one of more than one, and never all."""
        wanted = max(1, round(samples * share)) if share else 0
        return Split(samples=samples, evaluation=min(wanted, max(samples - 1, 0)))

    @property
    def training(self) -> int:
        """Number of samples that are not held out."""
        return self.samples - self.evaluation

    @cached_property
    def _held(self) -> np.ndarray:
        """Sample ids that are held out, ascending, int64."""
        stretches = np.arange(1 + max(1, min(STRETCHES, self.evaluation)), dtype=np.int64)
        ends = stretches * self.samples // stretches[-1]
        before = stretches * self.evaluation // stretches[-1]
        return np.repeat(ends[1:] - before[1:], np.diff(before)) + np.arange(self.evaluation)

    def training_ids(self, numbers: np.ndarray) -> np.ndarray:
        """Sample ids of training samples by their number in the training split, int64."""
        training_before = self._held - np.arange(self.evaluation)
        return numbers + np.searchsorted(training_before, numbers, side="right")

    def evaluation_ids(self, numbers: np.ndarray) -> np.ndarray:
        """Sample ids of held-out samples by their number among them, int64."""
        ids: np.ndarray = self._held[numbers]
        return ids


ROUNDS = 8
"""Rounds of the network: with few bits in a half, fewer rounds are not uniform enough."""
# SplitMix64's increment, the odd number nearest to 2^64 divided by the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(*parts: "int | np.ndarray") -> np.ndarray:
    """Mixes integers, single or in arrays of one shape, to 64 random-looking bits; uint64."""
    mixed = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for integer in parts:
            bits = np.asarray(integer & _MASK if isinstance(integer, int) else integer).astype(np.uint64)
            mixed = _finalise(mixed + np.uint64(_GOLDEN) + _finalise(bits + np.uint64(_GOLDEN)))
    return mixed


def _finalise(x: np.ndarray) -> np.ndarray:
    # Shifts and multipliers of SplitMix64: David Stafford's variant 13 of MurmurHash3's finaliser.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permuted(x: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Applies permutations of 0 to n - 1 to numbers.

    Args:
        x: numbers below n, int64, one dimension.
        n: number of permuted numbers.
        key: key of each number's permutation, uint64, shape of `x`.

    Returns:
        int64, shape of `x`; for one key each number below n once.
    """
    bits = (n - 1).bit_length()
    low = np.uint64(bits // 2)
    masks = np.uint64((1 << (bits - bits // 2)) - 1), np.uint64((1 << (bits // 2)) - 1)
    round_keys = [mix(key, number) for number in range(ROUNDS)]
    values = x.astype(np.uint64)
    walking = np.arange(len(values))
    while len(walking):
        walked = values[walking]
        high, right = walked >> low, walked & masks[1]
        for number in range(0, ROUNDS, 2):
            high = high ^ (_finalise(right + round_keys[number][walking]) & masks[0])
            right = right ^ (_finalise(high + round_keys[number + 1][walking]) & masks[1])
        values[walking] = (high << low) | right
        walking = walking[values[walking] >= np.uint64(n)]
    return values.astype(np.int64)


def shuffled(positions: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Numbers from 0 to n - 1 at positions of an endless sequence of epochs, each with its own order."""
    epochs, places = np.divmod(positions, n)
    return permuted(places, n, mix(seed, epochs))


class HashedDraw:
    """Random numbers per sample, each a function of the seed and the sample's number: see `models.data.Draw`.

    Args:
        stream: distinguishes different uses of a seed.
        numbers: sample numbers, int64, shape [samples].
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


Packing = Literal["packed", "padded"]
BYTES = "bytes"
"""Name of the tokenizer that reads text as bytes."""
LARGEST_SHARE = 0.5
"""Largest share of samples that may be held out."""


def _column(value: str, name: str) -> None:
    if not value:
        raise UsageError(f"{name} must be the name of a column, but is empty; give field=text")


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """Request of a training's data.

    Raises:
        UsageError: a value is out of its range.
    """

    paths: Annotated[
        tuple[str, ...],
        Option(
            "Text, JSON lines, Parquet or datasets folders; repeatable.",
            flag="data",
            metavar="FILE",
            many=True,
        ),
    ] = ()
    """Files or folders: text (`.txt`, `.md`), JSON lines (`.jsonl`, `.ndjson`, `.json`, also with `.gz`) and Parquet; a
    folder of these or of Hugging Face `datasets`. A data set with a column `input_ids` is tokenised already; tokens whose
    `labels` are -100 are not predicted.
    """
    tokenizer: Annotated[
        str | None,
        Option("Folder of a Hugging Face tokenizer, or bytes.  [default: that of --from, else bytes]", metavar="DIR"),
    ] = None
    """Folder of a Hugging Face tokenizer; None or `bytes` reads text as bytes."""
    field: Annotated[str, Option("Column with the text.", check=_column, in_file=True)] = "text"
    """Column with the text of JSON lines, Parquet and datasets."""
    packing: Annotated[Packing, Option("packed or padded.", choices=get_args(Packing), in_file=True)] = "packed"
    """`packed`: samples are cut from all documents in a row. `padded`: one document per sample, cut and padded."""
    held_out: Annotated[
        float, Option("Share of samples held out for evaluation.", type=float, least=0, most=LARGEST_SHARE)
    ] = 0.0
    shuffle: Annotated[bool, Option("Reorder samples in each epoch.", in_file=True)] = True
    """True if each epoch has its own order; otherwise all have that of the data."""
    seed: Annotated[int, Option("Seed of weights, order and dropout.", type=int, least=0)] = 0
    """Seed of the order, and of the masks of masked language models."""

    def __post_init__(self) -> None:
        if isinstance(self.paths, str):
            raise WorkloadError(f"data must be a sequence of files or folders, but got {self.paths!r}")
        if not all(self.paths):
            raise WorkloadError(
                "the data must be files or folders, but one is an empty text; give a path, or leave it out"
            )
        check_options(self)
