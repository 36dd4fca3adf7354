"""Batches from a workload's own batch function or from a dataset object."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...base.errors import WorkloadError
from ...models.architecture import one_line
from ...models.batches import batch_slice, each_tensor, entries, make_batch, step_seed
from ...models.data import ImageBatches, Task, TokenBatches
from ...models.tasks import TaskBatches
from ...models.workload import Batch, Workload
from ...training.training_data import TrainingData
from .order import DataPlan, shuffled
from .preparing import OnRead, prepare


class FromWorkload:
    """Data of a workload as `TrainingData`: one call of its `batch(size, seed)` per step.

    Sample i of step s is sample i of `batch(samples_per_step, step_seed(seed, s))`, as in a dry run (`Training`). It
    depends on the seed, its position s * samples_per_step + i, and `samples_per_step`, which must not change when a
    training is resumed; not on dp, pp or micro-batches. The workload's function is responsible for any other
    randomness. Evaluation uses batches with seeds before that of step 0.

    Args:
        samples_per_step: the global batch; None for the workload's.
    """

    even = True
    """True, as in dry runs: the mean over a batch is the mean over its micro-batches."""
    num_training = None
    """None: no sample occurs twice by intent."""

    def __init__(
        self, workload: Workload, *, seed: int = 0, samples_per_step: int | None = None, num_evaluation: int = 0
    ) -> None:
        self.workload = workload
        self.seed = seed
        self.samples_per_step = samples_per_step if samples_per_step is not None else workload.global_batch
        self.num_evaluation = num_evaluation
        self.in_main_thread = not isinstance(
            workload.batch, (TokenBatches, ImageBatches, TaskBatches)
        )  # these have generators of their own
        self._last: tuple[int, Batch] | None = None

    def __call__(self, start: int, count: int) -> Batch:
        return self._between(start, count, 0)

    def evaluation(self, start: int, count: int) -> Batch:
        """Samples of batches that are in no step.

        Raises:
            IndexError: there are fewer samples.
        """
        if start + count > self.num_evaluation:
            raise IndexError(
                f"samples {start} to {start + count - 1} were requested, but {self.num_evaluation} are held out"
            )
        batches = -(-self.num_evaluation // self.samples_per_step)
        return self._between(start, count, -batches)

    def describe(self) -> dict[str, Any]:
        batch = self.workload.batch
        follows = {"workload": self.workload.id, "seed": self.seed, "samples_per_step": self.samples_per_step}
        return {
            "paths": [],
            "name": self.workload.name,
            "made_up": isinstance(batch, TokenBatches),
            **follows,
            "digest": "-".join(map(str, follows.values())),
        }

    def _between(self, start: int, count: int, first_step: int) -> Batch:
        """Samples from `start` on of the batches from step `first` on."""
        pieces = []
        while count > 0:
            step, offset = divmod(start, self.samples_per_step)
            stop = min(offset + count, self.samples_per_step)
            pieces.append(batch_slice(self._step(first_step + step), offset, stop))
            start, count = start + stop - offset, count - (stop - offset)
        return _joined(pieces)

    def _step(self, step: int) -> Batch:
        cached = self._last  # evaluations and the samples of the next step are requested from several threads
        if cached is None or cached[0] != step:
            self._last = cached = step, make_batch(self.workload, self.samples_per_step, step_seed(self.seed, step))
        return cached[1]


def _joined(pieces: list[Batch]) -> Batch:
    """Concatenates batches; a single one is copied, so that changes do not affect the cached batch."""
    import torch

    if len(pieces) == 1:
        return each_tensor(pieces[0], lambda tensor: tensor.clone())
    held = [entries(piece) for piece in pieces]
    joined: dict[Any, Any] = {key: torch.cat([tensors[key] for tensors in held]) for key in held[0]}
    return joined if isinstance(pieces[0], dict) else tuple(joined.values())


def training_data(
    plan: DataPlan, workload: Workload, cache: Path, on_read: OnRead = lambda share: None
) -> TrainingData:
    """Returns the training data of a workload.

    Args:
        plan: the request; without paths, the workload's own data is used.
        cache: a folder for tokens.
        on_read: called now and then with the share of new files that is read, from 0 to 1.

    Raises:
        WorkloadError: as `prepare`; or files are given for a workload that makes its own batches.
    """
    batch = workload.batch
    if not plan.paths:
        return FromWorkload(workload, seed=plan.seed, num_evaluation=4 * workload.global_batch)
    if not isinstance(batch, TokenBatches):
        raise WorkloadError(
            f"{workload.name} makes its own batches, which files do not replace: leave --data out, or read them in its batch "
            "function"
        )
    return prepare(
        plan, seq_len=batch.seq_len, task=batch.task, vocab_size=batch.vocab_size, cache=cache, pad_id=batch.pad_id,
        on_read=on_read,
    )  # fmt: skip


Collate = Callable[[list[Any]], Any]


class Dataset(Protocol):
    """A map-style data set of PyTorch, Hugging Face `datasets`, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class FromDataset:
    """A data set as `TrainingData`: epochs follow each other, each in its own order, which depends on the seed.

    Args:
        dataset: samples by number, each a dict, a tuple or a single one of tensors, arrays, numbers or lists of them.
        collate: makes a batch of a list of samples; None stacks them.
        task: task of a language model, which determines the labels that count; None if all samples count equally.
        shuffle: give each epoch its own order; otherwise all have that of the data set.
        seed: seed of the order.

    Raises:
        WorkloadError: it cannot be read by number, or is empty, or its samples cannot be batched.
    """

    in_main_thread = False
    num_evaluation = 0
    """None are held out: the user has another data set for evaluation."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        collate: Collate | None = None,
        task: Task | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        check_dataset(dataset)
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.collate = collate or stacked
        labels = entries(self._made([0])).get("labels")
        self.even = task in (None, "image") or labels is None or labels.dim() < 2

    @property
    def num_training(self) -> int:
        """Number of samples of an epoch."""
        return len(self.dataset)

    def ids(self, start: int, count: int) -> np.ndarray:
        """Sample numbers at these positions, int64, shape [count]."""
        positions = np.arange(start, start + count, dtype=np.int64)
        return shuffled(positions, len(self.dataset), self.seed) if self.shuffle else positions % len(self.dataset)

    def __call__(self, start: int, count: int) -> Batch:
        return self._made(self.ids(start, count).tolist())

    def evaluation(self, start: int, count: int) -> Batch:
        """Always raises, because no samples are held out.

        Raises:
            IndexError: always.
        """
        raise IndexError(f"samples {start} to {start + count - 1} were requested, but none are held out of a data set")

    def describe(self) -> dict[str, Any]:
        follows = {"samples": len(self.dataset), "shuffle": self.shuffle, "seed": self.seed}
        kind = type(self.dataset).__name__
        return {"paths": [], "name": kind, **follows, "digest": "-".join(map(str, (kind, *follows.values())))}

    def _made(self, numbers: list[int]) -> Batch:
        batch = self.collate([self.dataset[number] for number in numbers])
        if isinstance(batch, Mapping):
            return dict(batch)
        return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def check_dataset(dataset: Any) -> None:
    """Refuses a data set without random access.

    Raises:
        WorkloadError: it has none; the message names the alternatives.
    """
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(dataset, DataLoader):
        raise WorkloadError(
            "a DataLoader decides on batches itself, which must follow from the strategy here: give its dataset, and its "
            "collate_fn as collate="
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise WorkloadError(
            f"a {type(dataset).__name__} cannot be indexed, so the order of its samples would depend on the ranks "
            "that read it: give a data set with __len__ and __getitem__, or files"
        )
    if not len(dataset):
        raise WorkloadError(f"the {type(dataset).__name__} to train on is empty")


def stacked(samples: Sequence[Any]) -> Batch:
    """Stacks samples to a batch: a dict of dicts, otherwise a tuple.

    Raises:
        WorkloadError: they have other parts, a part is not a number or tensor, or has several shapes.
    """
    import torch

    named = isinstance(samples[0], Mapping)
    parts = [
        entries(dict(sample) if named else tuple(sample) if isinstance(sample, (tuple, list)) else (sample,))
        for sample in samples
    ]
    if any(part.keys() != parts[0].keys() for part in parts):
        raise WorkloadError(f"samples have other parts than the first, which has {', '.join(map(str, parts[0]))}")
    batch = {}
    for name in parts[0]:
        try:
            batch[name] = torch.stack([torch.as_tensor(part[name]) for part in parts])
        except (TypeError, ValueError, RuntimeError) as error:
            raise WorkloadError(
                f"part {name!r} of the samples cannot be stacked to a batch: {one_line(error)}; leave it out of the data set, "
                "pad the samples to one length, or give collate=, such as a transformers data collator"
            ) from error
    return {str(name): tensor for name, tensor in batch.items()} if named else tuple(batch.values())
