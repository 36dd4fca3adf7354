"""Example inputs of a module, where there are those of a module above it: what that calls it with."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ...base._torch import tree_map
from ...base._transformers import values_unread
from ..parallel.partition import meta_copy
from ..quiet import quiet
from ..tree import ScheduledModule

Example = tuple[tuple[Any, ...], dict[str, Any]]


def as_call(inputs: Any) -> Example:
    """Example inputs as positional and keyword arguments."""
    if isinstance(inputs, dict):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def example_of(sch: ScheduledModule) -> Example | None:
    """How a module is called where the nearest module above it with example inputs runs on them; None where none has,
    or where its way does not lead there.

    That module is run up to the call: without weights, where its code does not look at values, otherwise as it is.
    """
    known = sch.tree.examples
    parts = sch.path.split(".") if sch.path else []
    for depth in range(len(parts), -1, -1):
        path = ".".join(parts[:depth])
        if path in known:
            if path == sch.path:
                return known[path]
            found = _called(sch.tree.module.get_submodule(path), ".".join(parts[depth:]), known[path])
            if found is not None:
                known[sch.path] = found
            return found
    return None


class _Reached(BaseException):
    """Unwinds a forward at the call that was looked for. Not an error, hence no Exception."""


def _called(module: nn.Module, target: str, example: Example) -> Example | None:
    """What a module below one is called with when that is called so."""
    bare = tree_map(lambda each: each.to("meta") if isinstance(each, torch.Tensor) else each, example)
    # Positions that are not given count from 0, so that no row packs several sequences.
    packs = nullcontext() if "position_ids" in example[1] else values_unread()
    try:
        with packs:
            return _run(meta_copy(module), target, bare)
    except (RuntimeError, NotImplementedError, ValueError):  # it looks at values
        if any(each.is_meta for each in module.parameters()):
            return None
        return _run(module, target, example)


def _run(module: nn.Module, target: str, example: Example) -> Example | None:
    found: list[Example] = []

    def note(child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args, kwargs))
        raise _Reached

    handle = module.get_submodule(target).register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    try:
        with torch.no_grad(), torch.random.fork_rng(), quiet(module, training=False):
            module(*example[0], **example[1])
    except _Reached:
        pass
    finally:
        handle.remove()
    return found[0] if found else None
