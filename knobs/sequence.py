"""Pieces of a sequence that ranks share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceShards:
    """Ranks that have a piece each of the same sequences.

    With a ring a sequence is cut into 2 P stretches, and rank r of the ring has r and 2 P - 1 - r: with causal
    attention, all ranks then have the same work. Each of the S ranks at that position has a part of these two.
    """

    sp: int = 1
    """Number of neighbouring ranks that exchange heads."""
    cp: int = 1
    """Number of ranks of a ring."""
    rank: int = 0
    """Index among all of them."""

    def __str__(self) -> str:
        return " with ".join(f"{name}={size}" for name, size in (("sp", self.sp), ("cp", self.cp)) if size > 1)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.sp * self.cp

    def piece(self, value: "torch.Tensor", dim: int) -> "torch.Tensor":
        """This rank's piece along a dimension of tokens."""
        import torch

        if self.cp > 1:
            position, stretches = self.rank // self.sp, value.chunk(2 * self.cp, dim)
            value = torch.cat((stretches[position], stretches[-1 - position]), dim)
        return value.chunk(self.sp, dim)[self.rank % self.sp].contiguous()

    def whole(self, pieces: "torch.Tensor", dim: int) -> "torch.Tensor":
        """The sequence, given the pieces of all ranks in the order of ranks: the inverse of `piece`."""
        import torch

        if self.cp == 1:
            return pieces
        stretches = pieces.chunk(2 * self.cp, dim)
        return torch.cat((*stretches[::2], *reversed(stretches[1::2])), dim)
