"""Samples by their position in an endless sequence, which depends only on the seed."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...models.data import Task, inputs_and_labels
from ...training.training_data import IGNORED
from .order import DataPlan, HashedDraw, Split, shuffled
from .packing import SampleLayout

if TYPE_CHECKING:
    import torch

_TRAINING, _EVALUATION = 1, 2
"""Random streams of the masks of masked language models."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples of tokens: `samples(start, count)` is the batch at positions `start` to `start + count - 1`.

    A batch has `input_ids` and `labels`, int64, shape [count, seq_len], like `models.data.TokenBatches`, and if needed
    `position_ids` (separate documents) or `attention_mask` (padding, for models that attend in both directions).
    Epochs follow each other, each in its own order. A batch depends only on seed and positions: it is the same however
    positions are grouped into calls, on any rank, in any process, after any restart. Made by `prepare`; safe to use
    from several threads.
    """

    plan: DataPlan
    """The request, with all defaults filled in."""
    task: Task
    """`causal`, `masked` or `seq2seq`."""
    vocab_size: int
    """All ids are smaller."""
    pad_id: int | None
    """An id that does not replace a masked token."""
    layout: SampleLayout
    """Cuts samples from tokens."""
    usable: np.ndarray | None
    """Rows that samples are cut from, int64; None for all."""
    split: Split
    """Samples that are held out."""

    in_main_thread: ClassVar[bool] = False

    def __len__(self) -> int:
        return self.num_training

    @property
    def num_training(self) -> int:
        return self.split.training

    @property
    def num_evaluation(self) -> int:
        return self.split.evaluation

    @property
    def even(self) -> bool:
        return self.layout.packing == "packed" and not self.layout.store.about.masked

    def ids(self, start: int, count: int) -> np.ndarray:
        """Numbers in the data of the samples at these positions, int64, shape [count]."""
        positions = _range(start, count)
        if self.plan.shuffle:
            return self.split.training_ids(shuffled(positions, len(self), self.plan.seed))
        return self.split.training_ids(positions % len(self))

    def __call__(self, start: int, count: int) -> "dict[str, torch.Tensor]":
        draw = HashedDraw(self.plan.seed, _TRAINING, _range(start, count))
        return self._batch(self.ids(start, count), draw)

    def evaluation(self, start: int, count: int) -> "dict[str, torch.Tensor]":
        """Held-out samples by number, independent of the seed.

        Raises:
            IndexError: there are fewer samples.
        """
        numbers = _range(start, count)
        if start + count > self.num_evaluation:
            raise IndexError(
                f"samples {start} to {start + count - 1} were requested, but {self.num_evaluation} are held out"
            )
        return self._batch(self.split.evaluation_ids(numbers), HashedDraw(0, _EVALUATION, numbers))

    def describe(self) -> dict[str, Any]:
        about = self.layout.store.about
        follows: Mapping[str, Any] = {
            "tokens_digest": about.digest,
            "task": self.task,
            "sample_tokens": self.layout.length,
            "packing": self.plan.packing,
            "train_on": self.plan.train_on,
            "held_out": self.plan.held_out,
            "shuffle": self.plan.shuffle,
            "seed": self.plan.seed,
        }
        return {
            "paths": list(self.plan.paths),
            "tokenizer": self.plan.tokenizer or "bytes",
            "documents": about.documents,
            "tokens": about.tokens,
            "samples": self.num_training,
            "evaluation_samples": self.num_evaluation,
            "unused_samples": self.layout.num_rows - self.split.samples,
            "shortened_documents": self.layout.shortened,
            **follows,
            "digest": hashlib.sha256(json.dumps(follows, sort_keys=True).encode()).hexdigest(),
        }

    def _rows(self, ids: np.ndarray) -> np.ndarray:
        return ids if self.usable is None else self.usable[ids]

    def _batch(self, ids: np.ndarray, draw: HashedDraw) -> "dict[str, torch.Tensor]":
        import torch

        cut = self.layout.cut(self._rows(ids))
        real = None if cut.real is None else torch.from_numpy(cut.real)
        batch = inputs_and_labels(
            self.task, torch.from_numpy(cut.tokens), vocab_size=self.vocab_size, pad_id=self.pad_id,
            mask_id=self.layout.store.about.mask_id, draw=draw, real=real,
        )  # fmt: skip
        if self.task == "causal" and cut.trained is not None:
            batch["labels"] = torch.from_numpy(np.where(cut.trained, cut.tokens, IGNORED))
        if cut.positions is not None:
            batch["position_ids"] = torch.from_numpy(cut.positions)
        if real is not None and self.task != "causal":  # a causal model's tokens do not see the padding after them
            batch["attention_mask"] = real.long()
        return batch


def _range(start: int, count: int) -> np.ndarray:
    if start < 0 or count < 1:
        raise IndexError(f"positions must be from 0 on and at least one, but are {count} from {start}")
    return np.arange(start, start + count, dtype=np.int64)
