"""The tensors that a model holds: as parameters and buffers, and in its modules' other attributes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..base._torch import buffers_of, parameters_of, tree_leaves, tree_map

_HOLDERS = (torch.Tensor, list, tuple, dict)
Change = Callable[[torch.Tensor, str], torch.Tensor]


def own(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module itself, by name."""
    both = [*parameters_of(module).items(), *buffers_of(module).items()]
    return [(name, tensor) for name, tensor in both if tensor is not None]


def loose(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The tensors in a module's other attributes and in the lists, tuples and dicts there, by the attribute's name.

    An LSTM has its parameters in a list as well.
    """
    return [
        (name, leaf)
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules") and isinstance(value, _HOLDERS)
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    ]


def exchange(root: nn.Module, change: Change, change_loose: Change) -> None:
    """Puts other tensors in the place of a model's; what was one tensor stays one.

    Args:
        root: the model.
        change: gives the new one for a parameter or buffer, and its path.
        change_loose: gives it for a tensor that is neither, and the path of the attribute.
    """
    done: dict[torch.Tensor, torch.Tensor] = {}
    modules = [(f"{path}." if path else "", module) for path, module in root.named_modules()]
    for path, module in modules:
        for held in (parameters_of(module), buffers_of(module)):
            for name, tensor in held.items():
                if tensor is not None:
                    if tensor not in done:
                        done[tensor] = change(tensor, path + name)
                    held[name] = done[tensor]
    for path, module in modules:
        for name, tensor in loose(module):
            if tensor not in done:
                done[tensor] = change_loose(tensor, path + name)
            if done[tensor] is not tensor:
                module.__dict__[name] = _replaced(module.__dict__[name], tensor, done[tensor])


def _replaced(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    return tree_map(lambda leaf: new if leaf is old else leaf, value)
