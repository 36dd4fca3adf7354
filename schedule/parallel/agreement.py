"""Whether ranks hold the same values where they are to: weights at `build`, inputs at the first step."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...base._torch import buffers_of, call_of, parameters_of, set_call, tree_leaves
from ...base.errors import ScheduleError
from ..forward import layers_of
from .checksums import NOTHING, Checksum, checksum
from .collectives import Axis, PlannedMesh, axis_of
from .sequences import CutSequence
from .sharding import shards_of, walk


def check_weights(root: nn.Module, mesh: Any, made: Collection[torch.Tensor], seed: int, broadcast: bool) -> None:
    """Compares what ranks of the `tp` and `dp` axes are to hold alike, before replicas cut it.

    Args:
        root: the model, with its weights.
        mesh: of the schedule.
        made: tensors that were made from the seed, of which the seed tells.
        seed: of what was made.
        broadcast: gives all ranks the values of the first where they differ.

    Raises:
        ScheduleError: some differ, and the first rank's are not asked for, or no rank has the whole of them.
    """
    for name in ("tp", "dp"):
        axis = _shared(mesh, name)
        if axis is None:
            continue
        whole, known = _held(root, set(made), cut_too=name == "dp")
        known["the seed"] = (seed if made else 0, len(made))
        known.update({label: checksum(tensor) for label, tensor in whole.items()})
        differ = departing(known, axis)
        if broadcast and all(each in whole for each in differ):
            for each in differ:
                dist.broadcast(whole[each].detach(), dist.get_global_rank(axis.group, 0), group=axis.group)
        elif differ:
            shown = ", ".join(differ[:5]) + (f" and {len(differ) - 5} more" if len(differ) > 5 else "")
            way = (
                "build(sch, broadcast=True) takes the first rank's"
                if all(each in whole for each in differ)
                else "give every rank the same before it is cut: by the same seed, a checkpoint, or redline.deferred"
            )
            raise ScheduleError(
                f"build: the {axis.size} ranks of the {axis.name} axis must begin with the same values, but of "
                f"{shown} they hold others; {way}"
            )


def _shared(mesh: Any, name: str) -> Axis | None:
    """An axis of several ranks that are there to be asked."""
    if isinstance(mesh, PlannedMesh):
        return None
    axis = axis_of(mesh, name)
    return axis if axis is not None and axis.size > 1 else None


def _held(
    root: nn.Module, made: set[torch.Tensor], cut_too: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Checksum]]:
    """What all ranks of an axis are to hold alike, and checksums of what was whole once, both by name."""
    whole: dict[str, torch.Tensor] = {}
    once: dict[str, Checksum] = {}
    for path, module in walk(root):
        for name, tensor in {**parameters_of(module), **buffers_of(module)}.items():
            if tensor is None or tensor.is_meta or tensor in made:
                continue
            label, cut = f"{path}.{name}" if path else name, shards_of(module).get(name)
            if cut is not None and cut.checksum != NOTHING:
                once[f"{label} before it was cut"] = cut.checksum
            if cut is None or (cut_too and "ep" not in cut.axes):
                whole[label] = tensor
    return whole, once


def departing(values: Mapping[str, Checksum], axis: Axis) -> list[str]:
    """The names under which ranks of an axis have other checksums, in order; all of them call it."""
    cuda = "gloo" not in dist.get_backend(axis.group) and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    def alike(rows: list[tuple[int, int]]) -> list[bool]:
        mine = torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, 2)
        every = [torch.empty_like(mine) for _ in range(axis.size)]
        dist.all_gather(every, mine, group=axis.group)
        return torch.stack(every).eq(every[0]).all(dim=-1).all(dim=0).tolist()

    if not all(alike([(len(values), 0)])):
        return ["the number of tensors"]
    return [name for name, same in zip(values, alike(list(values.values()))) if not same]


def check_inputs(axis: Axis, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Compares what the ranks of a group that shares samples are given: by tensor (`tp`) or by sequence (`sp`, `cp`).

    Raises:
        ScheduleError: they are given other tensors.
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
    """Runs in place of the first call of a model whose ranks share samples; then it leaves the model."""

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
                if axis.name == "tp" and (said := _norm_of_a_piece(self.module, axis, error)):
                    raise ScheduleError(said) from error
            raise


def check_first_call(module: nn.Module, mesh: Any) -> None:
    """Has the first call of a model check that ranks which share samples are given the same ones."""
    axes = [axis for axis in (_shared(mesh, "tp"),) if axis is not None]
    if not isinstance(mesh, PlannedMesh):
        axes += [axis for layer in layers_of(module, CutSequence) for axis in layer.axes]
    if axes:
        set_call(module, FirstCall(module, axes))


def _norm_of_a_piece(root: nn.Module, axis: Axis, error: RuntimeError) -> str:
    """Whether a norm over features was given one rank's piece of them, in words; empty where it was not."""
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
