"""How samples are cut from tokens: in a row, in a row with documents apart, or a document each.

n     samples asked for
L     tokens of a sample
row   what a sample is cut from: the number of a window of L tokens, or of a document
"""

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.errors import WorkloadError
from ...models.data import Task
from .order import DataPlan, Packing
from .store import TokenStore, made_once, read_about

if TYPE_CHECKING:
    from torch import nn

ROWS = "rows.bin"
_ROWS_AT_ONCE = 1 << 20
_TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Samples as they are cut from the tokens."""

    tokens: np.ndarray
    """int64, shape [n, L]."""
    trained: np.ndarray | None
    """Which tokens are predicted, bool, shape [n, L]; None for all."""
    real: np.ndarray | None
    """Which tokens are not padding, bool, shape [n, L]; None for all."""
    positions: np.ndarray | None
    """Of each token in its document, counted from where the sample's part of it begins, int64, [n, L]."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What samples are cut from."""

    store: TokenStore
    """The tokens."""
    packing: Packing
    """How."""
    length: int
    """Tokens of a sample, L."""
    pad_id: int
    """What fills up."""

    @property
    def num_rows(self) -> int:
        """How many rows there are, whether or not there is something to train on in them."""
        if self.packing == "padded":
            assert self.store.boundaries is not None
            return len(self.store.boundaries) - 1
        return self.store.about.tokens // self.length

    def cut(self, rows: np.ndarray) -> Cut:
        """Samples of these rows."""
        return self._padded(rows) if self.packing == "padded" else self._windows(rows)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of padded samples of these rows, padding left out, int64, shape [n]."""
        assert self.store.boundaries is not None
        return np.minimum(self.store.boundaries[rows + 1] - self.store.boundaries[rows], self.length)

    def _windows(self, rows: np.ndarray) -> Cut:
        tokens = np.empty((len(rows), self.length), dtype=np.int64)
        starts = rows * self.length
        for out, start in zip(tokens, starts.tolist()):
            self.store.put(out, start)
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
        """Where in windows documents begin, bool, shape [n, L]."""
        assert self.store.boundaries is not None
        first = np.searchsorted(self.store.boundaries, starts, side="left")
        counts = np.searchsorted(self.store.boundaries, starts + self.length, side="left") - first
        windows = np.repeat(np.arange(len(starts)), counts)
        within = np.arange(len(windows)) - np.repeat(np.cumsum(counts) - counts, counts)
        out = np.zeros((len(starts), self.length), dtype=bool)
        out[windows, self.store.boundaries[first[windows] + within] - starts[windows]] = True
        return out

    def _padded(self, rows: np.ndarray) -> Cut:
        assert self.store.boundaries is not None
        starts = self.store.boundaries[rows]
        lengths = self.lengths(rows)
        tokens = np.full((len(rows), self.length), self.pad_id, dtype=np.int64)
        real = np.arange(self.length) < lengths[:, None]
        trained = real.copy()
        for number, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist())):
            self.store.put(tokens[number, :length], start)
            if self.store.about.masked:
                self.store.put_trained(trained[number, :length], start)
        return Cut(tokens=tokens, trained=trained, real=real, positions=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Usable:
    """The rows with something to train on: one without would have no mean loss."""

    rows: np.ndarray | None
    """Their numbers, int64; None for all."""
    samples: int
    """How many."""
    shortened: int
    """Documents that are longer than a sample, whose ends are left out."""
    folder: Path | None = None
    """Where that is kept; None where it was not looked for."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Usable._all, (self.samples,)) if self.folder is None else (Usable.read, (self.folder,))

    @staticmethod
    def _all(samples: int) -> "Usable":
        return Usable(rows=None, samples=samples, shortened=0)

    @staticmethod
    def read(folder: Path) -> "Usable":
        """What a folder of the cache says, mapped into memory."""
        about = read_about(folder)
        rows = np.asarray(np.memmap(folder / ROWS, dtype=np.int64, mode="r")) if ROWS in about["files"] else None
        return Usable(rows=rows, samples=about["found"], shortened=about["shortened"], folder=folder)


