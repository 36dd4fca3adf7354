"""Gradients of a step: loss weights of micro-batches and ranks, norms, clipping."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..models.batches import batch_slice, entries, to_device
from ..models.data import Task
from ..models.workload import Batch
from ..results.probe import Computed
from .training import Training
from .training_data import TrainingData, num_predicted

if TYPE_CHECKING:
    import torch
    from torch import nn


def factors(training: Training, samples: TrainingData, batches: list[Batch]) -> "torch.Tensor | None":
    """Factors of the losses of micro-batches that give every token the same weight; all ranks call it.

    Args:
        batches: as `Training.micro_batches` returns them.

    Returns:
        Shape [micro-batches], on the device; None if all have the same weight.
    """
    if samples.even:
        return None
    import torch

    task: Task = getattr(training.workload.batch, "task", "causal")
    micro_batches = _cut(batches, training.grad_accum if training.world.pp > 1 else len(batches))
    counts = torch.stack([num_predicted(task, batch) for batch in micro_batches]).double()
    total = training.over_replicas(counts.sum())
    return (counts * (len(micro_batches) * training.world.replicas) / total).float()


def labels(training: Training, samples: TrainingData, share: Batch) -> "torch.Tensor":
    """Number of predicted tokens of all replicas' samples of a step, a scalar on the device; 1 if all steps have the same
    number. All ranks call it.
    """
    import torch

    if samples.even:
        return torch.ones((), device=training.device)
    task: Task = getattr(training.workload.batch, "task", "causal")
    return training.over_replicas(num_predicted(task, share).to(training.device, torch.float64).reshape(()))


def passes(training: Training, samples: TrainingData, share: Batch) -> "torch.Tensor":
    """Runs `Training.passes` on this replica's samples of a step, every token with the same weight."""
    batches = training.micro_batches(to_device(share, training.device))
    return training.passes(batches, factors=factors(training, samples, batches))


def _cut(batches: list[Batch], count: int) -> list[Batch]:
    """Micro-batches, also those of a pipeline, which has a single batch."""
    if len(batches) != 1:
        return batches
    (batch,) = batches
    size = next(iter(entries(batch).values())).shape[0] // count
    return [batch_slice(batch, number * size, (number + 1) * size) for number in range(count)]


CHUNK = 1 << 22
"""Number of elements whose squares are summed at a time."""


def computed(training: Training, loss: "torch.Tensor", samples: int, scale: float) -> Computed:
    """This rank's share of the loss and gradients, while the gradients exist.

    Replicated values count on each rank by its share.

    Args:
        training: after `passes`.
        loss: result of `passes`.
        samples: number of samples of all ranks.
        scale: factor of the loss, for float16.
    """
    import torch

    outline = training.outline
    zero = torch.zeros((), dtype=torch.float64, device=training.device)
    squares, dims = dict.fromkeys(outline.parameters, zero), dict[str, int]()
    for name, gradient, share in _shares(training):
        square = zero
        for piece in gradient.reshape(-1).split(CHUNK):
            square = square + share * torch.linalg.vector_norm(piece, dtype=torch.float64).square()
        # A parameter that the schedule added has no name in the model as constructed.
        original = outline.names.get(name, name)
        squares[original], dims[original] = squares.get(original, zero) + square, gradient.dim()
    # Waits for the device once, not for each parameter.
    values = (torch.stack([*squares.values()]).sqrt() / scale).tolist()
    all_of, vectors = ([list[float]() for _ in range(len(outline.blocks) + 1)] for _ in range(2))
    for name, norm in zip(squares, values, strict=True):
        all_of[outline.group(name)].append(norm)
        if dims.get(name, 2) < 2:
            vectors[outline.group(name)].append(norm)
    norms = [math.hypot(*group_norms) for group_norms in all_of]
    return Computed(
        loss=float(loss),
        gradient=math.hypot(*norms),
        blocks=tuple(norms[:-1]),
        vectors=tuple(math.hypot(*group_norms) for group_norms in vectors),
        parameters=tuple(values[: len(outline.parameters)]),
        samples=samples,
    )


def square(training: Training) -> "torch.Tensor":
    """This rank's share of the squared norm of all gradients, which is the sum over all ranks. float64, a scalar on
    the device.
    """
    import torch

    from ..base._torch import foreach_norm

    groups: dict[float, list[torch.Tensor]] = {}
    for _, gradient, share in _shares(training):
        groups.setdefault(share, []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=training.device)
    for share, gradients in groups.items():
        norms = foreach_norm(gradients, 2, torch.float32)  # also of gradients in 16 bits
        total += share * torch.stack([norm.to(total.device) for norm in norms]).double().square().sum()
    return total


def multiply(training: Training, factor: "torch.Tensor") -> None:
    """Multiplies every gradient in place by a scalar on the device."""
    from ..base._torch import foreach_multiply
    from ..schedule.parallel.sharding import local

    gradients = [local(parameter.grad) for parameter in training.model.parameters() if parameter.grad is not None]
    if gradients:
        foreach_multiply(gradients, factor)


def _shares(training: Training) -> "Iterator[tuple[str, torch.Tensor, float]]":
    """Yields every gradient on this rank: the parameter's name, the local part, and its weight, if several ranks have
    copies.
    """
    from ..schedule.parallel.sharding import is_dtensor, local, owner, piece_of, shards_of

    model, world = training.model, training.world
    elsewhere = _held_by_earlier_stages(model)
    replicas = model.__dict__.get("replicas")
    ranks = world.replicas * world.tp
    for name, param in model.named_parameters():
        if param.grad is None or id(param) in elsewhere:
            continue
        holder, leaf = owner(model, name)
        pieces, cut = 1, shards_of(holder).get(leaf)
        while cut is not None:
            pieces, cut = pieces * cut.axis.size, cut.then
        if is_dtensor(param.grad):
            pieces *= piece_of(param.grad)[1]
        elif replicas is not None and replicas.has_owner(param):
            # With ZeRO 1 a gradient is where its owner is.
            pieces *= replicas.holders(param)
        yield name, local(param.grad.detach()), pieces / ranks


def _held_by_earlier_stages(model: "nn.Module") -> set[int]:
    """Ids of tied parameters that count with an earlier stage of the pipeline, which also has them."""
    pipeline = model.__dict__.get("pipeline")
    if pipeline is None:
        return set()
    rank = pipeline.axis.rank
    return {id(tie.param) for tie in pipeline.ties if rank != tie.ranks[0]}
