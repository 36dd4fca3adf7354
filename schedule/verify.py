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
from .comparison import Numbers, Tolerance, allowance, compare, departure, gradients_of, noise_ratio, weights_of
from .forward import Layer, layers_of, loss_of, tensors_of
from .graph.by_example import as_call
from .parallel.collectives import Axis, all_gather, axis_of
from .parallel.sequences import CutSequence
from .parallel.sharding import owner, shards_of
from .parallel.vocabulary import SplitLogits, whole_logits
from .primitives.fused_loss import FusedLogits, formed
from .random_state import modes_kept, quiet, rates_of
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
    training and in evaluation mode; then one step of SGD. Gradients of floating-point inputs are also compared: a module
    with correct parameter gradients may pass on wrong input gradients. Outputs and gradients that are sharded over ranks
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
            rounding, by the model's depth and widths and its number formats (`schedule/comparison.py`): 2e-5 for two
            blocks of a tiny GPT-2 in float32.
        device: device to run on; by default that of the weights, or the CPU.
        seed: seed of weights that are on the meta device.

    Raises:
        ScheduleError: a result departs; the message names the first module whose output departs, and by how much.
    """
    if sch.tree.built:
        raise ScheduleError("verify: it takes a schedule before build")
    reference = separated(sch).copy()
    # Tracing in the body finds the calls of modules here.
    sch.tree.examples.setdefault(sch.path, as_call(example_inputs))
    yield sch
    target = torch.device(device) if device is not None else device_of(reference.module)
    devices = [target] if target.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        _compare(reference, separated(sch).copy(), example_inputs, loss, tolerance, target, seed)


def _compare(
    reference: Schedule,
    scheduled: Schedule,
    inputs: Any,
    loss: Loss | None,
    tolerance: float | None,
    device: torch.device,
    seed: int,
) -> None:
    for sch in (reference, scheduled):
        if any(layers_of(module, CutSequence) for module in sch.module.modules()):
            raise ScheduleError(
                "verify: cut_sequence gives each rank a piece of every sample, and verify does not gather these; verify "
                "the other primitives before it, and all of them by a dry run, which compares loss and gradients"
            )
    _same_rates(reference.module, scheduled.module)
    limit = tolerance if tolerance is not None else _rounding(reference, scheduled, inputs)
    pair = []
    for sch in (reference, scheduled):
        output_loss = None if loss is None else lambda output, target: loss(output)
        context = Context(device=device, optimizer=partial(torch.optim.SGD, lr=0.1), loss=output_loss)
        prepare(sch, context, seed=seed)
        pair.append((sch, context))
    # After initialisation, which may draw differently, and before casts and sharding of data, which follow the values.
    _same_weights(reference.module, scheduled.module)
    models = [complete(sch, context) for sch, context in pair]
    axis = axis_of(scheduled.mesh, "dp")
    runs = [
        partial(_run, model, optimizer, inputs, loss, device=device, axis=axis if is_scheduled else None)
        for is_scheduled, (model, optimizer) in enumerate(models)
    ]
    for training in (True, False):
        expected, actual = (run(training=training) for run in runs)
        noise_numbers = DRAWS * sum(output.numel() for output in expected.outputs.values() if output is not None)
        tolerances = replace(Tolerance.of_tensors(limit), noise=noise_ratio(noise_numbers))
        wrong = compare(expected, actual, tolerances).wrong
        if not _on_any_rank(wrong is not None, scheduled.mesh, device):
            continue
        records: list[dict[str, torch.Tensor]] = []
        for (model, _), run in zip(models, runs):
            with _recorded(model) as record:
                run(training=training)
            records.append(record)
        departing = _first_module(models[1][0], records[0], records[1], axis, limit)
        location = f"; the first module whose output departs is {departing}" if departing else ""
        raise ScheduleError(
            f"verify: the scheduled model departs from the original in {'training' if training else 'evaluation'} "
            f"mode: {wrong.description if wrong else 'another rank found a departure'} "
            f"(allowed: {limit:g} of the largest magnitude){location}"
        )


def _first_module(
    model: nn.Module,
    expected: dict[str, torch.Tensor],
    outputs: dict[str, torch.Tensor],
    axis: Axis | None,
    limit: float,
) -> str | None:
    """Returns the first module, in the order of execution, whose output departs, and by how much; None without one."""
    for path, value in expected.items():
        actual = outputs.get(path)
        if actual is None or any(layer.alters for layer in layers_of(find_module(model, path), Layer)):
            continue
        if "pipeline" in model.__dict__ and value.dim() and actual.shape[1:] == value.shape[1:]:
            # The first micro-batch of this rank's share of the batch.
            start = axis.rank * value.shape[0] // axis.size if axis is not None else 0
            value = value[start : start + actual.shape[0]]
        if axis is not None and actual.shape != value.shape and actual.shape[0] * axis.size == value.shape[0]:
            value = value.chunk(axis.size)[axis.rank]
        if actual.shape != value.shape:
            # Sharded over ranks by the schedule: a later module returns the gathered value.
            continue
        if (by := departure(value, actual)) > limit:
            kind = type(find_module(model, path)).__name__
            return f"'{path}' ({kind}), which departs by {by:.2g}"
    return None


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Records the first output of every module that runs in the context, by path."""
    record: dict[str, torch.Tensor] = {}

    def note(path: str, module: nn.Module, args: Any, output: Any) -> None:
        tensors = _full_tensors(output) if not isinstance(output, (SplitLogits, FusedLogits)) else []
        if tensors and path not in record:
            record[path] = tensors[0].clone()

    submodules = [(path, module) for path, module in model.named_modules() if path]
    handles = [module.register_forward_hook(partial(note, path)) for path, module in submodules]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _same_weights(reference: nn.Module, scheduled: nn.Module) -> None:
    """Copies the tensors of the reference to the scheduled model, sharded as there."""
    tensors = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    with torch.no_grad():
        for name, tensor in [*scheduled.named_parameters(), *scheduled.named_buffers()]:
            source = tensors.get(name)
            if source is None:
                continue
            module, local_name = owner(scheduled, name)
            original = owner(reference, name)
            shard = shards_of(module).get(local_name)
            if shard is not None and local_name not in shards_of(original[0]):
                source = shard.cut(source)
            if source.shape == tensor.shape:
                tensor.copy_(source)


