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
