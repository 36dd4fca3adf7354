"""Tracing one module into a graph, and running the graph in the module's place."""

import copy
import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from ..._torch import has_backward_hooks, has_forward_hooks
from ...errors import ScheduleError, TraceError
from ..forward import Layer

ITSELF = "_the_traced_module_itself"
"""Target of the attribute node that stands for the traced module."""

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


class Traced(Layer):
    """Runs a graph in the place of the module's own forward.

    The module stays what it is: its children, parameters and hooks are those that the graph calls by name, so
    nothing moves in `state_dict`.
    """

    order = 0

    def __init__(self, graph: fx.Graph, fixed: dict[str, Any], flatten: bool) -> None:
        self.graph = graph
        self.fixed = fixed
        self.flatten = flatten
        self.function: Callable[..., Any] | None = None

    def changed(self) -> None:
        """Takes note that the graph was edited."""
        _tidy(self.graph)
        self.function = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Traced":
        new = Traced(copy.deepcopy(self.graph, memo), self.fixed, self.flatten)
        for node in new.graph.nodes:
            if node.op == "call_function" and hasattr(node.target, "fresh"):
                # What is compiled for this model is not for the copy.
                node.target = node.target.fresh()
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "function": None}

    def __call__(
        self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.function is None:
            self.function = function_of(self.graph)
        return self.function(module, *self._inputs(module, args, kwargs))

    def _inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if not kwargs and not self.fixed and len(args) == sum(n.op == "placeholder" for n in self.graph.nodes):
            return list(args)
        signature = inspect.signature(type(module).forward)
        bound = signature.bind(module, *args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        for name, value in self.fixed.items():
            if given[name] is not value and given[name] != value:
                raise ScheduleError(
                    f"{type(module).__name__} was traced with {name}={value!r}, but is called with another "
                    f"value; trace(inputs=['{name}'])"
                )
        return [given[node.target] for node in self.graph.nodes if node.op == "placeholder"]


def function_of(graph: fx.Graph) -> Callable[..., Any]:
    """The graph as a function of the module and the graph's inputs."""
    code = graph.python_code("self")
    source = code.src.replace(f"self.{ITSELF}", "self")
    space: dict[str, Any] = dict(code.globals)
    name = f"<graph {id(graph)}>"
    # So that tracebacks show the line.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), space)
    return space["forward"]


def trace(module: nn.Module, label: str, flatten: bool, leaves: Sequence[Any], inputs: Sequence[str]) -> Traced:
    """A module's forward as a graph; the module is left as it was.

    Raises:
        TraceError: the forward does what a graph cannot express; names the operation and the line.
    """
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    unknown_inputs = set(inputs) - {p.name for p in parameters}
    if unknown_inputs:
        raise TraceError(f"trace of '{label}': inputs must be parameters of its forward, but has {unknown_inputs}")
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    fixed: dict[str, Any] = {
        p.name: {} if p.kind is p.VAR_KEYWORD else () if p.kind is p.VAR_POSITIONAL else p.default
        for p in parameters
        if p.kind in variadic or (p.default is not p.empty and p.name not in inputs)
    }
    tracer = _Tracer(module, flatten, leaves, fixed)
    try:
        with _training_restored(module):
            graph = tracer.trace(module)
    except Exception as error:
        raise TraceError(f"trace of '{label}': {_cause(error)}") from error
    _tidy(graph)
    return Traced(graph, fixed, flatten)


def _tidy(graph: fx.Graph) -> None:
    """Drops attributes that nothing reads; operations stay, since they may act by side effects."""
    for node in reversed(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)


class _Tracer(fx.Tracer):
    def __init__(self, root: nn.Module, flatten: bool, leaves: Sequence[Any], fixed: dict[str, Any]) -> None:
        super().__init__(autowrap_modules=())
        self.top, self.flatten, self.leaves, self.fixed = root, flatten, leaves, fixed

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if not self.flatten or "forward" in m.__dict__ or _hooked(m):
            # What is scheduled itself stays a call, or its layers and hooks would be lost.
            return True
        for leaf in self.leaves:
            if isinstance(leaf, str) and re.fullmatch(leaf, module_qualified_name):
                return True
            if isinstance(leaf, type) and isinstance(m, leaf):
                return True
        return m.__module__.startswith("torch.nn") and not isinstance(m, (nn.Sequential, nn.ModuleList))

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        # `self.training` is read when the graph runs, not when it is made.
        for path, module in self.top.named_modules():
            if path == "" or not self.is_leaf_module(module, path):
                target = f"{path}.training" if path else "training"
                module.__dict__["training"] = self.create_proxy("get_attr", target, (), {})
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        args: list[Any] = [self.top]
        keywords: dict[str, Any] = {}
        for p in parameters:
            if p.name not in self.fixed:
                value = self.create_proxy("placeholder", p.name, (), {})
                if p.kind is p.KEYWORD_ONLY:
                    keywords[p.name] = value
                else:
                    args.append(value)
            elif p.kind is p.KEYWORD_ONLY:
                keywords[p.name] = self.fixed[p.name]
            elif p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                args.append(self.fixed[p.name])
        return (lambda *a: root_fn(*a, **keywords)), args


@contextmanager
def _training_restored(module: nn.Module) -> Iterator[None]:
    before = {each: each.training for each in module.modules()}
    try:
        yield
    finally:
        for each, value in before.items():
            each.__dict__["training"] = value


def _hooked(module: nn.Module) -> bool:
    return has_forward_hooks(module) or has_backward_hooks(module)


def _cause(error: Exception) -> str:
    """The operation and the line of model code behind an error in tracing."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_TORCH, _HERE)) and not frame.filename.startswith("<")
    ]
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if not frames:
        return reason
    last = frames[-1]
    return f"'{last.line}' at {last.filename}:{last.lineno} in {last.name}: {reason}"
