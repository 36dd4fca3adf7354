"""Who has which piece of a sequence that ranks share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceShards:
    """Ranks that have a piece each of the same sequences.

    With a ring a sequence is 2 P stretches, and rank r of it has r and 2 P - 1 - r: where tokens look back alone, all
    have as much to look at. Each of the S ranks that stand there has a part of these two.
    """

    sp: int = 1
    """Ranks that exchange heads, neighbours."""
    cp: int = 1
    """Ranks of a ring."""
    rank: int = 0
    """Which of all of them."""

    def __str__(self) -> str:
        return " with ".join(f"{name}={size}" for name, size in (("sp", self.sp), ("cp", self.cp)) if size > 1)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.sp * self.cp

    def piece(self, value: "torch.Tensor", dim: int) -> "torch.Tensor":
        """What this rank has of a dimension that has a place for every token."""
        import torch

        if self.cp > 1:
            at, stretches = self.rank // self.sp, value.chunk(2 * self.cp, dim)
            value = torch.cat((stretches[at], stretches[-1 - at]), dim)
        return value.chunk(self.sp, dim)[self.rank % self.sp].contiguous()


def sequence_shards_obstacle(length: int | None, sp: int, cp: int) -> str:
    """Why samples of so many tokens cannot be cut over `sp * cp` ranks; empty where they can. A rank of a ring has a piece
    of each half of a sample, so that all have as much to look back at.

    >>> sequence_shards_obstacle(12, 2, 4)
    '2 * cp, 8, must divide the 12 tokens of a sample'
    """
    if sp * cp == 1:
        return ""
    if length is None:
        return "samples are not made of tokens, so that there is no sequence to cut"
    if cp > 1 and length % (2 * cp):
        return f"2 * cp, {2 * cp}, must divide the {length} tokens of a sample"
    if length % (sp * cp):
        return f"{f'sp * cp, {sp} * {cp},' if cp > 1 else 'sp'} must divide the {length} tokens of a sample"
    return ""
