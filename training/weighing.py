"""What each micro-batch counts for, so that the loss of a step is the mean over all that is predicted in it."""

from typing import TYPE_CHECKING

from ..models.batches import batch_slice, entries
from ..models.data import Task
from ..models.workload import Batch
from .data.samples import TrainingData, num_predicted
from .training import Training

if TYPE_CHECKING:
    import torch


def factors(training: Training, samples: TrainingData, batches: list[Batch]) -> "torch.Tensor | None":
    """What the loss of each micro-batch is multiplied by, so that every token that counts does so alike; all ranks call it.

    Args:
        training: whose passes follow.
        samples: where the batches come from.
        batches: as `Training.micro_batches` returns them.

    Returns:
        Shape [micro-batches], on the device; None where all count alike anyway.
    """
    if samples.even:
        return None
    import torch

    task: Task = getattr(training.workload.batch, "task", "causal")
    parts = _cut(batches, training.grad_accum)
    counts = torch.stack([num_predicted(task, each) for each in parts]).double()
    total = training.over_replicas(counts.sum())
    return (counts * (len(parts) * training.world.replicas) / total).float()


def _cut(batches: list[Batch], count: int) -> list[Batch]:
    """Micro-batches, also of a pipeline, whose batch is one."""
    if len(batches) != 1:
        return batches
    (batch,) = batches
    size = next(iter(entries(batch).values())).shape[0] // count
    return [batch_slice(batch, number * size, (number + 1) * size) for number in range(count)]
