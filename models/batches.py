"""Checks batches, cuts them into micro-batches, moves them, and passes them to a model."""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..base.errors import WorkloadError
from .workload import Batch, Workload

if TYPE_CHECKING:
    import torch
    from torch import nn


def make_batch(workload: Workload, size: int, seed: int) -> Batch:
    """Returns a checked batch of the workload.

    Raises:
        WorkloadError: it is not a dict or tuple of CPU tensors whose first dimension is `size`.
    """
    import torch

    batch = workload.batch(size, seed)
    subject = f"{workload.name}: batch({size}, {seed})"
    if isinstance(batch, list):
        batch = tuple(batch)
    if not isinstance(batch, Mapping | tuple):
        raise WorkloadError(f"{subject} must be a dict or a tuple of tensors, but is {type(batch).__name__}")
    if not batch:
        raise WorkloadError(f"{subject} is an empty {type(batch).__name__}; it must contain tensors")
    for key, value in entries(batch).items():
        if not isinstance(value, torch.Tensor):
            flat = (
                '; flatten the batch into one dict of tensors, such as {"image": ..., "boxes": ...}'
                if isinstance(value, (Mapping, list, tuple))
                else ""
            )
            raise WorkloadError(f"{subject}: entry {key!r} must be a tensor, but is {type(value).__name__}{flat}")
        if value.device.type != "cpu":
            raise WorkloadError(
                f"{subject}: entry {key!r} must be on the CPU, but is on {value.device}; batches are made there, "
                "and each rank takes its part to the device of its model"
            )
        if value.dim() == 0 or value.shape[0] != size:
            raise WorkloadError(
                f"{subject}: the first dimension of entry {key!r} must be the batch's size, {size}, but its "
                f"shape is {tuple(value.shape)}"
            )
    return dict(batch) if isinstance(batch, Mapping) else batch


def step_seed(seed: int, number: int) -> int:
    """Seed of a step's batch, by the step's number."""
    # NumPy's older generators take 32 bits.
    return (seed * 1_000_003 + number) % 2**31


def entries(batch: Batch) -> dict[str | int, Any]:
    """Entries of a batch, by name or by position."""
    return dict(batch.items() if isinstance(batch, Mapping) else enumerate(batch))


def batch_slice(batch: Batch, start: int, stop: int) -> Batch:
    """Samples `start` to `stop` - 1 of a batch, as views."""
    return each_tensor(batch, lambda tensor: tensor[start:stop])


def num_bytes(batch: Batch) -> int:
    """Bytes of the batch's tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in entries(batch).values())


def to_device(batch: Batch, device: "torch.device") -> Batch:
    """Copies the batch to a device; the copy from pinned memory is asynchronous."""
    return each_tensor(batch, lambda tensor: tensor.to(device, non_blocking=True))


def each_tensor(batch: Batch, function: "Callable[[torch.Tensor], Any]") -> Batch:
    """Applies `function` to every tensor of the batch; a tensor that occurs twice is converted once."""
    converted: dict[int, Any] = {}

    def once(tensor: "torch.Tensor") -> Any:
        if id(tensor) not in converted:
            converted[id(tensor)] = function(tensor)
        return converted[id(tensor)]

    if isinstance(batch, Mapping):
        return {key: once(value) for key, value in batch.items()}
    return tuple(once(value) for value in batch)


class ForwardPass:
    """Calls a workload's model and computes its loss."""

    def __init__(self, workload: Workload, model: "nn.Module") -> None:
        self._workload = workload
        self._model = model
        self._names = _forward_names(model)

    def __call__(self, batch: Batch, watch: Callable[[Any], None] | None = None) -> "torch.Tensor":
        """Returns the scalar loss of a batch. No other output of the model is kept alive.

        Args:
            watch: called with the model's output.

        Raises:
            WorkloadError: the loss is not a scalar tensor.
        """
        args, kwargs = self.inputs(batch)
        output = self._model(*args, **kwargs)
        if watch is not None:
            watch(output)
        return self.loss(output, batch)

    def inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the model from a batch, by position and by name.

        Raises:
            WorkloadError: the model takes no entry of it.
        """
        if isinstance(batch, Mapping):
            names = self._names
            arguments = {name: value for name, value in batch.items() if names is None or name in names}
            if not arguments:
                raise WorkloadError(
                    f"{self._workload.name}: the model's forward takes "
                    f"{', '.join(sorted(self._names or ()))}, but "
                    f"the batch has {', '.join(map(str, batch))}"
                )
            return (), arguments
        return (batch[:-1] if self._workload.loss is not None and len(batch) > 1 else batch), {}

    def loss(self, output: Any, batch: Batch) -> "torch.Tensor":
        """Returns the scalar loss of a model's output for a batch.

        Raises:
            WorkloadError: it is not a scalar tensor.
        """
        import torch

        loss = self._loss(output, batch)
        subject = "loss(output, batch)" if self._workload.loss is not None else "the model's own loss"
        if not isinstance(loss, torch.Tensor):
            raise WorkloadError(
                f"{self._workload.name}: {subject} must be a scalar tensor, but is {type(loss).__name__}"
            )
        if loss.numel() != 1:
            raise WorkloadError(
                f"{self._workload.name}: {subject} must be a scalar tensor, the mean over the batch, but its "
                f"shape is {tuple(loss.shape)}"
            )
        return loss.reshape(())

    def _loss(self, output: Any, batch: Batch) -> Any:
        import torch

        if self._workload.loss is not None:
            return self._workload.loss(output, batch)
        if isinstance(output, torch.Tensor):
            return output
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise WorkloadError(
                f"{self._workload.name}: without its own loss the workload needs a model that returns "
                f"one, but it returned {type(output).__name__} without a loss; give Workload(loss=...)"
            )
        return loss


def _forward_names(model: "nn.Module") -> set[str] | None:
    """Names of the arguments of the model's forward; None if it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}
