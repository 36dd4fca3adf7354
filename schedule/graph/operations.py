"""Operations that the schedule inserts into a graph: subgraphs, functions, exchanges between ranks."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ...base._torch import TreeSpec, tree_unflatten
from ...base.errors import ScheduleError
from ..parallel.exchange import InputSync, OutputSync
from .trace import function_of


class NamedOperation:
    """A callable as an operation of a graph, with the names by which fx refers to it in the graph's code."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__


class SubgraphCall(NamedOperation):
    """A subgraph as one operation of the surrounding graph, called with the traced module and its inputs."""

    def __init__(self, graph: fx.Graph, name: str, compiler: Any = "none", checkpoint: Any = None) -> None:
        self.graph = graph
        self.compiler = compiler
        self.checkpoint = checkpoint
        self.function: Callable[..., Any] | None = None
        super().__init__(name)

    def fresh(self) -> "SubgraphCall":
        """Returns the same region, not compiled yet."""
        return SubgraphCall(self.graph, self.__name__, self.compiler, self.checkpoint)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "function": None}  # compiled code cannot be pickled or copied

    def __call__(self, module: nn.Module, *inputs: Any) -> Any:
        if self.function is None:
            self.function = compiled(function_of(self.graph), self.compiler)
        if self.checkpoint is not None:
            return torch_checkpoint(self.function, module, *inputs, use_reentrant=False, **self.checkpoint(module))
        return self.function(module, *inputs)


class Call(NamedOperation):
    """A callable as an operation of a graph, under a valid name."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = function
        name = name or re.sub(r"\W", "_", getattr(function, "__name__", type(function).__name__)).strip("_")
        super().__init__(name or "function")

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class SyncCall(NamedOperation):
    """The `sync` of a replaced module, as an operation on the replacement's inputs or outputs."""

    def __init__(self, hook: InputSync | OutputSync) -> None:
        self.hook = hook
        super().__init__(f"sync_{hook.sync.mode}")

    def __call__(self, value: Any) -> Any:
        if isinstance(self.hook, OutputSync):
            return self.hook(None, (), value)
        is_floating_point = isinstance(value, torch.Tensor) and value.is_floating_point()
        return self.hook.function(value) if is_floating_point else value


class TensorCall(NamedOperation):
    """A function of a module's parameter, as an operation between the parameter and its users."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
        self.function = function
        super().__init__(name)

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return self.function(value)


class Unflatten(NamedOperation):
    """Converts the results of an exported graph to the module's output structure."""

    def __init__(self, spec: TreeSpec) -> None:
        self.spec = spec
        super().__init__("results")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unflatten) and self.spec == other.spec

    __hash__ = object.__hash__

    def __call__(self, *leaves: Any) -> Any:
        return tree_unflatten(leaves, self.spec)


COMPILERS = ("inductor", "none")
"""Compilers by name."""


def compiled(function: Callable[..., Any], compiler: str | Callable[..., Any]) -> Callable[..., Any]:
    """Returns the compiled function; the compiler is `inductor`, `none`, or a function of a function."""
    if compiler == "none":
        return function
    if isinstance(compiler, str):
        return torch.compile(function)
    result = compiler(function)
    if not callable(result):
        raise ScheduleError(f"fuse: the compiler must return a callable, but returned {type(result).__name__}")
    return result
