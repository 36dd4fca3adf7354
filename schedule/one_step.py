"""One forward pass, backward pass and optimizer step of a model, and what they computed."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._torch import tree_map
from ..errors import ScheduleError
from .compare import Numbers, gradients_of, weights_of
from .outputs import loss_of, tensors_of
from .parallel.collectives import Axis, all_gather
from .parallel.vocabulary import whole_logits
from .quiet import quiet
from .unformed import formed

Loss = Callable[..., torch.Tensor]


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    inputs: Any,
    loss: Loss | None,
    *,
    training: bool,
    device: torch.device,
    axis: Axis | None,
) -> Numbers:
    """One step of a model, whose weights are as before after it; without an optimizer, or in evaluation, its passes.

    Args:
        model: what `build` made, or a part of it.
        optimizer: of its parameters.
        inputs: example inputs, as `verify` takes them.
        loss: of the outputs, or of outputs and inputs; None for what `verify` does without one.
        training: whether in training mode.
        device: where it is.
        axis: the replicas that share the inputs.
    """
    batch = _as_call(inputs, device)
    args, kwargs = batch if axis is None else tree_map(lambda value: _share(value, axis), batch)
    # What draws random numbers in spite of all draws the same ones in either model.
    torch.manual_seed(0)
    pipeline = model.__dict__.get("pipeline")
    with quiet(model, training=training):
        model.zero_grad()
        if pipeline is not None:
            pipeline.keep_outputs = True
            value = pipeline.step(*args, **kwargs)
            parts = [wholes(each) for each in pipeline.outputs]
            # Only the last stage has outputs; per micro-batch, those without a batch are its mean.
            found = [torch.cat(p) if p[0].dim() else torch.stack(p).mean() for p in zip(*parts)]
        else:
            output = model(*args, **kwargs)
            value = _scalar(output, loss, (args, kwargs), axis)
            value.backward()
            found = wholes(output)
    # A weighting of the outputs says nothing that they do not say themselves, and nearly cancels by chance.
    says = pipeline is not None or loss is not None or loss_of(output) is not None
    mean = _mean(value.detach(), axis) if says and value is not None else None
    return Numbers(
        outputs={f"output {number}": _joined(each, axis) for number, each in enumerate(found)},
        loss=None if mean is None else float(mean),
        gradients=gradients_of(model),
        weights=_stepped(model, optimizer) if training and optimizer is not None else {},
    )


def wholes(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors of an output, in order, whole where they are cut over the vocabulary."""
    return [whole_logits(formed(each)).detach() for each in tensors_of(output)]


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights after a step that is taken back."""
    before = [(param, param.detach().clone()) for param in model.parameters()]
    optimizer.step()
    found = weights_of(model)
    with torch.no_grad():
        for param, value in before:
            param.copy_(value)
    return found


def _as_call(inputs: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as positional and keyword arguments on a device."""
    move = tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, inputs)
    if isinstance(move, dict):
        return (), move
    return (tuple(move) if isinstance(move, (tuple, list)) else (move,)), {}


def _scalar(output: Any, loss: Loss | None, inputs: Any, axis: Axis | None) -> torch.Tensor:
    """The loss to differentiate."""
    if loss is not None:
        required = [
            p for p in inspect.signature(loss).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]  # fmt: skip
        args, kwargs = inputs
        given = kwargs if kwargs else args if len(args) != 1 else args[0]
        return loss(output, given) if len(required) > 1 else loss(output)
    if (own := loss_of(output)) is not None:
        return own
    total = torch.zeros(())
    for each in map(formed, tensors_of(output)):
        if each.requires_grad:
            generator = torch.Generator().manual_seed(each.dim())
            value = whole_logits(each)
            size = value.shape[0] * (axis.size if axis else 1) if value.dim() else 0
            shape = (size, *value.shape[1:]) if value.dim() else ()
            weight = torch.randn(shape, generator=generator).to(value)
            if axis is not None and value.dim():
                weight = weight.chunk(axis.size)[axis.rank] * axis.size
            total = total.to(value) + (value * weight).sum()
    if not total.requires_grad:
        raise ScheduleError("verify: no output needs a gradient; pass loss=")
    return total


def _share(value: Any, axis: Axis) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.shape[0] % axis.size:
        raise ScheduleError(
            f"verify: the {axis.size} ranks of the dp axis must divide the batch, but it has {value.shape[0]}"
        )
    return value.chunk(axis.size)[axis.rank]


def _joined(value: torch.Tensor, axis: Axis | None) -> torch.Tensor:
    if axis is None or value.dim() == 0:
        return _mean(value, axis)
    return all_gather(value, 0, axis)


def _mean(value: torch.Tensor, axis: Axis | None) -> torch.Tensor:
    if axis is None:
        return value
    total = value.clone()
    dist.all_reduce(total, group=axis.group)
    return total / axis.size
