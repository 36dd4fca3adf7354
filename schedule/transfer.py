"""What a module leaves to the one that replaces it: parameters, buffers, hooks, training mode."""

import torch
from torch import nn

from ..base._torch import buffers_of, copy_kind_of_backward_hooks, parameters_of

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
    """Gives `new` the tensors of `old` whose names and shapes match, its hooks and its training mode.

    The tensors are the very objects of `old`, so that ties to the rest of the model hold.

    Returns:
        What could not be kept, a sentence each.
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
            holder = new.get_submodule(parent)
            (parameters_of(holder) if name in parameters_of(holder) else buffers_of(holder))[name] = tensor
    notes.extend(f"{path} {tuple(tensor.shape)} has the value it came with" for path, tensor in fresh.items())
    give_hooks(old, new)
    new.train(old.training)
    return notes


def give_hooks(old: nn.Module, new: nn.Module) -> None:
    """Gives a module the hooks of another, after its own."""
    for attribute in _HOOKS:
        kept = getattr(old, attribute, None)
        if kept:
            getattr(new, attribute).update(kept)
    copy_kind_of_backward_hooks(old, new)


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
