"""verify: compares a scheduled model with an untouched copy of it: forward, backward and one optimizer step."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base._torch import tree_leaves, tree_map
from ..base.errors import ScheduleError
from .build import Context, complete, device_of, prepare, separated
from .compare import Numbers, compare, gradients_of, weights_of
from .forward import layers_of
from .fused_logits import FusedLogits, formed
from .graph.by_example import as_call
from .outputs import loss_of, tensors_of
from .parallel.collectives import Axis, all_gather, axis_of
from .parallel.sequences import CutSequence
from .parallel.sharding import owner, shards_of
from .parallel.vocabulary import SplitLogits, whole_logits
from .quiet import modes_kept, quiet, rates_of
from .rounding import Tolerance, allowance, departure, noise_ratio
from .schedule import Schedule
from .tree import find_module, join

Loss = Callable[..., torch.Tensor]
DRAWS = 4
"""Number of forward passes with dropout that estimate its noise."""


@contextmanager
def verify(
    sch: Schedule,
    example_inputs: Any,
    loss: Loss | None = None,
    tolerance: float | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Iterator[Schedule]:
    """Checks the schedule made in the body of the `with`: the same outputs, loss, gradients and optimizer step.

    When the body ends, copies of the model before and after it get the same weights and run on the same inputs, in
    training and in evaluation mode; then one step of SGD. Gradients of floating-point inputs are also compared: a part
    with correct parameter gradients may pass on wrong input gradients. Outputs and gradients that are cut over ranks
    are gathered; over a `dp` axis the ranks share the batch. Dropout is first switched off in both copies, since a
    schedule may change the assignment of random numbers; then it is on, to compare its noise in the outputs, which
    detects other rates. The model, the schedule and the random state are not changed; nothing runs if the body raised.

    Args:
        sch: a schedule before `build`. For a module below the root, only that module is copied and run, and changes
            outside it are ignored.
        example_inputs: a tensor, a tuple of positional or a mapping of keyword arguments.
        loss: `loss(output)` or `loss(output, inputs)`, a scalar; by default the output's `loss`, or the sum of the
            outputs weighted by fixed random numbers.
        tolerance: largest departure allowed, relative to the largest magnitude of each tensor. By default the limit of
            rounding, by the model's depth and widths and its number formats (`schedule/rounding.py`): 2e-5 for two
            blocks of a tiny GPT-2 in float32.
        device: device to run on; by default that of the weights, or the CPU.
        seed: seed of weights that are on the meta device.

    Raises:
        ScheduleError: something departs; the message names the first module whose output does, and by how much.
    """
    if sch.tree.built:
        raise ScheduleError("verify: it takes a schedule before build")
    before = separated(sch).copy()
    # Tracing in the body finds the calls of modules here.
    sch.tree.examples.setdefault(sch.path, as_call(example_inputs))
    yield sch
    target = torch.device(device) if device is not None else device_of(before.module)
    devices = [target] if target.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        _compare(before, separated(sch).copy(), example_inputs, loss, tolerance, target, seed)


def _compare(
    before: Schedule,
    after: Schedule,
    inputs: Any,
    loss: Loss | None,
    tolerance: float | None,
    device: torch.device,
    seed: int,
) -> None:
    for sch in (before, after):
        if any(layers_of(each, CutSequence) for each in sch.module.modules()):
            raise ScheduleError(
                "verify: cut_sequence gives each rank a piece of every sample, which is not put together here; verify "
                "what else is scheduled before it, and the whole by a dry run, which compares loss and gradients"
            )
    _same_rates(before.module, after.module)
    limit = tolerance if tolerance is not None else _rounding(before, after, inputs)
    pair = []
    for sch in (before, after):
        whole_loss = None if loss is None else lambda output, target: loss(output)
        context = Context(device=device, optimizer=partial(torch.optim.SGD, lr=0.1), loss=whole_loss)
        prepare(sch, context, seed=seed)
        pair.append((sch, context))
    _same_weights(before.module, after.module)
    models = [complete(sch, context) for sch, context in pair]
    axis = axis_of(after.mesh, "dp")
    runs = [
        partial(_run, model, optimizer, inputs, loss, device=device, axis=axis if scheduled else None)
        for scheduled, (model, optimizer) in enumerate(models)
    ]
    for training in (True, False):
        expected, found = (each(training=training) for each in runs)
        noise_numbers = DRAWS * sum(each.numel() for each in expected.outputs.values() if each is not None)
        granted = replace(Tolerance.of_tensors(limit), noise=noise_ratio(noise_numbers))
        wrong = compare(expected, found, granted).wrong
        if not _on_any_rank(wrong is not None, after.mesh, device):
            continue
        records: list[dict[str, torch.Tensor]] = []
        for (model, _), each in zip(models, runs):
            with _recorded(model) as record:
                each(training=training)
            records.append(record)
        where = _first_module(models[1][0], records[0], records[1], axis, limit)
        first = f"; the first module whose output departs is {where}" if where else ""
        raise ScheduleError(
            f"verify: the scheduled model departs from the original in {'training' if training else 'evaluation'} "
            f"mode: {wrong.description if wrong else 'another rank found a departure'} "
            f"(allowed: {limit:g} of the largest magnitude){first}"
        )


def _first_module(
    model: nn.Module,
    expected: dict[str, torch.Tensor],
    found: dict[str, torch.Tensor],
    axis: Axis | None,
    limit: float,
) -> str:
    """The first module, in the order of execution, whose output departs, and by how much; empty if there is none."""
    for path, value in expected.items():
        actual = found.get(path)
        if actual is None or any(layer.alters for layer in layers_of(find_module(model, path))):
            continue
        if "pipeline" in model.__dict__ and value.dim() and actual.shape[1:] == value.shape[1:]:
            # The first micro-batch of this rank's share of the batch.
            start = axis.rank * value.shape[0] // axis.size if axis is not None else 0
            value = value[start : start + actual.shape[0]]
        if axis is not None and actual.shape != value.shape and actual.shape[0] * axis.size == value.shape[0]:
            value = value.chunk(axis.size)[axis.rank]
        if actual.shape != value.shape:
            # Cut over ranks on purpose: the gathered value is compared later.
            continue
        if (by := departure(value, actual)) > limit:
            kind = type(find_module(model, path)).__name__
            return f"'{path}' ({kind}), which departs by {by:.2g}"
    return ""


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Records the first output of every module that runs in the context, by path."""
    record: dict[str, torch.Tensor] = {}

    def note(path: str, module: nn.Module, args: Any, output: Any) -> None:
        found = _wholes(output) if not isinstance(output, (SplitLogits, FusedLogits)) else []
        if found and path not in record:
            record[path] = found[0].clone()

    named = [(path, module) for path, module in model.named_modules() if path]
    handles = [module.register_forward_hook(partial(note, path)) for path, module in named]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _same_weights(reference: nn.Module, scheduled: nn.Module) -> None:
    """Copies every tensor of the reference that the scheduled model also has, cut where it is cut."""
    known = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    with torch.no_grad():
        for name, tensor in [*scheduled.named_parameters(), *scheduled.named_buffers()]:
            source = known.get(name)
            if source is None:
                continue
            module, own = owner(scheduled, name)
            original = owner(reference, name)
            shard = shards_of(module).get(own)
            if shard is not None and own not in shards_of(original[0]):
                source = shard.cut(source)
            if source.shape == tensor.shape:
                tensor.copy_(source)


