"""Parameters and buffers of a module, and their transfer to a replacing module."""

import torch
from torch import nn

from ..base._torch import buffers_of, copy_kind_of_backward_hooks, parameters_of


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters and buffers of a module itself, by name."""
    named_tensors = [*parameters_of(module).items(), *buffers_of(module).items()]
    return [(name, tensor) for name, tensor in named_tensors if tensor is not None]


def replace_tensor(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    """Replaces a parameter or buffer."""
    setattr(module, name, tensor)  # not in its dictionary alone: an LSTM also has its parameters in a list


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
        elif isinstance(tensor, nn.Parameter) != isinstance(fresh[path], nn.Parameter):
            notes.append(f"{path} is a {'parameter' if isinstance(fresh.pop(path), nn.Parameter) else 'buffer'} now")
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
    for attribute in vars(nn.Module()):  # of torch alone: a user's attribute may have such a name too
        if "_hooks" in attribute and (hooks := getattr(old, attribute)):
            getattr(new, attribute).update(hooks)
    copy_kind_of_backward_hooks(old, new)


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