def _rounding(reference: Schedule, scheduled: Schedule, inputs: Any) -> float:
    """Returns the limit of rounding of both models."""
    rows = max((tensor.numel() for tensor in tree_leaves(inputs) if isinstance(tensor, torch.Tensor)), default=1)
    casts = [work for work in scheduled.tree.deferred if "dtype" in work.arguments]
    formats = {cast.path: cast.arguments["dtype"] for cast in casts}
    # Only the reference has the unsharded widths, only the scheduled model its formats and replaced modules.
    return max(allowance(reference.module, rows, formats), allowance(scheduled.module, rows, formats))


def _on_any_rank(raised: bool, mesh: Any, device: torch.device) -> bool:
    """True if `raised` is true on any rank of the mesh. All ranks then run the models again, which communicate."""
    if mesh is None or not dist.is_initialized():
        return raised
    total = torch.tensor(int(raised), device=device)
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
    """Runs a forward and backward pass, and in training an optimizer step that is undone.

    With a data-parallel axis this rank computes its share of the batch.
    """
    batch = as_call(
        tree_map(lambda leaf: leaf.detach().to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf, inputs)
    )
    args, kwargs = batch if axis is None else tree_map(lambda value: _share(value, axis), batch)
    # Dropout is off, but other modules may draw: both models then draw the same.
    torch.manual_seed(0)
    pipeline = model.__dict__.get("pipeline")
    entering = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    entering = (
        [tensor.requires_grad_() for tensor in entering if tensor.is_floating_point()] if pipeline is None else []
    )
    with quiet(model, training=training):
        model.zero_grad()
        if pipeline is not None:
            pipeline.keep_outputs = True
            value = pipeline.step(*args, **kwargs)
            outputs = [_full_tensors(output) for output in pipeline.outputs]
            # Only the last stage has outputs. Those without a batch dimension are means over the micro-batch.
            outputs = [torch.cat(split) if split[0].dim() else torch.stack(split).mean() for split in zip(*outputs)]
        else:
            output = model(*args, **kwargs)
            value = _scalar(output, loss, (args, kwargs), axis)
            value.backward()
            outputs = _full_tensors(output)
    # A weighted sum of the outputs adds no information to them, and may nearly cancel by chance.
    has_loss = pipeline is not None or loss is not None or loss_of(output) is not None
    return Numbers(
        outputs={f"output {number}": _joined(tensor, axis) for number, tensor in enumerate(outputs)},
        loss=float(_mean(value.detach(), axis)) if has_loss else None,
        gradients=gradients_of(model),
        inputs={f"input {number}": _input_gradient(tensor, axis) for number, tensor in enumerate(entering)},
        noise=_noise(model, args, kwargs, outputs) if training and pipeline is None else None,
        weights=_stepped(model, optimizer) if training and optimizer is not None else {},
    )


