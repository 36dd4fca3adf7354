"""The attention mask of a ring: the blocks of queries and keys that a rank computes, and the kind of mask of each.

A sequence is 2 P stretches of T / 2 P tokens (`sequences.py`). Rank r has the queries of two stretches, and receives the
keys and values of two stretches from each rank in turn. Each of these four pairs is fully masked, not masked, causal, or
has an arbitrary mask; pairs of one kind are computed as one block.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ...base.errors import ScheduleError
from .collectives import Axis

MOST_PAIRS = 1 << 24
"""Most pairs of tokens for which a mask is evaluated at once."""


class Kind(Enum):
    """The mask of a block: all pairs masked, no pair masked, causal, or arbitrary."""

    NONE = "none"
    FULL = "full"
    CAUSAL = "causal"
    MASKED = "masked"


@dataclass(frozen=True, slots=True)
class Block:
    """Queries and keys that are computed at once."""

    queries: slice
    """Indices into this rank's queries."""
    keys: slice
    """Indices into the keys received from a rank."""
    kind: Kind


Table = Sequence[Sequence[Kind]]
"""Kinds of blocks: a row for each stretch of queries, a column for each stretch of keys."""


def blocks_of(table: Table, stretch: int) -> list[Block]:
    """Returns the blocks of two stretches of queries and two of keys, of `stretch` tokens each; as few as kernels allow."""
    rows = [tuple(row) for row in table]
    if rows == [(Kind.CAUSAL, Kind.NONE), (Kind.FULL, Kind.CAUSAL)]:
        # This rank's own keys: both stretches are in sequence order, so the whole block is causal.
        return [Block(slice(0, 2 * stretch), slice(0, 2 * stretch), Kind.CAUSAL)]
    groups = [(0, 2, rows[0])] if rows[0] == rows[1] else [(0, 1, rows[0]), (1, 2, rows[1])]
    found = []
    for first, last, kinds in groups:
        at = [column for column, kind in enumerate(kinds) if kind is not Kind.NONE]
        if not at:
            continue
        found_kinds = {kinds[column] for column in at}
        kind = found_kinds.pop() if len(found_kinds) == 1 else Kind.MASKED
        if kind is Kind.CAUSAL and (last - first, len(at)) != (1, 1):
            kind = Kind.MASKED
        keys = slice(at[0] * stretch, (at[-1] + 1) * stretch)
        found.append(Block(slice(first * stretch, last * stretch), keys, kind))
    return found


