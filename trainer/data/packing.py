"""Cuts samples from tokens: in a row, in a row with separate documents, or one document per sample.

n     number of samples
L     tokens of a sample
row   number of the window of L tokens, or of the document, that a sample is cut from
"""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...base.errors import WorkloadError
from ...models.data import Task
from .order import Packing
from .store import TokenStore

if TYPE_CHECKING:
    from torch import nn

# 32 MiB of int64: enough to make the cost of a call negligible, little enough for any host.
_TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Samples cut from the tokens."""

    tokens: np.ndarray
    """int64, shape [n, L]."""
    trained: np.ndarray | None
    """Mask of predicted tokens, bool, shape [n, L]; None for all."""
    real: np.ndarray | None
    """Mask of tokens that are not padding, bool, shape [n, L]; None for all."""
    positions: np.ndarray | None
    """Position of each token in its document, counted from the start of the sample's part of it, int64, [n, L]."""


@dataclass(frozen=True, kw_only=True)
class SampleLayout:
    """Source of the samples, and how they are cut."""

    store: TokenStore
    packing: Packing
    length: int
    """Tokens of a sample, L."""
    pad_id: int

    @property
    def num_rows(self) -> int:
        """Number of rows, including those without tokens to train on."""
        if self.packing == "padded":
            return len(self.store.boundaries) - 1
        return self.store.about.tokens // self.length

    @property
    def shortened(self) -> int:
        """Number of documents that are longer than a sample, whose ends are cut off."""
        return int((np.diff(self.store.boundaries) > self.length).sum()) if self.packing == "padded" else 0

    def cut(self, rows: np.ndarray) -> Cut:
        return self._padded(rows) if self.packing == "padded" else self._windows(rows)

    def _windows(self, rows: np.ndarray) -> Cut:
        tokens = np.empty((len(rows), self.length), dtype=np.int64)
        starts = rows * self.length
        for row, start in zip(tokens, starts.tolist()):
            self.store.put(row, start)
        trained = None
        if self.store.about.masked:
            trained = np.empty(tokens.shape, dtype=bool)
            for mask, start in zip(trained, starts.tolist()):
                self.store.put_trained(mask, start)
        if self.packing == "packed":
            return Cut(tokens=tokens, trained=trained, real=None, positions=None)
        begins = self._begins(starts)
        trained = ~begins if trained is None else trained & ~begins
        columns = np.arange(self.length, dtype=np.int64)
        positions = columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
        return Cut(tokens=tokens, trained=trained, real=None, positions=positions)

    def _begins(self, starts: np.ndarray) -> np.ndarray:
        """Mask of the starts of documents in windows, bool, shape [n, L]."""
        first_document = np.searchsorted(self.store.boundaries, starts, side="left")
        counts = np.searchsorted(self.store.boundaries, starts + self.length, side="left") - first_document
        windows = np.repeat(np.arange(len(starts)), counts)
        within = np.arange(len(windows)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.zeros((len(starts), self.length), dtype=bool)
        begins[windows, self.store.boundaries[first_document[windows] + within] - starts[windows]] = True
        return begins

    def _padded(self, rows: np.ndarray) -> Cut:
        starts = self.store.boundaries[rows]
        lengths = np.minimum(self.store.boundaries[rows + 1] - starts, self.length)
        tokens = np.full((len(rows), self.length), self.pad_id, dtype=np.int64)
        real = np.arange(self.length) < lengths[:, None]
        trained = real.copy()
        for number, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist())):
            self.store.put(tokens[number, :length], start)
            if self.store.about.masked:
                self.store.put_trained(trained[number, :length], start)
        return Cut(tokens=tokens, trained=trained, real=real, positions=None)


def usable_rows(layout: SampleLayout, task: Task) -> np.ndarray | None:
    """Rows with tokens to train on, int64; None for all. A row without any would have no mean loss."""
    least = 2 if task == "causal" else 1
    if layout.store.about.masked:
        step = max(1, _TOKENS_AT_ONCE // layout.length)
        good = np.zeros(layout.num_rows, dtype=bool)
        for begin in range(0, layout.num_rows, step):
            trained = layout.cut(np.arange(begin, min(begin + step, layout.num_rows), dtype=np.int64)).trained
            assert trained is not None
            # The first token of a causal sample is not predicted.
            good[begin : begin + step] = trained[:, least - 1 :].any(axis=1)
    elif layout.packing == "padded":
        good = np.diff(layout.store.boundaries) >= least
    else:
        return None
    return None if good.all() else np.flatnonzero(good)


def check_packing(model: "nn.Module", whole: bool = True) -> None:
    """Refuses a model that does not separate the documents of a sample.

    transformers detects documents by restarting positions, if a model passes them on to its attention. Not all models
    that take `position_ids` do (OPT's do not). A model is therefore tested on two documents of four tokens, in which the
    first must not affect the second.

    Args:
        model: the model, on all its ranks at once if there are several.
        whole: False for a stage of a pipeline, or one that gets pieces of sequences: only its arguments are checked.

    Raises:
        WorkloadError: it does not separate documents.
    """
    instead = "give packing=packed, or packing=padded for a document a sample"
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise WorkloadError(
            f"packing=documents separates documents by position_ids, which the model's forward does not take; {instead}"
        )
    if whole and not _independent(model):
        raise WorkloadError(
            f"packing=documents needs a model whose tokens see only their own document, but in {type(model).__name__} "
            f"the tokens of one document depend on another; {instead}"
        )


def _independent(model: "nn.Module") -> bool:
    """True if the second of two documents does not depend on the first."""
    import torch

    device = next(model.parameters()).device
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2, device=device)
    tokens = torch.tensor([[5, 6, 7, 8, 3, 4, 3, 4], [1, 2, 1, 2, 3, 4, 3, 4]], device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            output = model(input_ids=tokens, position_ids=positions)
    finally:
        model.train(was_training)
    first_logits, other_logits = getattr(output, "logits", output)[:, 4:].float()
    # Rows of a batch may be rounded differently, but by much less than the effect of another context.
    return bool((first_logits - other_logits).abs().max() <= 1e-2 * first_logits.std())
