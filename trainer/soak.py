"""The soak of a training: tries the longest batch, an evaluation and a save after the first step, without an effect
on it.

A lack of memory, or of disk space, that would show hours later shows in the first minute. The optimizer's state exists
then. The passes of the longest batch run with gradients, which are dropped, so that weights and state do not change.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..models.batches import entries
from ..models.data import TokenBatches
from ..training.training_data import TrainingData
from .data.from_workload import FromWorkload
from .data.samples import Samples

if TYPE_CHECKING:
    from ..training.training import Training

LONG = 100
"""Number of steps from which a training is soaked."""
LOOK_S = 5.0
"""Time limit for the search for the longest batch, if batches have to be made, s."""
_SAMPLES = 1 << 22
"""Largest number of samples whose lengths are checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Longest:
    """The longest batch that was found."""

    step: int
    """Its step, numbered from the first checked step, 0."""
    looked_at: int
    """Number of steps whose batches were checked."""


def longest(samples: TrainingData, start: int, steps: int, size: int, micro_batch: int) -> Longest:
    """Returns the step whose batch needs the most memory: the one with the most tokens in a micro-batch, without
    padding if samples are padded to one length; the largest batch if the user's function makes batches.

    Args:
        start: position of the first step's first sample.
        size: samples of a step.
        micro_batch: samples of a forward pass.
    """
    if isinstance(samples, Samples):
        steps = max(1, min(steps, _SAMPLES // size))
        lengths = samples.lengths(start, steps * size)
        if lengths is None:
            return Longest(step=0, looked_at=steps)
        passes = lengths.reshape(steps, -1, micro_batch if size % micro_batch == 0 else size).sum(axis=2)
        return Longest(step=int(passes.max(axis=1).argmax()), looked_at=steps)
    if not isinstance(samples, FromWorkload) or isinstance(samples.workload.batch, TokenBatches):
        return Longest(step=0, looked_at=steps)  # all are equal
    until, sizes = time.monotonic() + LOOK_S, list[int]()
    while len(sizes) < steps and (not sizes or time.monotonic() < until):
        batch = samples(start + len(sizes) * size, size)
        sizes.append(sum(tensor.numel() for tensor in entries(batch).values()))
    return Longest(step=int(np.argmax(sizes)), looked_at=len(sizes))


def agreed(training: "Training", longest_batch: Longest | None) -> Longest:
    """Broadcasts rank 0's result; all ranks call it."""
    if training.world.size == 1:
        assert longest_batch is not None, "a single rank searches"
        return longest_batch
    import torch

    values = torch.tensor(
        [0, 0] if longest_batch is None else [longest_batch.step, longest_batch.looked_at], device=training.device
    )
    torch.distributed.broadcast(values, src=0)
    step, looked_at = values.tolist()
    return Longest(step=step, looked_at=looked_at)
