"""Forward and backward passes of one optimizer step: micro-batch by micro-batch, or through a pipeline."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..base.errors import WorkloadError
from ..models.batches import ForwardPass, batch_slice, to_device
from ..models.workload import Batch, Workload
from .precision import Precision

if TYPE_CHECKING:
    import torch
    from torch import nn

Watch = Callable[[Any], None] | None


class Accumulation:
    """Runs micro-batches one after the other; gradients add up.

    Gradients that are whole on every rank are averaged only with the last micro-batch, as `hsdp` groups of replicas sum
    their shards. Weights that are gathered once per step stay gathered until then.
    """

    def __init__(self, workload: Workload, model: "nn.Module", precision: Precision, hsdp: int) -> None:
        self.loss_of = ForwardPass(workload, model)
        """Returns the loss of one micro-batch."""
        self._model, self._precision, self._hsdp = model, precision, hsdp

    def __call__(
        self,
        batches: list[Batch],
        device: "torch.device | None",
        watch: Watch = None,
        factors: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        """Returns the mean loss; gradients are in place, unless they are switched off.

        Args:
            batches: this replica's micro-batches.
            device: device to copy batches to; None if they are there already.
            watch: called with the model's output for each of them.
            factors: factor of the loss of each, shape [micro-batches]; None for 1.
        """
        import torch

        total: torch.Tensor | None = None
        if replicas := self._model.__dict__.get("replicas"):
            replicas.passes = len(batches)
        for number, batch in enumerate(batches):
            self._announce(number == len(batches) - 1)
            if device is not None:
                batch = to_device(batch, device)
            with self._precision.autocast():
                loss = self.loss_of(batch, watch)
            if factors is not None:
                loss = _weighted(loss, factors[number])
            if torch.is_grad_enabled():
                self._precision.scale(loss / len(batches)).backward()
            value = loss.detach().float()
            total = value if total is None else total + value
        assert total is not None  # there is at least one micro-batch
        return total / len(batches)

    def _announce(self, is_last: bool) -> None:
        """Sets on modules of `fully_shard` if another micro-batch follows."""
        for module in self._model.__dict__.get("whole_for_a_step", ()):
            module.set_reshard_after_backward(is_last, recurse=False)
        if self._hsdp > 1 and hasattr(self._model, "set_requires_all_reduce"):
            self._model.set_requires_all_reduce(is_last)


class Pipelined:
    """Runs all micro-batches at once through `model.pipeline`, which orders them."""

    def __init__(self, workload: Workload, model: "nn.Module", precision: Precision) -> None:
        self._workload, self._model, self._precision = workload, model, precision
        self.loss_of = ForwardPass(workload, model)
        """Filters the arguments of the model's forward."""
        self._batch: Batch = ()
        self._factors: torch.Tensor | None = None

    @staticmethod
    def target(batch: Batch) -> "torch.Tensor":
        """Numbers of the samples, which the pipeline cuts into micro-batches along with the batch."""
        import torch

        tensors = list(batch.values() if isinstance(batch, Mapping) else batch)
        return torch.arange(tensors[0].shape[0])

    def loss(self, output: Any, numbers: "torch.Tensor") -> "torch.Tensor":
        """The workload's own loss of the micro-batch with these sample numbers."""
        with self._precision.autocast():
            begin, end = int(numbers[0]), int(numbers[-1]) + 1
            loss = self.loss_of.loss(output, batch_slice(self._batch, begin, end))
        return loss if self._factors is None else _weighted(loss, self._factors[begin // (end - begin)])

    def __call__(
        self,
        batches: list[Batch],
        device: "torch.device | None",
        watch: Watch = None,
        factors: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        """Returns the mean loss, on every rank; gradients are in place, unless they are switched off.

        Args:
            batches: this replica's samples, as one batch.
            device: device to copy them to; None if they are there already.
            watch: called on the last stage with the model's output for each micro-batch.
            factors: as for `Accumulation`.
        """
        (batch,) = batches
        self._batch = to_device(batch, device) if device is not None else batch
        args, kwargs = self.loss_of.inputs(self._batch)
        target = self.target(self._batch) if self._workload.loss is not None else None
        self._factors = factors
        with self._precision.autocast():
            loss = self._model.pipeline.step(*args, target=target, watch=watch, factors=factors, **kwargs)
        self._batch, self._factors = (), None
        return loss.float()


def check_pipeline(workload: Workload, cuts: int, stages: int) -> None:
    """Checks that a schedule cuts the model into the stages of `pp`.

    Raises:
        WorkloadError: it does not.
    """
    if (cuts + 1) % stages or (stages > 1 and not cuts):
        raise WorkloadError(
            f"{workload.name}: pp={stages} needs a schedule that cuts the model into {stages} stages, but it "
            f"makes {cuts + 1}; call sch[...].cut_pipeline_stage() on the last module of each but the last"
        )


def _weighted(loss: "torch.Tensor", factor: "torch.Tensor") -> "torch.Tensor":
    """Returns the loss of a micro-batch with its factor: 0 without labels, when the mean over them is not a number."""
    import torch

    return torch.where(factor > 0, loss * factor, 0.0)