def _rounding(before: Schedule, after: Schedule, inputs: Any) -> float:
    """Limit of rounding for either model."""
    rows = max((each.numel() for each in tree_leaves(inputs) if isinstance(each, torch.Tensor)), default=1)
    casts = [each for each in after.tree.deferred if "dtype" in each.arguments]
    formats = {each.path: each.arguments["dtype"] for each in casts}
    # The model before has the whole widths, the model after its formats and replaced modules.
    return max(allowance(before.module, rows, formats), allowance(after.module, rows, formats))


def _on_any_rank(flag: bool, mesh: Any, device: torch.device) -> bool:
    """True if any rank of the mesh raises the flag: all of them must act in the same way."""
    if mesh is None or not dist.is_initialized():
        return flag
    total = torch.tensor(int(flag), device=device)
    for name in mesh.mesh_dim_names:
        dist.all_reduce(total, group=mesh.get_group(name))
    return bool(total)


def _run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    inputs: Any,
    loss: Loss | None,
    *,
    training: bool,
    device: torch.device,
    axis: Axis | None,
) -> Numbers:
    """Runs one step of a model and restores its weights; in evaluation, its passes. With a data-parallel axis this
    rank computes its part of the batch.
    """
    batch = as_call(
        tree_map(lambda each: each.detach().to(device, copy=True) if isinstance(each, torch.Tensor) else each, inputs)
    )
    args, kwargs = batch if axis is None else tree_map(lambda value: _share(value, axis), batch)
    # Any remaining random draws are the same in either model.
    torch.manual_seed(0)
    pipeline = model.__dict__.get("pipeline")
    entering = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    entering = [each.requires_grad_() for each in entering if each.is_floating_point()] if pipeline is None else []
    with quiet(model, training=training):
        model.zero_grad()
        if pipeline is not None:
            pipeline.keep_outputs = True
            value = pipeline.step(*args, **kwargs)
            parts = [_wholes(each) for each in pipeline.outputs]
            # Only the last stage has outputs; per micro-batch, those without a batch are its mean.
            found = [torch.cat(p) if p[0].dim() else torch.stack(p).mean() for p in zip(*parts)]
        else:
            output = model(*args, **kwargs)
            value = _scalar(output, loss, (args, kwargs), axis)
            value.backward()
            found = _wholes(output)
    # A weighted sum of the outputs adds no information to them, and may nearly cancel by chance.
    has_loss = pipeline is not None or loss is not None or loss_of(output) is not None
    return Numbers(
        outputs={f"output {number}": _joined(each, axis) for number, each in enumerate(found)},
        loss=float(_mean(value.detach(), axis)) if has_loss else None,
        gradients=gradients_of(model),
        inputs={f"input {number}": _input_gradient(each, axis) for number, each in enumerate(entering)},
        noise=_noise(model, args, kwargs, found) if training and pipeline is None else None,
        weights=_stepped(model, optimizer) if training and optimizer is not None else {},
    )


