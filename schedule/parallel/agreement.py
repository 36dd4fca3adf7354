"""Checks that ranks have equal values where they must: weights at `build`, inputs at the first step."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...base._torch import call_of, set_call, tree_leaves
from ...base.errors import ScheduleError
from ..forward import layers_of
from ..tree import own_tensors
from .collectives import Axis, PlannedMesh, axis_of
from .sequences import CutSequence
from .sharding import NOTHING, Checksum, checksum, shards_of, walk


def check_weights(
    root: nn.Module, mesh: Any, initialised: Collection[torch.Tensor], seed: int, broadcast: bool
) -> None:
    """Checks that the replicated tensors are equal on the ranks of the `tp` and `dp` axes, before replicas shard them.

    Args:
        initialised: tensors that were initialised from the seed; only the seed and their number are compared.
        broadcast: copy the first rank's values to all ranks if they differ.

    Raises:
        ScheduleError: some tensors differ, and `broadcast` is False or they were sharded before.
    """
    for name in ("tp", "dp"):
        axis = _shared(mesh, name)
        if axis is None:
            continue
        tensors, checksums = _shared_tensors(root, set(initialised), cut_too=name == "dp")
        # Tensors from the seed are equal if the seed and the rules are: reading them all would take time.
        checksums["the seed"] = (seed if initialised else 0, len(initialised))
        checksums.update({label: checksum(tensor) for label, tensor in tensors.items()})
        differing = departing(checksums, axis)
        are_unsharded = all(label in tensors for label in differing)
        if broadcast and are_unsharded:
            for label in differing:
                values = tensors[label].detach().contiguous()
                dist.broadcast(values, dist.get_global_rank(axis.group, 0), group=axis.group)
                tensors[label].detach().copy_(values)
        elif differing:
            names = ", ".join(differing[:5]) + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
            remedy = (
                "build(sch, broadcast=True) copies the first rank's values"
                if are_unsharded
                else "give every rank the same values before it is cut: by the same seed, a checkpoint, or torch.device('meta')"
            )
            raise ScheduleError(
                f"build: the {axis.size} ranks of the {axis.name} axis must begin with the same values, but "
                f"those of {names} differ; {remedy}"
            )


def _shared(mesh: Any, name: str) -> Axis | None:
    """Returns an axis of a real mesh by name; None for a planned mesh or an axis of one rank."""
    if isinstance(mesh, PlannedMesh):
        return None
    axis = axis_of(mesh, name)
    return axis if axis is not None and axis.size > 1 else None


def _shared_tensors(
    root: nn.Module, initialised: set[torch.Tensor], cut_too: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Checksum]]:
    """Returns the tensors that must be equal on all ranks of an axis, and checksums of tensors from before they were cut.

    Both are keyed by name.
    """
    tensors: dict[str, torch.Tensor] = {}
    checksums_before_cut: dict[str, Checksum] = {}
    for path, module in walk(root):
        for name, tensor in own_tensors(module):
            if tensor.is_meta or tensor in initialised:
                continue
            label, shard = f"{path}.{name}" if path else name, shards_of(module).get(name)
            if shard is not None and shard.checksum != NOTHING:
                checksums_before_cut[f"{label} before it was cut"] = shard.checksum
            # Shards over tp are equal on all dp ranks, but experts are spread over these.
            if shard is None or (cut_too and "ep" not in shard.axes):
                tensors[label] = tensor
    return tensors, checksums_before_cut


def departing(values: Mapping[str, Checksum], axis: Axis) -> list[str]:
    """Returns the names whose checksums differ between the ranks of an axis, in order; all of these ranks call it."""
    gathered: list[Any] = [None] * axis.size
    dist.all_gather_object(gathered, dict(values), group=axis.group)
    if any(checksums.keys() != values.keys() for checksums in gathered):
        return ["the names of tensors"]
    return [name for name in values if any(checksums[name] != gathered[0][name] for checksums in gathered)]


def check_inputs(axis: Axis, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Checks that the ranks of a group that shares samples, by tensor (`tp`) or sequence (`sp`, `cp`), get equal inputs.

    Raises:
        ScheduleError: the inputs differ between ranks.
    """
    checksums: dict[str, Checksum] = {}
    for name, value in [*((f"input {index}", argument) for index, argument in enumerate(args)), *kwargs.items()]:
        tensors = [tensor for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor) and not tensor.is_meta]
        for index, tensor in enumerate(tensors):
            checksums[f"{name}[{index}]" if len(tensors) > 1 else name] = checksum(tensor)
    differing = departing(checksums, axis)
    if differing:
        distribution = (
            "by the rank on the dp axis"
            if axis.name == "tp"
            else "one share for each sp * cp neighbours on the dp axis"
        )
        raise ScheduleError(
            f"the {axis.size} ranks of the {axis.name} axis share every sample, so they must get the same batch, "
            f"but {', '.join(differing)} differs; seed their data equally, or distribute it {distribution} (a "
            "DistributedSampler with num_replicas and rank of the groups that share samples, not of all ranks)"
        )


def check_first_call(module: nn.Module, mesh: Any) -> None:
    """Makes the first call of a model check that ranks that share samples get equal inputs."""
    axes = [axis for axis in (_shared(mesh, "tp"),) if axis is not None]
    if not isinstance(mesh, PlannedMesh):
        axes += [axis for layer in layers_of(module, CutSequence) for axis in layer.axes]
    if not axes:
        return
    original_call = module.__dict__.get("_compiled_call_impl")

    def first_call(*args: Any, **kwargs: Any) -> Any:
        set_call(module, original_call)  # also if a check fails
        for axis in axes:
            check_inputs(axis, args, kwargs)
        try:
            return call_of(module)(*args, **kwargs)
        except RuntimeError as error:
            for axis in axes:
                if axis.name == "tp" and (message := _norm_of_a_piece(module, axis, error)):
                    raise ScheduleError(message) from error
            raise

    set_call(module, first_call)


def _norm_of_a_piece(root: nn.Module, axis: Axis, error: RuntimeError) -> str | None:
    """Returns an error message if a norm over features got only this rank's features; None otherwise."""
    # The norm's own frame: LayerNorm's error names shapes, but not the module.
    frame = error.__traceback__
    while frame is not None:
        frame_locals = frame.tb_frame.f_locals
        module, input_tensor = frame_locals.get("self"), frame_locals.get("input")
        shape = getattr(module, "normalized_shape", None)
        if isinstance(module, nn.Module) and shape and isinstance(input_tensor, torch.Tensor):
            if input_tensor.shape[-1] * axis.size == shape[-1]:
                path = next((path for path, submodule in walk(root) if submodule is module), type(module).__name__)
                return (
                    f"'{path}' ({type(module).__name__}) takes {shape[-1]} features, but gets the {input_tensor.shape[-1]} "
                    f"of one of {axis.size} ranks: the module before it is cut along its output; gather that by "
                    "sync('fwd_post', 'all_gather', axis=-1), or cut only after the norm"
                )
        frame = frame.tb_next
    return None
