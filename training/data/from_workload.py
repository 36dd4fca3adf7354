"""Samples from a workload that makes its own batches."""

from typing import Any

import numpy as np

from ...models.batches import batch_slice, each_tensor, entries, make_batch
from ...models.data import TokenBatches
from ...models.workload import Batch, Workload
from ..seeds import step_seed


class FromWorkload:
    """The data of a workload as `TrainingData`: what its `batch(size, seed)` makes, a batch a step.

    Sample i of step s is what `batch(samples_per_step, step_seed(seed, s))` has at i, as in a dry run (`Training`): it
    follows from the seed, its position s * samples_per_step + i, and `samples_per_step`, which must stay the same when a
    training goes on; not from dp, pp or micro-batches. What the workload's function draws from besides its seed is its own
    affair. Evaluation has batches of seeds before that of step 0.

    Args:
        workload: whose batches.
        seed: of the training.
        samples_per_step: the global batch; None for the workload's.
        num_evaluation: samples to evaluate with.
    """

    even = True
    """As dry runs take it: the mean over a batch is that over its micro-batches."""
    num_training = None
    """No sample comes twice by intent."""

    def __init__(
        self, workload: Workload, *, seed: int = 0, samples_per_step: int | None = None, num_evaluation: int = 0
    ) -> None:
        self.workload = workload
        self.seed = seed
        self.samples_per_step = samples_per_step if samples_per_step is not None else workload.global_batch
        self.num_evaluation = num_evaluation
        self._last: tuple[int, Batch] | None = None

    def ids(self, start: int, count: int) -> np.ndarray:
        """The positions themselves."""
        return np.arange(start, start + count, dtype=np.int64)

    def __call__(self, start: int, count: int) -> Batch:
        """The samples at these positions."""
        return self._between(start, count, 0)

    def evaluation(self, start: int, count: int) -> Batch:
        """Samples of batches that no step has.

        Raises:
            IndexError: there are not as many.
        """
        if start + count > self.num_evaluation:
            raise IndexError(
                f"samples {start} to {start + count - 1} were asked for, but {self.num_evaluation} are held out"
            )
        batches = -(-self.num_evaluation // self.samples_per_step)
        return self._between(start, count, -batches)

    def describe(self) -> dict[str, Any]:
        """What the data is, as plain data."""
        batch = self.workload.batch
        follows = {"workload": self.workload.id, "seed": self.seed, "samples_per_step": self.samples_per_step}
        return {
            "paths": [],
            "name": self.workload.name,
            "made_up": isinstance(batch, TokenBatches) and batch.text is None,
            **follows,
            "digest": "-".join(map(str, follows.values())),
        }

    def _between(self, start: int, count: int, first: int) -> Batch:
        """Samples `start` on of the batches from step `first` on."""
        pieces = []
        while count > 0:
            step, at = divmod(start, self.samples_per_step)
            stop = min(at + count, self.samples_per_step)
            pieces.append(batch_slice(self._step(first + step), at, stop))
            start, count = start + stop - at, count - (stop - at)
        return _joined(pieces)

    def _step(self, step: int) -> Batch:
        last = self._last  # evaluations and the samples of the next step are asked for from several threads
        if last is None or last[0] != step:
            self._last = last = step, make_batch(self.workload, self.samples_per_step, step_seed(self.seed, step))
        return last[1]


def _joined(pieces: list[Batch]) -> Batch:
    """Batches as one; one alone as a copy, so that whoever changes it does not change what is kept."""
    import torch

    if len(pieces) == 1:
        return each_tensor(pieces[0], lambda tensor: tensor.clone())
    held = [entries(each) for each in pieces]
    joined: dict[Any, Any] = {key: torch.cat([each[key] for each in held]) for key in held[0]}
    return joined if isinstance(pieces[0], dict) else tuple(joined.values())
