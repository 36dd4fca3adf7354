"""Finds losses, logits and tensors in outputs of models, and caches in their arguments."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..base._torch import tree_flatten


def named(output: Any, name: str) -> torch.Tensor | None:
    """Returns the floating-point tensor that a model's output has as this attribute or key; None if there is none."""
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, torch.Tensor) and value.is_floating_point() else None


def loss_of(output: Any) -> torch.Tensor | None:
    """Returns the loss in a model's output, or None."""
    return named(output, "loss")


def logits_of(output: Any) -> torch.Tensor | None:
    """Returns the logits in a model's output: the entry `logits`, or the first floating-point tensor."""
    logits = named(output, "logits")
    return logits if logits is not None else next(iter(tensors_of(output)), None)


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Returns the floating-point tensors of a model's output, in order, without caches.

    Logits may be sharded over the vocabulary or unmaterialised.
    """
    if isinstance(output, dict):
        output = [value for value in output.values() if isinstance(value, (torch.Tensor, tuple, list, dict))]
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    leaves = tree_flatten(output)[0]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with None for every cache, which a module that runs twice would write twice."""
    module = sys.modules.get("transformers.cache_utils")  # without importing it: no cache exists otherwise
    if module is None:
        return args, kwargs
    args = tuple(None if isinstance(argument, module.Cache) else argument for argument in args)
    return args, {key: None if isinstance(value, module.Cache) else value for key, value in kwargs.items()}
