"""A workload's model on the meta device, its experts, and which of its repeated blocks are alike."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..base._torch import children_of, parameters_of
from .user_code import user_code_errors
from .workload import Workload

if TYPE_CHECKING:
    from torch import nn


def skeleton(workload: Workload, config: Mapping[str, Any] | None = None) -> "nn.Module":
    """The module on the meta device, or on the CPU where its constructor computes with values.

    The global random state is left as it was.

    Raises:
        WorkloadError: the model cannot be built.
    """
    import torch

    with torch.random.fork_rng(devices=[]), user_code_errors(f"{workload.name}: building the model"):
        try:
            with torch.device("meta"):
                return workload.build_model(config)
        except RuntimeError:  # NotImplementedError included: a value of a meta tensor was asked for
            return workload.build_model(config)


def experts_of(workload: Workload) -> tuple[int, ...]:
    """The numbers of experts that the mixtures of a workload's model have, each once, ascending; empty for none."""
    return experts_in(skeleton(workload))


def experts_in(model: "nn.Module") -> tuple[int, ...]:
    """The same of a model."""
    from ..schedule.parallel.experts import mixtures_of, num_experts

    return tuple(sorted({num_experts(each) for each in mixtures_of(model).values()}))


FOLLOWED = 3
"""Blocks of a kind that stand for themselves: the first, the second and the last."""
_POSITIONS = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_id")
"""Attributes that say which block it is; what they decide when a block is built shows in its other
attributes."""
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


def stand_ins_for(model: "nn.Module", blocks: Sequence[str]) -> dict[str, str]:
    """Of blocks between the second and the last of their kind, the second: path -> path.

    Args:
        model: holds the blocks.
        blocks: paths of its repeated blocks, in their order.
    """
    kinds: dict[Hashable, list[str]] = {}
    for index, path in enumerate(blocks):
        kinds.setdefault(described(model.get_submodule(path), index), []).append(path)
    return {each: alike[1] for alike in kinds.values() if len(alike) > FOLLOWED for each in alike[2:-1]}


def shorten(model: "nn.Module", blocks: Sequence[str]) -> list[str]:
    """Takes blocks that others stand for out of a model; those that are left keep their paths.

    Blocks that share a weight with another part of the model stay.

    Returns:
        The paths of the blocks that are left, in their order.
    """
    holders: dict[nn.Parameter, set[int]] = {}
    for module in model.modules():
        for param in parameters_of(module).values():
            if param is not None:
                holders.setdefault(param, set()).add(id(module))
    gone = set()
    for path in stand_ins_for(model, blocks):
        parent, _, name = path.rpartition(".")
        block = model.get_submodule(path)
        inside = {id(each) for each in block.modules()}
        if all(holders[param] <= inside for param in block.parameters()):
            del children_of(model.get_submodule(parent))[name]
            gone.add(path)
    return [path for path in blocks if path not in gone]


def described(block: "nn.Module", index: int) -> Hashable:
    """Equal for blocks that do the same with equal inputs, but for the values of their weights: classes,
    shapes and plain attributes of all modules in it, and what the configuration says of this block by
    itself."""
    out: list[Hashable] = []
    configs: dict[int, Any] = {}
    for path, module in block.named_modules():
        attributes = []
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or name in _POSITIONS:
                continue
            if hasattr(value, "to_dict") and not isinstance(value, type):
                configs[id(value)] = value
            attributes.append((name, _hashable(value)))
        out.append((path, type(module), tuple(attributes)))
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        out.append((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
    for config in configs.values():
        for name, value in sorted(vars(config).items()):
            if isinstance(value, list | tuple) and len(value) > index:
                out.append((name, _hashable(value[index])))
    return tuple(out)


def _hashable(value: Any) -> Hashable:
    """Something hashable that is equal where the value is; of what is no plain data, the thing itself."""
    import torch

    if isinstance(value, (*_SCALARS, torch.dtype, torch.device)):
        return type(value).__name__, value
    if isinstance(value, list | tuple):
        return tuple(_hashable(each) for each in value)
    if isinstance(value, Mapping):
        return tuple((str(key), _hashable(each)) for key, each in value.items())
    return id(value)