def _input_gradient(tensor: torch.Tensor, axis: Axis | None) -> torch.Tensor:
    """Gradient of an input, zeros if there is none; that of the whole batch if ranks share it."""
    gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
    return gradient if axis is None else _joined(gradient / axis.size, axis)


def _same_rates(before: nn.Module, after: nn.Module) -> None:
    """Refuses another rate of dropout in a module that is in both models.

    Raises:
        ScheduleError: a rate differs.
    """
    modules = dict(after.named_modules())
    for path, module in before.named_modules():
        other = modules.get(path)
        for name in rates_of(module) if type(other) is type(module) else ():
            if (rate_before := getattr(module, name)) != (rate_after := getattr(other, name, rate_before)):
                raise ScheduleError(
                    f"verify: '{join(path, name)}' is a rate of dropout, {rate_before} before and {rate_after} after"
                )


def _noise(model: nn.Module, args: Any, kwargs: Any, expected: list[torch.Tensor]) -> float | None:
    """Change of the outputs by dropout in training, relative to their size; None without dropout."""
    if not any(getattr(each, name) for each in model.modules() for name in rates_of(each)):
        return 0.0
    changed = size = 0.0
    with modes_kept(model), torch.no_grad():
        model.train()
        for draw in range(DRAWS):
            torch.manual_seed(draw + 1)
            found = _wholes(model(*args, **kwargs))
            changed += sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected))
            size += sum(float(each.double().square().sum()) for each in expected)
    return (changed / size) ** 0.5 if size else None


def _wholes(output: Any) -> list[torch.Tensor]:
    """Floating-point tensors of an output, in order, gathered if they are cut over the vocabulary."""
    return [whole_logits(formed(each)).detach() for each in tensors_of(output)]


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights after a step that is undone."""
    before = [(param, param.detach().clone()) for param in model.parameters()]
    optimizer.step()
    found = weights_of(model)
    with torch.no_grad():
        for param, value in before:
            param.copy_(value)
    return found


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
