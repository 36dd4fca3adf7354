"""Runs of two models, and where they depart."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._torch import DropoutNd, tree_flatten, tree_map
from ..errors import ScheduleError
from .forward import layers_of
from .parallel.collectives import Axis, all_gather
from .parallel.replicas import whole_gradient
from .parallel.sharding import owner, whole
from .parallel.vocabulary import SplitLogits, whole_logits
from .rounding import departure, largest
from .tree import find_module
from .unformed import UnformedLogits, formed

Loss = Callable[..., torch.Tensor]


@dataclass(slots=True)
class Run:
    """What one forward, backward and optimizer step gave, gathered over ranks."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    """Floating-point tensors of the output, in order."""
    loss: torch.Tensor | None = None
    """The loss; None where another rank computes it, and where it is a mere weighting of the outputs."""
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """By the parameter's name; None where there is none."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """After the optimizer step, by name."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """By how much a tensor departs."""

    what: str
    """Which."""
    departure: float
    """As `rounding.departure` has it; infinite where shapes or presence differ."""
    detail: str = ""
    """What differs, where it is not a number."""

    def __str__(self) -> str:
        return f"{self.what} {self.detail or f'departs by {self.departure:.2g}'}"


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    inputs: Any,
    loss: Loss | None,
    training: bool,
    device: torch.device,
    axis: Axis | None,
) -> Run:
    """One step of a model. With a data-parallel axis this rank computes its part of the batch."""
    out = Run()
    args, kwargs = as_call(inputs, device)
    batch = (args, kwargs)
    # What draws random numbers in spite of all draws the same ones in either model.
    torch.manual_seed(0)
    if axis is not None:
        args, kwargs = tree_map(lambda value: _share(value, axis), (args, kwargs))
    pipeline = model.__dict__.get("pipeline")
    with _mode(model, training), _no_dropout(model):
        model.zero_grad()
        if pipeline is not None:
            pipeline.keep_outputs = True
            value = pipeline.step(*args, **kwargs)
            parts = [floats(each) for each in pipeline.outputs]
            # Only the last stage has outputs; per micro-batch, those without a batch are its mean.
            found = [torch.cat(p) if p[0].dim() else torch.stack(p).mean() for p in zip(*parts)]
        else:
            output = model(*args, **kwargs)
            value = scalar(output, loss, (args, kwargs), axis, batch)
            value.backward()
            found = floats(output)
    out.outputs = [_joined(each, axis) for each in found]
    # A weighting of the outputs says nothing that they do not say themselves, and nearly cancels by chance.
    if pipeline is not None or loss is not None or _has_loss(output):
        out.loss = _mean(value.detach(), axis)
    replicas = model.__dict__.get("replicas")
    elsewhere = replicas is not None and replicas.owners
    for name, param in named(model):
        missing = param.grad is None and not elsewhere
        out.gradients[name] = None if missing else whole_gradient(model, name, param)
    if training and optimizer is not None:
        before = [(p, p.detach().clone()) for p in model.parameters()]
        optimizer.step()
        out.parameters = {name: whole(*owner(model, name), p.detach().clone()) for name, p in named(model)}
        with torch.no_grad():
            for param, value in before:
                param.copy_(value)
    return out


def compare(expected: Run, found: Run) -> list[Mismatch]:
    """The gravest departure of outputs, of the loss, of gradients, of stepped parameters, in this order."""
    if found.outputs and len(expected.outputs) != len(found.outputs):
        detail = f"number {len(found.outputs)}, not {len(expected.outputs)}"
        return [Mismatch("outputs", float("inf"), detail)]
    outputs = {f"output {i}": pair for i, pair in enumerate(zip(expected.outputs, found.outputs))}
    losses = {} if expected.loss is None or found.loss is None else {"the loss": (expected.loss, found.loss)}
    names = [name for name in expected.gradients if name in found.gradients]
    gradients = {
        f"the gradient of {name}": (expected.gradients[name], found.gradients[name]) for name in names
    }
    stepped = {
        f"{name} after one optimizer step": (expected.parameters[name], found.parameters[name])
        for name in expected.parameters
        if name in found.parameters
    }
    out = []
    for group in (outputs, losses, gradients, stepped):
        over = largest({what: expected for what, (expected, _) in group.items()})
        if group:
            out.append(max((_mismatch(what, a, b, over) for what, (a, b) in group.items()), key=_gravity))
    return out