class RingMask:
    """The attention mask of whole sequences, divided into the blocks of one rank of a ring.

    Args:
        allowed: a function of the indices of samples, heads, queries and keys, which broadcast, that returns True for
            pairs that are not masked; None for `kind` everywhere.
        kind: FULL or CAUSAL; used without `allowed`.
        length: T.
        ranks, rank: P, and this rank.
        device: the device on which `allowed` is evaluated.
    """

    def __init__(
        self,
        allowed: Callable[..., torch.Tensor] | None,
        kind: Kind,
        *,
        batch: int,
        length: int,
        ranks: int,
        rank: int,
        device: torch.device,
    ) -> None:
        self.allowed, self.kind, self.batch = allowed, kind, batch
        self.first = 0
        """Number of the first of its samples."""
        self.length, self.ranks, self.rank, self.device = length, ranks, rank, device
        self.stretch = length // (2 * ranks)
        own = stretches_of(rank, ranks)
        if allowed is None:
            self._table = [[_by_place(kind, row, column) for column in range(2 * ranks)] for row in own]
        else:
            self._table = self._looked_at(own)

    def __repr__(self) -> str:
        return f"RingMask(batch={self.batch}, length={self.length}, ranks={self.ranks})"

    def part(self, rank: int, ranks: int) -> "RingMask":
        """Returns the mask of one of `ranks` equal parts of the samples."""
        own = copy.copy(self)
        own.batch = self.batch // ranks
        own.first = self.first + rank * own.batch
        return own

    def blocks(self, source: int) -> list[Block]:
        """Returns the blocks that this rank computes with the keys of a rank."""
        columns = stretches_of(source, self.ranks)
        return blocks_of([[row[column] for column in columns] for row in self._table], self.stretch)

    def pairs(self, block: Block, source: int) -> torch.Tensor:
        """Returns the mask of a block, True for pairs that are not masked: (B or 1, H or 1, queries, keys)."""
        return self._pairs(self._places(self.rank)[block.queries], self._places(source)[block.keys])

    def _places(self, rank: int) -> torch.Tensor:
        """Returns the positions in the sequence of a rank's tokens."""
        places = torch.arange(self.length, device=self.device).view(-1, self.stretch)
        # An index that is a list would be copied to the device, which waits for it.
        return torch.cat([places[stretch] for stretch in stretches_of(rank, self.ranks)])

    def _pairs(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        assert self.allowed is not None, "blocks with a mask are of a mask"
        samples = torch.arange(self.first, self.first + self.batch, device=self.device).view(-1, 1, 1, 1)
        head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=self.device)
        found = self.allowed(samples, head, queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
        return found.expand(*found.shape[:2], len(queries), len(keys))

    def _looked_at(self, own: Sequence[int]) -> list[list[Kind]]:
        """Returns the kind of each pair of stretches, from the mask of all their tokens; synchronizes with the device once."""
        places = torch.arange(self.length, device=self.device).view(-1, self.stretch)
        flags = torch.stack([self._flags(places[row], places[column]) for row in own for column in range(len(places))])
        kinds = [
            Kind.NONE if not some else Kind.FULL if every else Kind.CAUSAL if causal else Kind.MASKED
            for some, every, causal in flags.tolist()
        ]
        return [kinds[: len(places)], kinds[len(places) :]]

    def _flags(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Returns three flags for two stretches: any pair is unmasked, all pairs are unmasked, the mask is causal."""
        step = max(1, MOST_PAIRS // (self.batch * len(keys)))
        parts = []
        for some in queries.split(step):
            pairs = self._pairs(some, keys)
            ahead = keys.view(1, -1) <= some.view(-1, 1)
            same = (pairs == ahead).all() & (queries[0] == keys[0])
            parts.append(torch.stack([pairs.any(), pairs.all(), same]))
        found = torch.stack(parts)
        return torch.stack([found[:, 0].any(), found[:, 1].all(), found[:, 2].all()])


Masks = dict[str, Any]
"""The attention masks of a forward pass whose blocks share sequences in unlike rings, or some in none: a `RingMask` for each
ring, by the name of its group, and for `""` the mask of blocks without one. A dictionary, so that tensors in it are cut,
moved and counted like other arguments of a block."""


def mask_of(masks: Any, ring: Axis | None) -> Any:
    """Returns the mask of blocks with a ring, or without one, from one mask for all or from several."""
    if not isinstance(masks, dict):
        return masks
    return masks["" if ring is None else ring.group_name]


def make_masks(*, rings: Sequence[Axis | None], plain: Callable[..., Any] | None, **kwargs: Any) -> Any:
    """Returns the masks of whole sequences for some rings, one or several (`Masks`); replaces a mask function of transformers.

    Args:
        rings: the rings; None for blocks without one.
        plain: the mask function of such blocks.
    """

    def made(ring: Axis | None) -> Any:
        return make_mask(axis=ring, **kwargs) if ring is not None else plain(**kwargs) if plain is not None else None

    if len(rings) == 1:
        return made(rings[0])
    return {"" if ring is None else ring.group_name: made(ring) for ring in rings}


def stretches_of(rank: int, ranks: int) -> tuple[int, int]:
    """Returns the two stretches of a sequence that a rank of a ring has.

    >>> [stretches_of(rank, 2) for rank in range(2)]
    [(0, 3), (1, 2)]
    """
    return rank, 2 * ranks - 1 - rank


def _by_place(kind: Kind, row: int, column: int) -> Kind:
    if kind is Kind.FULL or column < row:
        return Kind.FULL
    return Kind.CAUSAL if column == row else Kind.NONE


def make_mask(
    *,
    axis: Axis,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    device: torch.device,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **kwargs: Any,
) -> RingMask:
    """Returns the mask of whole sequences; replaces a mask function of transformers.

    Raises:
        ScheduleError: the model makes a mask with different lengths of queries and keys, or by functions that do not
            broadcast over positions.
    """
    if use_vmap or q_length != kv_length:
        raise ScheduleError(
            "cp: the model makes masks of its own, which are not known by the places of tokens; use sp, or samples that "
            "no ranks share"
        )
    shape = {"batch": batch_size, "length": q_length, "ranks": axis.size, "rank": axis.rank, "device": device}
    plain = attention_mask is None and (local_size is None or local_size >= kv_length)
    if plain and (allow_is_causal_skip or allow_is_bidirectional_skip):
        return RingMask(None, Kind.CAUSAL if allow_is_causal_skip else Kind.FULL, **shape)
    if attention_mask is None:
        return RingMask(mask_function, Kind.MASKED, **shape)
    padding = attention_mask

    def allowed(sample: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_function(sample, head, query, key) & padding[sample, key]

    return RingMask(allowed, Kind.MASKED, **shape)
