"""Runs a graph in place of a module's forward, with the operations that the schedule inserts into it: subgraphs, functions,
exchanges between ranks.
"""

import copy
import inspect
import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ...base._torch import TreeSpec, tree_flatten
from ...base.errors import ScheduleError
from ..forward import Inner, Layer

ITSELF = "_the_traced_module_itself"
"""Target of the attribute node for the traced module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallForm:
    """The call by which a module was traced, and which of its arguments are inputs of the graph."""

    spec: TreeSpec
    """Tree of the arguments by name, with defaults filled in."""
    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    """Leaves of the tree: an Input for an input of the graph, otherwise a constant of the graph."""
    positional: int
    """Number of positional arguments."""


@dataclass(frozen=True, slots=True)
class Input:
    """Placeholder for a value that is an input of the graph."""

    dims: int | None = None
    """Number of dimensions of a tensor; None for another value."""

    @staticmethod
    def of(value: Any) -> "Input":
        return Input(value.dim() if isinstance(value, torch.Tensor) else None)

    def fits(self, value: Any) -> bool:
        """Returns True if the graph accepts a value for this input."""
        return self.dims is None or (isinstance(value, torch.Tensor) and value.dim() == self.dims)

    def __str__(self) -> str:
        return "anything" if self.dims is None else f"a tensor of {self.dims} dimensions"


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of a module's forward by name, with defaults filled in.

    None in `**kwargs` is left out: modules pass optional arguments on even if they did not get them.
    """
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    named_arguments = dict(list(bound.arguments.items())[1:])
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named_arguments[parameter.name] = {
                name: value for name, value in named_arguments[parameter.name].items() if value is not None
            }
    return named_arguments


class Traced(Layer):
    """Runs a graph in place of the module's own forward.

    The module itself is not changed: the graph calls its children, parameters and hooks by name, so `state_dict` stays
    the same.
    """

    order = 0

    def __init__(self, graph: fx.Graph, fixed: dict[str, Any], flatten: bool, form: CallForm | None = None) -> None:
        self.graph = graph
        self.fixed = fixed
        self.flatten = flatten
        self.form = form
        self.function: Callable[..., Any] | None = None

    def changed(self) -> None:
        """Must be called after the graph was edited: the next call compiles it again."""
        tidy(self.graph)
        self.function = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Traced":
        copied = Traced(copy.deepcopy(self.graph, memo), self.fixed, self.flatten, self.form)
        for node in copied.graph.nodes:
            if node.op == "call_function" and hasattr(node.target, "fresh"):
                # Compiled code of this model is not valid for the copy.
                node.target = node.target.fresh()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "function": None}  # generated code cannot be pickled

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.function is None:
            self.function = function_of(self.graph)
        return self.function(module, *self._inputs(module, args, kwargs))

    def _by_form(self, module: nn.Module, form: CallForm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        leaves, spec = tree_flatten(arguments(module, args, kwargs))
        if spec != form.spec:
            raise ScheduleError(
                f"{type(module).__name__} was traced with the arguments {', '.join(form.names)}, but is called with "
                f"others; trace it with examples= of this call"
            )
        inputs = []
        for name, leaf, value in zip(form.names, form.leaves, leaves):
            if isinstance(leaf, Input):
                if not leaf.fits(value):
                    actual = Input.of(value) if isinstance(value, torch.Tensor) else repr(value)
                    raise ScheduleError(
                        f"{type(module).__name__} was traced with {leaf} for {name}, but is called with {actual}; "
                        "trace it with examples= of this call"
                    )
                inputs.append(value)
            elif leaf is not value and leaf != value:
                raise ScheduleError(
                    f"{type(module).__name__} was traced with {name}={leaf!r}, but is called with another value; "
                    f"trace(inputs=['{name}']), or trace it with examples= of this call"
                )
        return inputs

    def _inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if self.form is not None:
            return self._by_form(module, self.form, args, kwargs)
        if not kwargs and not self.fixed and len(args) == sum(node.op == "placeholder" for node in self.graph.nodes):
            return list(args)
        named_arguments = arguments(module, args, kwargs)
        for name, value in self.fixed.items():
            if named_arguments[name] is not value and named_arguments[name] != value:
                raise ScheduleError(
                    f"{type(module).__name__} was traced with {name}={value!r}, but is called with another "
                    f"value; trace(inputs=['{name}'])"
                )
        return [named_arguments[node.target] for node in self.graph.nodes if node.op == "placeholder"]


def function_of(graph: fx.Graph) -> Callable[..., Any]:
    """Returns the graph as a function of the module and the graph's inputs."""
    code = graph.python_code("self")
    source = code.src.replace(f"self.{ITSELF}", "self")
    namespace: dict[str, Any] = dict(code.globals)
    name = f"<graph {id(graph)}>"
    # Tracebacks then show lines of the generated code.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)
    return namespace["forward"]


def tidy(graph: fx.Graph) -> None:
    """Removes unused attribute nodes; unused operations stay, since they may have side effects."""
    for node in reversed(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)


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