def localise(
    models: list[nn.Module],
    inputs: Any,
    loss: Loss | None,
    training: bool,
    device: torch.device,
    axis: Axis | None,
    limit: float,
) -> str:
    """The first module, in the order of execution, whose output departs, and by how much; or nothing."""
    records: list[dict[str, torch.Tensor]] = []
    for scheduled, model in enumerate(models):
        record: dict[str, torch.Tensor] = {}
        with _recorded(model, record):
            run(model, None, inputs, loss, training, device, axis if scheduled else None)
        records.append(record)
    reference, scheduled_record = records
    for path, value in reference.items():
        mine = scheduled_record.get(path)
        if mine is None or any(layer.alters for layer in layers_of(find_module(models[1], path))):
            continue
        if "pipeline" in models[1].__dict__ and value.dim() and mine.shape[1:] == value.shape[1:]:
            # The first micro-batch of this rank's share of the batch.
            start = axis.rank * value.shape[0] // axis.size if axis is not None else 0
            value = value[start : start + mine.shape[0]]
        if axis is not None and mine.shape != value.shape and mine.shape[0] * axis.size == value.shape[0]:
            value = value.chunk(axis.size)[axis.rank]
        if mine.shape != value.shape:
            # Cut over ranks on purpose: what it is joined to is compared further on.
            continue
        wrong = _mismatch(path, value, mine)
        if wrong.departure > limit:
            kind = type(find_module(models[1], path)).__name__
            return f"'{path}' ({kind}), which departs by {wrong.departure:.2g}"
    return ""


def as_call(inputs: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as positional and keyword arguments on a device."""
    move = tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, inputs)
    if isinstance(move, dict):
        return (), move
    return (tuple(move) if isinstance(move, (tuple, list)) else (move,)), {}


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters by the names of the original model."""
    yield from model.named_parameters()


def floats(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors of an output, in order, whole where they are cut over the vocabulary."""
    leaves = [each for each in tree_flatten(_plain(output))[0] if isinstance(each, torch.Tensor)]
    return [whole_logits(formed(each)).detach() for each in leaves if each.is_floating_point()]


def scalar(output: Any, loss: Loss | None, inputs: Any, axis: Axis | None, batch: Any) -> torch.Tensor:
    """The loss to differentiate."""
    if loss is not None:
        required = [
            p for p in inspect.signature(loss).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]  # fmt: skip
        args, kwargs = inputs
        given = kwargs if kwargs else args if len(args) != 1 else args[0]
        return loss(output, given) if len(required) > 1 else loss(output)
    if _has_loss(output):
        return output.loss
    total = torch.zeros(())
    leaves = [each for each in tree_flatten(_plain(output))[0] if isinstance(each, torch.Tensor)]
    for each in map(formed, leaves):
        if each.is_floating_point() and each.requires_grad:
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


def _has_loss(output: Any) -> bool:
    return isinstance(getattr(output, "loss", None), torch.Tensor)


def _plain(output: Any) -> Any:
    """An output without caches, as containers that are flattened in order."""
    if isinstance(output, dict):
        return [value for value in output.values() if isinstance(value, (torch.Tensor, tuple, list, dict))]
    return output


def _mismatch(
    what: str, expected: torch.Tensor | None, found: torch.Tensor | None, over: float = 0.0
) -> Mismatch:
    if expected is None or found is None:
        # A parameter that takes no part may have a gradient of zeros instead of none.
        present = expected if expected is not None else found
        if present is None or not present.any():
            return Mismatch(what, 0.0)
        return Mismatch(what, float("inf"), "is missing" if found is None else "was not there before")
    if expected.shape != found.shape:
        detail = f"has shape {tuple(found.shape)}, not {tuple(expected.shape)}"
        return Mismatch(what, float("inf"), detail)
    return Mismatch(what, departure(expected, found, over))


def _gravity(mismatch: Mismatch) -> float:
    return mismatch.departure


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


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    before = {each: each.training for each in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for each, value in before.items():
            each.training = value


@contextmanager
def _no_dropout(model: nn.Module) -> Iterator[None]:
    """Switches off dropout modules and the rates that models keep as attributes (`attention_dropout`)."""
    changed: list[tuple[nn.Module, str, float]] = []
    for module in model.modules():
        names = ["p"] if isinstance(module, DropoutNd) else []
        names += [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        changed += [(module, name, getattr(module, name)) for name in names]
    for module, name, _ in changed:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


@contextmanager
def _recorded(model: nn.Module, record: dict[str, torch.Tensor]) -> Iterator[None]:
    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found = floats(output) if not isinstance(output, (SplitLogits, UnformedLogits)) else []
            if found and path not in record:
                record[path] = found[0].clone()

        return hook

    handles = [module.register_forward_hook(note(path)) for path, module in model.named_modules() if path]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
