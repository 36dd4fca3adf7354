"""The steps of a loop of somebody's own: what the prepared model, optimizer and info share."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...base.errors import UsageError
from ...models.batches import batch_slice, entries, to_device
from ...models.workload import Batch
from .. import gradients
from ..data.samples import TrainingData
from ..training import Training
from ..weighing import factors

if TYPE_CHECKING:
    import torch


class Steps:
    """Optimizer steps of a training, in the parts that a loop calls one by one.

    A step is the same in every configuration: the loss of this replica's share of the global batch, its gradients, the
    optimizer's part. How many micro-batches it is made of, and in what order stages of a pipeline run them, is its own affair.

    Args:
        training: made without data of its own.
        samples: where batches come from.
        clip: largest norm of all gradients together; None for no limit.
    """

    def __init__(self, training: Training, samples: TrainingData, clip: float | None = None) -> None:
        if clip is not None and not clip > 0:
            raise UsageError(f"clip must be a norm above 0, or None for no limit, but got {clip!r}")
        self.training, self.samples = training, samples
        self.step = 0
        """Steps that are done."""
        self.norm: torch.Tensor | None = None
        """Norm of all gradients of the last step that was clipped, before that; float64, a scalar on the device."""
        self._clip = clip
        self._computed = self._unscaled = self._clipped = False

    def loss(self, batch: Batch) -> "torch.Tensor":
        """The mean loss over the global batch, the same on all ranks; its gradients are in place afterwards.

        Args:
            batch: this replica's samples of a step.

        Raises:
            UsageError: they are not as many, or the step before was not ended.
        """
        training = self.training
        if self._computed:
            raise UsageError(
                "the model was called again before optimizer.step(): a call takes all samples of a step, gradient accumulation "
                "included, so that every call with gradients is followed by loss.backward() and optimizer.step()"
            )
        mine, given = training.micro_batch * training.grad_accum, _size(batch)
        if given != mine:
            raise UsageError(
                f"the model takes this replica's {mine} samples of a step, as the loader gives them, but got {given}; under "
                "torch.no_grad() it takes any number"
            )
        training.reseed(self.step)
        batches = training.micro_batches(to_device(batch, training.device))
        total = training.passes(batches, factors=factors(training, self.samples, batches))
        self._computed = True
        return total.detach()

    def evaluated(self, batch: Batch) -> "torch.Tensor":
        """The mean loss over what all replicas give, without gradients; all ranks call it, with as many samples.

        Raises:
            UsageError: a step is under way whose gradients this would take away.
        """
        training = self.training
        if training.world.pp > 1:
            if self._computed:
                raise UsageError(
                    "in a pipeline an evaluation takes away the gradients: call optimizer.step() before it evaluates"
                )
            return training.passes([to_device(batch, training.device)])
        size, count = training.micro_batch, _size(batch)
        parts = [batch_slice(batch, at, min(at + size, count)) for at in range(0, count, size)]
        batches = [to_device(each, training.device) for each in parts]
        weights = factors(training, self.samples, batches)
        if weights is None and count % size:
            import torch

            shares = [_size(each) * len(parts) / count for each in parts]
            weights = torch.tensor(shares, device=training.device)
        return training.passes(batches, factors=weights)

    def backward(self, factor: "torch.Tensor | float" = 1.0) -> None:
        """Makes the gradients those of the loss times a factor."""
        if not self._computed:
            raise UsageError("there is no loss to go back from: call the model first, with gradients switched on")
        if isinstance(factor, float) and factor == 1.0:
            return
        import torch

        scale = torch.as_tensor(factor, device=self.training.device)
        if scale.device.type == "cpu" and float(scale) == 1.0:
            return
        gradients.multiply(self.training, scale.float())

    def clip(self, max_norm: float) -> "torch.Tensor":
        """Clips all gradients by their norm together, over all ranks.

        Returns:
            The norm before, float64, a scalar on the device.
        """
        if not self._computed:
            raise UsageError("there are no gradients to clip: call the model and loss.backward() first")
        training = self.training
        self._unscale()
        total = gradients.square(training)
        if training.world.size > 1:
            import torch.distributed as dist

            dist.all_reduce(total)
        self.norm = total.sqrt()
        gradients.multiply(training, (max_norm / (self.norm + 1e-6)).clamp(max=1.0).float())
        self._clipped = True
        return self.norm

    def update(self) -> None:
        """The optimizer's part; the gradients are gone after it.

        Raises:
            UsageError: there are none.
        """
        if not self._computed:
            raise UsageError(
                "optimizer.step() has no gradients: call the model with a batch of the loader, and loss.backward(), before"
            )
        if self._clip is not None and not self._clipped:
            self.clip(self._clip)
        self._unscale()
        self.training.precision.step(self.training.optimizer)
        self.step += 1
        self.drop()

    def drop(self) -> None:
        """Takes the gradients away, be they used or not."""
        self.training.optimizer.zero_grad(set_to_none=True)
        self._computed = self._unscaled = self._clipped = False

    def _unscale(self) -> None:
        if not self._unscaled:
            self.training.precision.unscale(self.training.optimizer)
            self._unscaled = True


def _size(batch: Batch) -> int:
    """Samples of a batch."""
    parts = entries(batch)
    if not parts:
        kind = "names" if isinstance(batch, Mapping) else "positions"
        raise UsageError(f"the model was called without a batch: give the loader's, whose {kind} it takes")
    return int(next(iter(parts.values())).shape[0])