def _input_gradient(tensor: torch.Tensor, axis: Axis | None) -> torch.Tensor:
    """Returns the gradient of an input, zeros without one; with a data-parallel axis that of the global batch."""
    gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
    return gradient if axis is None else _joined(gradient / axis.size, axis)


def _same_rates(reference: nn.Module, scheduled: nn.Module) -> None:
    """Checks that modules in both models have the same rates of dropout.

    Raises:
        ScheduleError: a rate differs.
    """
    modules = dict(scheduled.named_modules())
    for path, module in reference.named_modules():
        counterpart = modules.get(path)
        for name in rates_of(module) if type(counterpart) is type(module) else ():
            if (reference_rate := getattr(module, name)) != (
                scheduled_rate := getattr(counterpart, name, reference_rate)
            ):
                raise ScheduleError(
                    f"verify: '{join(path, name)}' is a rate of dropout, {reference_rate} before and {scheduled_rate} after"
                )


def _noise(model: nn.Module, args: Any, kwargs: Any, expected: list[torch.Tensor]) -> float | None:
    """Returns the change of the outputs by dropout, relative to their size: 0 without dropout, None for zero outputs."""
    if not any(getattr(module, name) for module in model.modules() for name in rates_of(module)):
        return 0.0
    changed = size = 0.0
    with modes_kept(model), torch.no_grad():
        model.train()
        for draw in range(DRAWS):
            torch.manual_seed(draw + 1)
            noisy = _full_tensors(model(*args, **kwargs))
            changes = [tensor.double() - clean.double() for tensor, clean in zip(noisy, expected)]
            changed += sum(float(change.square().sum()) for change in changes)
            size += sum(float(tensor.double().square().sum()) for tensor in expected)
    return (changed / size) ** 0.5 if size else None


def _full_tensors(output: Any) -> list[torch.Tensor]:
    """Returns the floating-point tensors of an output, in order, gathered if they are sharded over the vocabulary."""
    return [whole_logits(formed(tensor)).detach() for tensor in tensors_of(output)]


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns the weights after an optimizer step, which is then undone."""
    saved = [(param, param.detach().clone()) for param in model.parameters()]
    optimizer.step()
    weights = weights_of(model)
    with torch.no_grad():
        for param, value in saved:
            param.copy_(value)
    return weights


def _scalar(output: Any, loss: Loss | None, inputs: Any, axis: Axis | None) -> torch.Tensor:
    """Returns the scalar to differentiate: the loss, or a weighted sum of the outputs if there is none."""
    if loss is not None:
        positional = [
            parameter
            for parameter in inspect.signature(loss).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        required = [parameter for parameter in positional if parameter.default is parameter.empty]
        args, kwargs = inputs
        batch = kwargs if kwargs else args if len(args) != 1 else args[0]
        return loss(output, batch) if len(required) > 1 else loss(output)
    if (output_loss := loss_of(output)) is not None:
        return output_loss
    total = torch.zeros(())
    for tensor in map(formed, tensors_of(output)):
        if tensor.requires_grad:
            generator = torch.Generator().manual_seed(tensor.dim())
            value = whole_logits(tensor)
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
