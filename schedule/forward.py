"""Calls of modules: layers around a forward, without a wrapper module, and what its arguments and outputs contain.

A wrapper would change the names in `state_dict`; a closure would not support deepcopy and pickling. So a module's
`forward` becomes a `Forward`, an object that refers to its module and is copied with it.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from ..base._torch import tree_flatten

Inner = Callable[..., Any]
"""The layers inside another one, as a function: `inner(*args, **kwargs)` returns the module's output."""


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the arguments of a module's forward."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]  # without self


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments of a call of a module's forward by name."""
    return {**dict(zip(argument_names(module), args)), **kwargs}


class Layer:
    """Code around a module's forward. Instances are plain data and are copied with the module."""

    order: ClassVar[int] = 0
    """Layers with a higher order are further outside."""
    alters: ClassVar[bool] = False
    """True if the module's output differs on purpose and is completed outside."""
    divisible: ClassVar[bool] = False
    """True if the module's own code runs inside, so that a pipeline can be cut there."""

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the module's output."""
        raise NotImplementedError


class Forward:
    """A module's forward with layers around it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.original = module.__dict__.get("forward")
        self.layers: list[Layer] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The innermost call is the model's own code without our code between: torch.compile counts compilations by
        # function, and a function shared by all modules would soon reach its limit.
        inner = self.original
        if inner is None:
            inner = functools.partial(type(self.module).forward, self.module)
        for layer in self.layers:
            inner = functools.partial(_within, layer, self.module, inner)
        return inner(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        if self.original is not None:
            return inspect.signature(self.original)
        return inspect.signature(type(self.module).forward.__get__(self.module))


def _within(layer: Layer, module: nn.Module, inner: Inner, *args: Any, **kwargs: Any) -> Any:
    return layer(module, inner, args, kwargs)


def add_layer(module: nn.Module, layer: Layer) -> None:
    """Adds a layer around a module's forward, sorted by `order`."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, Forward):  # the first layer, perhaps around a forward that another library has set
        forward = Forward(module)
        module.__dict__["forward"] = forward
    forward.layers.append(layer)
    forward.layers.sort(key=lambda present: present.order)  # stable: of equal order, the later one is outside


AnyLayer = TypeVar("AnyLayer", bound=Layer)


def layers_of(module: nn.Module, kind: type[AnyLayer]) -> list[AnyLayer]:
    """Returns the layers of a kind around a module's forward, innermost first."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, Forward):
        return []
    return [layer for layer in forward.layers if isinstance(layer, kind)]


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
