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
"""Most pairs of tokens for which a mask is evaluated at once: 16 MiB of booleans, and a few temporary tensors of that size."""


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
    # Fewer, larger blocks: each is a kernel launch and a merge of outputs.
    rows = [tuple(row) for row in table]
    if rows == [(Kind.CAUSAL, Kind.NONE), (Kind.FULL, Kind.CAUSAL)]:
        # This rank's own keys: both stretches are in sequence order, so the whole block is causal.
        return [Block(slice(0, 2 * stretch), slice(0, 2 * stretch), Kind.CAUSAL)]
    groups = [(0, 2, rows[0])] if rows[0] == rows[1] else [(0, 1, rows[0]), (1, 2, rows[1])]
    blocks = []
    for first_row, last_row, kinds in groups:
        columns = [column for column, kind in enumerate(kinds) if kind is not Kind.NONE]
        if not columns:
            continue
        column_kinds = {kinds[column] for column in columns}
        kind = column_kinds.pop() if len(column_kinds) == 1 else Kind.MASKED
        if kind is Kind.CAUSAL and (last_row - first_row, len(columns)) != (1, 1):
            kind = Kind.MASKED
        keys = slice(columns[0] * stretch, (columns[-1] + 1) * stretch)
        blocks.append(Block(slice(first_row * stretch, last_row * stretch), keys, kind))
    return blocks


class RingMask:
    """The attention mask of full sequences, divided into the blocks of one rank of a ring.

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
        self.first_sample = 0
        """Index of its first sample in the micro-batch."""
        self.length, self.ranks, self.rank, self.device = length, ranks, rank, device
        self.stretch = length // (2 * ranks)
        rows = stretches_of(rank, ranks)
        if allowed is None:
            self._table = [[_by_position(kind, row, column) for column in range(2 * ranks)] for row in rows]
        else:
            self._table = self._evaluate(rows)

    def __repr__(self) -> str:
        return f"RingMask(batch={self.batch}, length={self.length}, ranks={self.ranks})"

    def part(self, rank: int, ranks: int) -> "RingMask":
        """Returns the mask of this rank's samples, if `ranks` ranks share them equally."""
        part_mask = copy.copy(self)
        part_mask.batch = self.batch // ranks
        part_mask.first_sample = self.first_sample + rank * part_mask.batch
        return part_mask

    def blocks(self, source: int) -> list[Block]:
        """Returns the blocks that this rank computes with the keys of a rank."""
        columns = stretches_of(source, self.ranks)
        return blocks_of([[row[column] for column in columns] for row in self._table], self.stretch)

    def pairs(self, block: Block, source: int) -> torch.Tensor:
        """Returns the mask of a block, True for pairs that are not masked: (B or 1, H or 1, queries, keys)."""
        return self._pairs(self._positions(self.rank)[block.queries], self._positions(source)[block.keys])

    def _positions(self, rank: int) -> torch.Tensor:
        """Returns the positions in the sequence of a rank's tokens."""
        positions = torch.arange(self.length, device=self.device).view(-1, self.stretch)
        # Indexing by a list would copy it to the device and synchronise.
        return torch.cat([positions[stretch] for stretch in stretches_of(rank, self.ranks)])

    def _pairs(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        assert self.allowed is not None, "without `allowed` no block has an arbitrary mask"
        samples = torch.arange(self.first_sample, self.first_sample + self.batch, device=self.device).view(-1, 1, 1, 1)
        head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=self.device)
        allowed = self.allowed(samples, head, queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
        return allowed.expand(*allowed.shape[:2], len(queries), len(keys))

    def _evaluate(self, rows: Sequence[int]) -> list[list[Kind]]:
        """Returns the kind of each pair of stretches, from the mask of all their tokens; synchronizes with the device once."""
        positions = torch.arange(self.length, device=self.device).view(-1, self.stretch)
        flags = torch.stack(
            [self._flags(positions[row], positions[column]) for row in rows for column in range(len(positions))]
        )
        kinds = [
            Kind.NONE if not any_pair else Kind.FULL if all_pairs else Kind.CAUSAL if causal else Kind.MASKED
            for any_pair, all_pairs, causal in flags.tolist()
        ]
        return [kinds[: len(positions)], kinds[len(positions) :]]

    def _flags(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Returns three flags for two stretches: any pair is unmasked, all pairs are unmasked, the mask is causal."""
        step = max(1, MOST_PAIRS // (self.batch * len(keys)))
        flags = []
        for query_chunk in queries.split(step):
            pairs = self._pairs(query_chunk, keys)
            causal = keys.view(1, -1) <= query_chunk.view(-1, 1)
            is_causal = (pairs == causal).all() & (queries[0] == keys[0])
            flags.append(torch.stack([pairs.any(), pairs.all(), is_causal]))
        stacked = torch.stack(flags)
        return torch.stack([stacked[:, 0].any(), stacked[:, 1].all(), stacked[:, 2].all()])


def stretches_of(rank: int, ranks: int) -> tuple[int, int]:
    """Returns the two stretches of a sequence that a rank of a ring has.

    >>> [stretches_of(rank, 2) for rank in range(2)]
    [(0, 3), (1, 2)]
    """
    return rank, 2 * ranks - 1 - rank


def _by_position(kind: Kind, row: int, column: int) -> Kind:
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
    """Returns the mask of full sequences; replaces a mask function of transformers.

    Raises:
        ScheduleError: the model makes a mask with different lengths of queries and keys, or by functions that do not
            broadcast over positions.
    """
    if use_vmap or q_length != kv_length:
        raise ScheduleError(
            "cp: the model's masks are not functions of positions that a ring can evaluate; use sp, or samples that no ranks "
            "share"
        )
    shape = {"batch": batch_size, "length": q_length, "ranks": axis.size, "rank": axis.rank, "device": device}
    is_regular = attention_mask is None and (local_size is None or local_size >= kv_length)
    if is_regular and (allow_is_causal_skip or allow_is_bidirectional_skip):
        return RingMask(None, Kind.CAUSAL if allow_is_causal_skip else Kind.FULL, **shape)
    if attention_mask is None:
        return RingMask(mask_function, Kind.MASKED, **shape)
    padding = attention_mask

    def allowed(sample: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_function(sample, head, query, key) & padding[sample, key]

    return RingMask(allowed, Kind.MASKED, **shape)
