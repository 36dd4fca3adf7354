"""Arguments and outputs of models: caches, losses, logits, tensors."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..base._torch import tree_flatten


def named(output: Any, name: str) -> torch.Tensor | None:
    """A floating-point tensor of a model's output by its name, as an attribute or a key; None if there is none."""
    found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return found if isinstance(found, torch.Tensor) and found.is_floating_point() else None


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss that a model returned with its outputs, or None."""
    return named(output, "loss")


def logits_of(output: Any) -> torch.Tensor | None:
    """Logits in a model's output: the entry of that name, or its first floating-point tensor."""
    found = named(output, "logits")
    return found if found is not None else next(iter(tensors_of(output)), None)


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Floating-point tensors of a model's output, in order, without caches; logits unchanged, possibly cut over the
    vocabulary or not materialised.
    """
    if isinstance(output, dict):
        output = [value for value in output.values() if isinstance(value, (torch.Tensor, tuple, list, dict))]
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, each.name) for each in dataclasses.fields(output)]
    leaves = tree_flatten(output)[0]
    return [each for each in leaves if isinstance(each, torch.Tensor) and each.is_floating_point()]


def without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with None for every cache: if run twice, a module would write it twice."""
    module = sys.modules.get("transformers.cache_utils")
    if module is None:
        return args, kwargs
    args = tuple(None if isinstance(each, module.Cache) else each for each in args)
    return args, {key: None if isinstance(value, module.Cache) else value for key, value in kwargs.items()}
