"""Tensors of a model (parameters, buffers, other attributes), and their transfer to a replacing module."""

from collections.abc import Callable

import torch
from torch import nn

from ..base._torch import buffers_of, copy_kind_of_backward_hooks, parameters_of, tree_leaves, tree_map

_HOLDERS = (torch.Tensor, list, tuple, dict)
Change = Callable[[torch.Tensor, str], torch.Tensor]


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters and buffers of a module itself, by name."""
    named_tensors = [*parameters_of(module).items(), *buffers_of(module).items()]
    return [(name, tensor) for name, tensor in named_tensors if tensor is not None]


def replace_tensor(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    """Replaces a parameter or buffer."""
    (parameters_of(module) if name in parameters_of(module) else buffers_of(module))[name] = tensor


def loose(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns tensors in a module's other attributes and in lists, tuples and dicts there, by the attribute's name.

    An LSTM, for example, also has its parameters in a list.
    """
    return [
        (name, leaf)
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules") and isinstance(value, _HOLDERS)
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    ]


def exchange(root: nn.Module, change: Change, change_loose: Change) -> None:
    """Replaces a model's tensors; a shared tensor stays shared.

    Args:
        root: the model.
        change: returns the new tensor for a parameter or buffer and its path.
        change_loose: returns the new tensor for a tensor in another attribute, and the attribute's path.
    """
    replaced: dict[torch.Tensor, torch.Tensor] = {}  # by the old tensor, so that tied ones stay tied
    modules = [(f"{path}." if path else "", module) for path, module in root.named_modules()]
    for path, module in modules:
        for holder in (parameters_of(module), buffers_of(module)):
            for name, tensor in holder.items():
                if tensor is not None:
                    if tensor not in replaced:
                        replaced[tensor] = change(tensor, path + name)
                    holder[name] = replaced[tensor]
    for path, module in modules:
        for name, tensor in loose(module):
            if tensor not in replaced:
                replaced[tensor] = change_loose(tensor, path + name)
            if replaced[tensor] is not tensor:
                module.__dict__[name] = tree_map(
                    lambda leaf, old=tensor: replaced[old] if leaf is old else leaf, module.__dict__[name]
                )


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def transfer(old: nn.Module, new: nn.Module) -> list[str]:
    """Moves to `new` the tensors of `old` with matching names and shapes, its hooks and its training mode.

    The tensors are the same objects, so that ties to the rest of the model remain.

    Returns:
        A sentence for each tensor that only one of the modules has.
    """
    notes = []
    fresh = dict(_tensors(new))
    for path, tensor in _tensors(old):
        if path not in fresh:
            notes.append(f"{path} {tuple(tensor.shape)} is not in {type(new).__name__}")
        elif fresh[path].shape != tensor.shape:
            notes.append(f"{path} is {tuple(fresh.pop(path).shape)} now, not {tuple(tensor.shape)}")
        else:
            del fresh[path]
            parent, _, name = path.rpartition(".")
            replace_tensor(new.get_submodule(parent), name, tensor)  # the same object, so that it stays tied
    notes.extend(f"{path} {tuple(tensor.shape)} has the value it came with" for path, tensor in fresh.items())
    give_hooks(old, new)
    new.train(old.training)
    return notes


def give_hooks(old: nn.Module, new: nn.Module) -> None:
    """Adds the hooks of `old` to `new`, after those of `new`."""
    for attribute in _HOOKS:
        hooks = getattr(old, attribute, None)
        if hooks:
            getattr(new, attribute).update(hooks)
    copy_kind_of_backward_hooks(old, new)


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
