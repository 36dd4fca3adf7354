"""Checks that ranks have equal values where they must: weights at `build`, inputs at the first step."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...base._torch import call_of, set_call, tree_leaves
from ...base.errors import ScheduleError
from ..forward import layers_of
from ..held import own_tensors
from .checksums import NOTHING, Checksum, checksum
from .collectives import Axis, PlannedMesh, axis_of
from .sequences import CutSequence
from .sharding import shards_of, walk


def check_weights(root: nn.Module, mesh: Any, made: Collection[torch.Tensor], seed: int, broadcast: bool) -> None:
    """Checks that the replicated tensors are equal on the ranks of the `tp` and `dp` axes, before replicas shard them.

    Args:
        made: tensors that were initialized from the seed; only the seed and their number are compared.
        broadcast: gives all ranks the first rank's values where they differ.

    Raises:
        ScheduleError: some tensors differ, and `broadcast` is False or no rank has a whole tensor.
    """
    for name in ("tp", "dp"):
        axis = _shared(mesh, name)
        if axis is None:
            continue
        whole, known = _shared_tensors(root, set(made), cut_too=name == "dp")
        known["the seed"] = (seed if made else 0, len(made))
        known.update({label: checksum(tensor) for label, tensor in whole.items()})
        differ = departing(known, axis)
        if broadcast and all(each in whole for each in differ):
            for each in differ:
                values = whole[each].detach().contiguous()
                dist.broadcast(values, dist.get_global_rank(axis.group, 0), group=axis.group)
                whole[each].detach().copy_(values)
        elif differ:
            shown = ", ".join(differ[:5]) + (f" and {len(differ) - 5} more" if len(differ) > 5 else "")
            way = (
                "build(sch, broadcast=True) takes the first rank's"
                if all(each in whole for each in differ)
                else "give every rank the same before it is cut: by the same seed, a checkpoint, or torch.device('meta')"
            )
            raise ScheduleError(
                f"build: the {axis.size} ranks of the {axis.name} axis must begin with the same values, but of "
                f"{shown} they hold others; {way}"
            )


def _shared(mesh: Any, name: str) -> Axis | None:
    """Returns an axis of a real mesh by name; None for a planned mesh or an axis of one rank."""
    if isinstance(mesh, PlannedMesh):
        return None
    axis = axis_of(mesh, name)
    return axis if axis is not None and axis.size > 1 else None


def _shared_tensors(
    root: nn.Module, made: set[torch.Tensor], cut_too: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Checksum]]:
    """Returns the tensors that all ranks of an axis must have alike, and checksums of tensors from before they were cut.

    Both are keyed by name."""
    whole: dict[str, torch.Tensor] = {}
    once: dict[str, Checksum] = {}
    for path, module in walk(root):
        for name, tensor in own_tensors(module):
            if tensor.is_meta or tensor in made:
                continue
            label, cut = f"{path}.{name}" if path else name, shards_of(module).get(name)
            if cut is not None and cut.checksum != NOTHING:
                once[f"{label} before it was cut"] = cut.checksum
            if cut is None or (cut_too and "ep" not in cut.axes):
                whole[label] = tensor
    return whole, once


def departing(values: Mapping[str, Checksum], axis: Axis) -> list[str]:
    """Returns the names whose checksums differ between the ranks of an axis, in order; all of these ranks call it."""
    cuda = "gloo" not in dist.get_backend(axis.group) and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    def same_on_all(rows: list[tuple[int, int]]) -> list[bool]:
        own_rows = torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, 2)
        every = [torch.empty_like(own_rows) for _ in range(axis.size)]
        dist.all_gather(every, own_rows, group=axis.group)
        return torch.stack(every).eq(every[0]).all(dim=-1).all(dim=0).tolist()

    if not all(same_on_all([(len(values), 0)])):
        return ["the number of tensors"]
    return [name for name, same in zip(values, same_on_all(list(values.values()))) if not same]


def check_inputs(axis: Axis, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Checks that the ranks of a group that shares samples, by tensor (`tp`) or sequence (`sp`, `cp`), get equal inputs.

    Raises:
        ScheduleError: the inputs differ between ranks.
    """
    found: dict[str, Checksum] = {}
    for name, value in [*((f"input {i}", each) for i, each in enumerate(args)), *kwargs.items()]:
        tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor) and not each.is_meta]
        for i, each in enumerate(tensors):
            found[f"{name}[{i}]" if len(tensors) > 1 else name] = checksum(each)
    differ = departing(found, axis)
    if differ:
        by = (
            "by the rank on the dp axis"
            if axis.name == "tp"
            else "one share for each sp * cp neighbours on the dp axis"
        )
        raise ScheduleError(
            f"the {axis.size} ranks of the {axis.name} axis share every sample, so they must be given the same batch, "
            f"but {', '.join(differ)} is not; seed their data alike, or give it out {by} (a DistributedSampler with "
            "num_replicas and rank of the groups that share samples, not of all ranks)"
        )


class FirstCall:
    """Replaces the first call of a model whose ranks share samples, checks its inputs, and then removes itself."""

    def __init__(self, module: nn.Module, axes: Sequence[Axis]) -> None:
        self.module, self.axes = module, axes
        self.before = module.__dict__.get("_compiled_call_impl")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        set_call(self.module, self.before)
        for axis in self.axes:
            check_inputs(axis, args, kwargs)
        try:
            return call_of(self.module)(*args, **kwargs)
        except RuntimeError as error:
            for axis in self.axes:
                if axis.name == "tp" and (message := _norm_of_a_piece(self.module, axis, error)):
                    raise ScheduleError(message) from error
            raise


def check_first_call(module: nn.Module, mesh: Any) -> None:
    """Makes the first call of a model check that ranks that share samples get equal inputs."""
    axes = [axis for axis in (_shared(mesh, "tp"),) if axis is not None]
    if not isinstance(mesh, PlannedMesh):
        axes += [axis for layer in layers_of(module, CutSequence) for axis in layer.axes]
    if axes:
        set_call(module, FirstCall(module, axes))


def _norm_of_a_piece(root: nn.Module, axis: Axis, error: RuntimeError) -> str:
    """Returns an error message if a norm over features got one rank's shard of them, else an empty string."""
    frame = error.__traceback__
    while frame is not None:
        held = frame.tb_frame.f_locals
        module, given = held.get("self"), held.get("input")
        shape = getattr(module, "normalized_shape", None)
        if isinstance(module, nn.Module) and shape and isinstance(given, torch.Tensor):
            if given.shape[-1] * axis.size == shape[-1]:
                path = next((path for path, each in walk(root) if each is module), type(module).__name__)
                return (
                    f"'{path}' ({type(module).__name__}) takes {shape[-1]} features, but is given the {given.shape[-1]} "
                    f"of one of {axis.size} ranks: what comes before it is cut along its output; gather it by "
                    "sync('fwd_post', 'all_gather', axis=-1) on that, or cut behind the norm"
                )
        frame = frame.tb_next
    return ""