def usable_rows(layout: Layout, task: Task, cache: Path) -> Usable:
    """The rows with something to train on; where that takes a look at all of them, it is kept in the cache."""
    if layout.packing != "padded" and not layout.store.about.masked:
        return Usable._all(layout.num_rows)
    wanted = {
        "rows of": layout.store.folder.name,
        "packing": layout.packing,
        "length": layout.length,
        "task": task,
    }

    def make(folder: Path) -> dict[str, Any]:
        found = shortened = 0
        with (folder / ROWS).open("wb") as file:
            for rows, more in _looked_through(layout, task):
                file.write(rows.tobytes())
                found, shortened = found + len(rows), shortened + more
        if found in (0, layout.num_rows):
            (folder / ROWS).unlink()
        return {"found": found, "shortened": shortened}

    return Usable.read(made_once(cache, wanted, make))


def _looked_through(layout: Layout, task: Task) -> Iterator[tuple[np.ndarray, int]]:
    """A batch of rows at a time those with something to train on, and how many documents of the batch are too long."""
    boundaries = layout.store.boundaries if layout.packing == "padded" else None
    step = max(1, _TOKENS_AT_ONCE // layout.length) if layout.store.about.masked else _ROWS_AT_ONCE
    least = 2 if task == "causal" else 1
    for begin in range(0, layout.num_rows, step):
        rows = np.arange(begin, min(begin + step, layout.num_rows), dtype=np.int64)
        lengths = None if boundaries is None else np.diff(boundaries[begin : begin + len(rows) + 1])
        if layout.store.about.masked:
            trained = layout.cut(rows).trained
            assert trained is not None
            good = trained[:, least - 1 :].any(axis=1)  # the first token of a causal sample is predicted from nothing
        else:
            assert lengths is not None
            good = lengths >= least
        yield rows[good], 0 if lengths is None else int((lengths > layout.length).sum())


def check_packing(
    model: "nn.Module | Collection[str]", packing: Packing | DataPlan | None, task: Task = "causal"
) -> None:
    """Refuses `documents` for a model that does not keep documents apart.

    transformers tells documents by positions that begin anew, where a model has them passed on to its attention. Not all do
    that take `position_ids` (OPT's do not): a model that has its weights is tried on two documents of four tokens, in which
    nothing of the first may reach the second.

    Args:
        model: the model, on all its ranks at once where there are several, or the names of what its forward takes. Of a model
            without weights (on the meta device) and of names only the names are looked at.
        packing: how samples are packed, or the plan that says so.
        task: what is trained.

    Raises:
        WorkloadError: it does not keep documents apart.
    """
    asked = packing.packing if isinstance(packing, DataPlan) else packing
    if asked != "documents":
        return
    instead = "give packing=packed, or packing=padded for a document a sample"
    if task != "causal":
        raise WorkloadError(
            f"packing=documents is for causal language models, and this one's task is {task}; {instead}"
        )
    names = model if isinstance(model, Collection) else list(inspect.signature(model.forward).parameters)
    if "position_ids" not in names:
        raise WorkloadError(
            f"packing=documents tells documents by position_ids, which the model's forward does not take; {instead}"
        )
    if not isinstance(model, Collection) and not _apart(model):
        raise WorkloadError(
            f"packing=documents needs a model whose tokens see their own document only, but in {type(model).__name__} those "
            f"of one document follow from another's; {instead}"
        )


def _apart(model: "nn.Module") -> bool:
    """Whether the second of two documents is computed without the first."""
    import torch

    weight = next(model.parameters(), None)
    if weight is None or weight.is_meta:
        return True
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2, device=weight.device)
    tokens = torch.tensor([[5, 6, 7, 8, 3, 4, 3, 4], [1, 2, 1, 2, 3, 4, 3, 4]], device=weight.device)
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            found = model(input_ids=tokens, position_ids=positions)
    finally:
        model.train(was)
    first, second = getattr(found, "logits", found)[:, 4:].float()
    # Rows of a batch may be rounded differently, but not by as much as another context makes.
    return bool((first - second).abs().max() <= 1e-2 * first.std())
